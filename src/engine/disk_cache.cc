#include "engine/disk_cache.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/folder.h"
#include "base/log.h"
#include "base/printable.h"

namespace lily::engine {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".lily";
constexpr size_t kIdentityDigitsInName = 16;
constexpr size_t kHashDigits = 16;
// Replayed answers are small and many: they may have one part in so many of the folder.
constexpr int64_t kReplayShare = 16;
constexpr double kYoungS = 60;  // differences of age below this do not count

char letter_of(SessionKind kind) {
  switch (kind) {
    case SessionKind::turn:
      return 't';
    case SessionKind::stable:
      return 's';
    case SessionKind::shared:
      return 'p';
    case SessionKind::replay:
      return 'r';
    case SessionKind::chat:
      break;
  }
  LILY_CHECK(false, "a saved chat is not part of a cache");
}

std::optional<SessionKind> kind_of(char letter) {
  for (const SessionKind kind :
       {SessionKind::turn, SessionKind::stable, SessionKind::shared, SessionKind::replay})
    if (letter == letter_of(kind)) return kind;
  return {};
}

template <typename T>
std::optional<T> number_of(std::string_view digits, int base) {
  T value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) return {};
  return value;
}

// A file of the cache as the folder shows it, of any identity.
struct Found {
  fs::path path;
  int64_t n_bytes = 0;
  double age_s = 0;
  int64_t n_tokens = 0;
  bool is_replay = false;
  // Work that a byte saves, the less the longer nobody has asked for it.
  double worth() const {
    return static_cast<double>(n_tokens) / static_cast<double>(n_bytes) / (std::max(0.0, age_s) + kYoungS);
  }
};

void touch(const fs::path& path) {
  std::error_code ignored;
  fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);
}

}  // namespace

DiskCache::DiskCache(DiskCacheOptions options)
    : options_(std::move(options)), prefix_(options_.identity.substr(0, kIdentityDigitsInName) + "-") {
  LILY_CHECK(options_.identity.size() == 64, "identity '{}'", options_.identity);
  std::error_code error;
  const bool is_new = fs::create_directories(options_.folder, error);
  if (error || !fs::is_directory(options_.folder))
    fail(Fault::user, "--cache-dir {}: is no folder and cannot be made one: {}",
         printable(options_.folder.string(), 400), error ? error.message() : "a file has that name");
  // Conversations are nobody else's.
  if (is_new) fs::permissions(options_.folder, fs::perms::owner_all, error);
  if (::access(options_.folder.c_str(), R_OK | W_OK | X_OK) != 0)
    fail(Fault::user, "--cache-dir {}: cannot be written to", printable(options_.folder.string(), 400));
  remove_left_over(options_.folder);
  make_room(0, false);  // it may be allowed less than the last time
  scan_if_changed();
  thread_ = std::thread([this] { run(); });
}

DiskCache::~DiskCache() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

// ---- Names

fs::path DiskCache::path_of(const SessionHeader& h) const {
  if (h.kind == SessionKind::replay)
    return options_.folder / fmt::format("{}r{}-{}{}", prefix_, h.replay.size(), h.conversation, kSuffix);
  return options_.folder / fmt::format("{}{}{}-{:016x}{}", prefix_, letter_of(h.kind), h.tokens.size(),
                                       hash_of(h.tokens), kSuffix);
}

// IDENTITY-KIND TOKENS-HASH.lily; `identity` ends in '-', or is empty for that of any.
std::optional<DiskCache::Entry> DiskCache::parse_name(std::string_view name, std::string_view identity) {
  if (!name.ends_with(kSuffix) || !name.starts_with(identity)) return {};
  name.remove_suffix(kSuffix.size());
  if (name.size() < kIdentityDigitsInName + 3 || name[kIdentityDigitsInName] != '-') return {};
  if (!number_of<uint64_t>(name.substr(0, kIdentityDigitsInName), 16)) return {};
  name.remove_prefix(kIdentityDigitsInName + 1);
  const auto kind = kind_of(name.front());
  const size_t dash = name.find('-');
  if (!kind || dash == std::string_view::npos) return {};
  const auto n_tokens = number_of<int64_t>(name.substr(1, dash - 1), 10);
  const std::string_view digits = name.substr(dash + 1);
  const auto hash = number_of<uint64_t>(digits.substr(0, kHashDigits), 16);
  if (!n_tokens || *n_tokens < 0 || !hash ||
      digits.size() != (*kind == SessionKind::replay ? 64 : kHashDigits))
    return {};
  return Entry{.kind = *kind, .n_tokens = *n_tokens, .hash = *hash};
}

// ---- What is there

void DiskCache::scan_if_changed() {
  std::error_code error;
  const fs::file_time_type now = fs::last_write_time(options_.folder, error);
  if (error || scanned_ == now) return;
  entries_.clear();
  scanned_.reset();  // should this fail
  std::ignore = for_each_name(options_.folder, [&](const char* name) {
    auto entry = parse_name(name, prefix_);
    if (!entry || ignored_.contains(name)) return;
    std::error_code gone;
    entry->n_bytes = static_cast<int64_t>(fs::file_size(options_.folder / name, gone));
    if (!gone) entries_.emplace(name, *entry);
  });
  // One that is so fresh may change again without its time changing.
  const bool is_settled = fs::file_time_type::clock::now() - now > std::chrono::milliseconds(100);
  scanned_ = is_settled ? std::optional(now) : std::nullopt;
}

std::optional<SessionReader> DiskCache::find(std::span<const int32_t> prompt, int64_t more_than,
                                             int64_t max_tokens) {
  max_tokens = std::min<int64_t>(max_tokens, std::ssize(prompt));
  std::map<int64_t, std::vector<std::pair<uint64_t, std::string>>> candidates;  // by number of tokens
  {
    const std::lock_guard lock(mutex_);
    scan_if_changed();
    for (const auto& [name, e] : entries_)
      if (e.kind != SessionKind::replay && e.n_tokens > more_than && e.n_tokens <= max_tokens)
        candidates[e.n_tokens].emplace_back(e.hash, name);
  }
  std::vector<std::string> names;  // those of fewest tokens first
  TokenHash hash;
  int64_t n_hashed = 0;
  for (const auto& [n_tokens, files] : candidates) {
    for (; n_hashed < n_tokens; ++n_hashed) hash.add(prompt[static_cast<size_t>(n_hashed)]);
    for (const auto& [wanted, name] : files)
      if (wanted == hash.value()) names.push_back(name);
  }
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    const fs::path path = options_.folder / *name;
    std::error_code gone;
    if (!fs::exists(path, gone)) continue;
    try {
      SessionReader reader(path);
      const std::vector<int32_t>& tokens = reader.header().tokens;
      if (reader.header().identity != options_.identity)
        fail(Fault::user, "{}: belongs to another model or build", printable(path.string(), 400));
      if (std::ssize(tokens) > max_tokens || std::ssize(tokens) <= more_than ||
          !std::equal(tokens.begin(), tokens.end(), prompt.begin()))
        fail(Fault::user, "{}: holds other tokens than its name says", printable(path.string(), 400));
      touch(path);
      return reader;
    } catch (const Error& e) {
      ignore(path, e.what());
    }
  }
  return {};
}

bool DiskCache::contains(std::span<const int32_t> tokens) {
  const uint64_t hash = hash_of(tokens);
  const std::lock_guard lock(mutex_);
  scan_if_changed();
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& named) {
    const Entry& e = named.second;
    return e.kind != SessionKind::replay && e.n_tokens == std::ssize(tokens) && e.hash == hash;
  });
}

void DiskCache::ignore(const fs::path& path, const std::string& why) {
  const std::string name = path.filename().string();
  {
    const std::lock_guard lock(mutex_);
    entries_.erase(name);
    if (!ignored_.insert(name).second) return;
    ++stats_.n_ignored;
  }
  log(LogLevel::warning, "a saved session is ignored: {}", why);
}

void DiskCache::keep(const std::string& conversation, const std::vector<int32_t>& ids) {
  const auto n_bytes = static_cast<int64_t>(4 * ids.size());
  {
    const std::lock_guard lock(mutex_);
    if (n_queued_bytes_ > 2 * options_.queue_bytes) return;  // the disk does not keep up
  }
  push(SessionHeader{.kind = SessionKind::replay,
                     .identity = options_.identity,
                     .conversation = conversation,
                     .replay = ids},
       n_bytes);
}

std::optional<std::vector<int32_t>> DiskCache::find(const std::string& conversation) {
  const uint64_t hash =
      number_of<uint64_t>(std::string_view(conversation).substr(0, kHashDigits), 16).value_or(0);
  std::vector<std::string> names;
  {
    const std::lock_guard lock(mutex_);
    scan_if_changed();
    for (const auto& [name, e] : entries_)
      if (e.kind == SessionKind::replay && e.hash == hash) names.push_back(name);
  }
  for (const std::string& name : names) {
    const fs::path path = options_.folder / name;
    std::error_code gone;
    if (!fs::exists(path, gone)) continue;
    try {
      const SessionReader reader(path);
      const SessionHeader& h = reader.header();
      if (h.identity != options_.identity)
        fail(Fault::user, "{}: belongs to another model or build", printable(path.string(), 400));
      if (h.conversation != conversation) continue;
      touch(path);
      return h.replay;
    } catch (const Error& e) {
      ignore(path, e.what());
    }
  }
  return {};
}

DiskCacheStats DiskCache::stats() {
  const std::lock_guard lock(mutex_);
  scan_if_changed();
  DiskCacheStats stats = stats_;
  for (const auto& [name, e] : entries_) {
    ++stats.n_files;
    stats.n_bytes += e.n_bytes;
  }
  return stats;
}

// ---- The queue

void DiskCache::push(Command command, int64_t n_bytes) {
  {
    const std::lock_guard lock(mutex_);
    queue_.emplace_back(std::move(command), n_bytes);
    n_queued_bytes_ += n_bytes;
  }
  changed_.notify_all();
}

void DiskCache::begin(SessionHeader header) {
  const auto n_bytes = static_cast<int64_t>(4 * header.tokens.size());
  push(std::move(header), n_bytes);
}

void DiskCache::add(std::vector<float> piece) {
  const auto n_bytes = static_cast<int64_t>(4 * piece.size());
  push(Piece{std::move(piece)}, n_bytes);
}

void DiskCache::end(bool is_whole) { push(End{is_whole}, 0); }

bool DiskCache::has_room() {
  const std::lock_guard lock(mutex_);
  return n_queued_bytes_ < options_.queue_bytes;
}

void DiskCache::await_room() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return n_queued_bytes_ < options_.queue_bytes; });
}

void DiskCache::flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !writing_; });
}

void DiskCache::clear() {
  flush();
  std::vector<std::string> names;
  {
    const std::lock_guard lock(mutex_);
    scanned_.reset();
    scan_if_changed();
    for (const auto& [name, e] : entries_) names.push_back(name);
    entries_.clear();
  }
  for (const std::string& name : names) remove(options_.folder / name);
}

void DiskCache::run() {
  for (;;) {
    Command command = End{false};
    int64_t n_bytes = 0;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) break;
      command = std::move(queue_.front().first);
      n_bytes = queue_.front().second;
      queue_.pop_front();
      writing_ = true;
    }
    try {
      carry_out(command);
    } catch (const std::exception& e) {
      writer_.reset();
      say_failed(e.what());
      const std::lock_guard lock(mutex_);
      ++stats_.n_failed;
    }
    command = End{false};  // gives its memory back before the room is announced
    {
      const std::lock_guard lock(mutex_);
      n_queued_bytes_ -= n_bytes;
      writing_ = false;
    }
    changed_.notify_all();
  }
  writer_.reset();
}

// A disk that is full stays so for a while: one line, and the next one when something was saved between.
void DiskCache::say_failed(const char* why) noexcept {
  try {
    if (std::exchange(last_failure_, why).empty()) log(LogLevel::warning, "a session is not saved: {}", why);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // No memory for a line about it; the statistics count it.
  }
}

void DiskCache::carry_out(Command& command) {
  if (auto* header = std::get_if<SessionHeader>(&command)) return carry_out_begin(std::move(*header));
  if (!writer_) return;  // the rest of one that has failed
  if (const auto* piece = std::get_if<Piece>(&command)) return writer_->add(piece->values);
  if (std::get<End>(command).is_whole) {
    writer_->publish();
    published(writer_->header());
    last_failure_.clear();
  }
  writer_.reset();
}

void DiskCache::carry_out_begin(SessionHeader header) {
  const bool is_replay = header.kind == SessionKind::replay;
  if (!make_room(header.file_bytes(), is_replay)) {
    if (!is_replay) writer_.reset();
    return;
  }
  const fs::path path = path_of(header);
  if (!is_replay) {
    writer_.reset();
    writer_.emplace(path, std::move(header));
    return;
  }
  // Comes from another thread, maybe in the middle of a snapshot.
  SessionWriter writer(path, std::move(header));
  writer.publish();
  published(writer.header());
}

// The last two of a conversation that grows stay; one in the middle of it saves little.
void DiskCache::published(const SessionHeader& header) {
  std::vector<std::string> outdated;
  {
    const std::lock_guard lock(mutex_);
    ++stats_.n_written;
    ignored_.erase(path_of(header).filename().string());
    scanned_.reset();
    if (header.kind != SessionKind::turn && header.kind != SessionKind::stable) return;
    scan_if_changed();
    std::map<int64_t, std::vector<std::pair<uint64_t, std::string>>> earlier;
    for (const auto& [name, e] : entries_)
      if (e.kind == header.kind && e.n_tokens < std::ssize(header.tokens))
        earlier[e.n_tokens].emplace_back(e.hash, name);
    TokenHash hash;
    int64_t n_hashed = 0;
    for (const auto& [n_tokens, files] : earlier) {
      for (; n_hashed < n_tokens; ++n_hashed) hash.add(header.tokens[static_cast<size_t>(n_hashed)]);
      for (const auto& [wanted, name] : files)
        if (wanted == hash.value()) outdated.push_back(name);
    }
    if (!outdated.empty()) outdated.pop_back();
    for (const std::string& name : outdated) entries_.erase(name);
  }
  for (const std::string& name : outdated) remove(options_.folder / name);
}

// ---- The size of the folder

// Counts what is there now, files of other models and other processes included.
bool DiskCache::make_room(int64_t n_bytes, bool is_replay) {
  const int64_t most = is_replay ? options_.max_bytes / kReplayShare : options_.max_bytes;
  if (n_bytes > most) {
    if (std::exchange(last_failure_, "too large").empty())
      log(LogLevel::notice, "a session of {} bytes is not saved: --cache-size is {}", n_bytes,
          options_.max_bytes);
    return false;
  }
  std::vector<Found> files;
  int64_t n_present = n_bytes, n_replay = is_replay ? n_bytes : 0;
  const auto now = fs::file_time_type::clock::now();
  std::ignore = for_each_name(options_.folder, [&](const char* name) {
    const auto entry = parse_name(name, "");
    if (!entry) return;
    std::error_code gone;
    Found file{.path = options_.folder / name, .n_tokens = entry->n_tokens};
    file.is_replay = entry->kind == SessionKind::replay;
    file.n_bytes = std::max<int64_t>(1, static_cast<int64_t>(fs::file_size(file.path, gone)));
    const auto written = gone ? now : fs::last_write_time(file.path, gone);
    if (gone) return;
    file.age_s = std::chrono::duration<double>(now - written).count();
    {
      const std::lock_guard lock(mutex_);
      if (ignored_.contains(name)) file.n_tokens = 0;  // goes first
    }
    n_present += file.n_bytes;
    if (file.is_replay) n_replay += file.n_bytes;
    files.push_back(std::move(file));
  });
  std::sort(files.begin(), files.end(), [](const Found& a, const Found& b) { return a.worth() < b.worth(); });
  const auto drop = [&](const Found& file) {
    remove(file.path);
    n_present -= file.n_bytes;
    if (file.is_replay) n_replay -= file.n_bytes;
  };
  for (const Found& file : files)
    if (file.is_replay && n_replay > options_.max_bytes / kReplayShare) drop(file);
  for (const Found& file : files)
    if (!file.is_replay && n_present > options_.max_bytes) drop(file);
  return n_present <= options_.max_bytes;
}

void DiskCache::remove(const fs::path& path) {
  std::error_code ignored;
  fs::remove(path, ignored);
  const std::lock_guard lock(mutex_);
  entries_.erase(path.filename().string());
}

}  // namespace lily::engine
