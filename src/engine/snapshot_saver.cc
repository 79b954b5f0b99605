#include "engine/snapshot_saver.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"

namespace lily::engine {
namespace {

using backend::kKvBlockTokens;

// Shorter ones are read again as fast as from a disk.
constexpr int64_t kLeastTokens = 64;
// A machine that is never idle saves too, but later.
constexpr int kPatienceWhenBusy = 3;
constexpr auto kWriterPoll = std::chrono::milliseconds(5);

SessionKind kind_of(Snapshot::Kind kind) {
  switch (kind) {
    case Snapshot::Kind::turn_end:
      return SessionKind::turn;
    case Snapshot::Kind::stable:
      return SessionKind::stable;
    default:
      return SessionKind::shared;
  }
}

Snapshot::Kind kind_of(SessionKind kind) {
  return kind == SessionKind::turn || kind == SessionKind::chat ? Snapshot::Kind::turn_end
                                                                : Snapshot::Kind::stable;
}

int tokens_in(const std::vector<int32_t>& tokens, size_t block) {
  return static_cast<int>(
      std::min<int64_t>(kKvBlockTokens, std::ssize(tokens) - static_cast<int64_t>(block) * kKvBlockTokens));
}

bool begins_with(const std::vector<int32_t>& tokens, const std::vector<int32_t>& prefix) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

}  // namespace

SessionHeader header_of(const Snapshot& snapshot, const SavedLayout& layout) {
  return {.kind = kind_of(snapshot.kind),
          .session = snapshot.session,
          .tokens = snapshot.tokens,
          .state_floats = layout.state_floats,
          .kv_floats = layout.kv_floats,
          .kv_encoding = encoding_of(layout.kv_type)};
}

void write_snapshot(const Snapshot& snapshot, Executor& executor, SessionWriter& writer) {
  for (int piece = 0; piece < writer.header().n_state_pieces(); ++piece)
    writer.add(executor.read_state(snapshot.state.id(), piece));
  for (size_t i = 0; i < snapshot.blocks.size(); ++i)
    writer.add(executor.read_kv(snapshot.blocks[i].id(), tokens_in(snapshot.tokens, i)));
}

Snapshot restore(SessionReader& reader, Executor& executor, const std::function<StateHold()>& take_state,
                 const std::function<KvBlock()>& take_block) {
  const SessionHeader& header = reader.header();
  const SavedLayout layout = executor.saved_layout();
  if (header.state_floats != layout.state_floats || header.kv_floats != layout.kv_floats)
    fail(Fault::user, "{}: its state has other dimensions than this model's",
         printable(reader.path().string(), 400));
  Snapshot snapshot{.kind = kind_of(header.kind), .session = header.session, .tokens = header.tokens};
  snapshot.state = take_state();
  std::vector<float> values;
  for (int piece = 0; piece < header.n_state_pieces(); ++piece) {
    reader.next(values);
    executor.write_state(snapshot.state.id(), piece, values);
  }
  for (int piece = header.n_state_pieces(); piece < header.n_pieces(); ++piece) {
    reader.next(values);
    const KvBlock block = take_block();
    executor.write_kv(block.id(), header.piece_tokens(piece), values);
    snapshot.blocks.push_back(block.share(header.piece_tokens(piece)));
  }
  return snapshot;
}

// ---- Saving

SnapshotSaver::SnapshotSaver(Executor& executor, DiskCache& disk)
    : executor_(executor), disk_(disk), layout_(executor.saved_layout()) {}

void SnapshotSaver::note(const Snapshot& snapshot) {
  // A prompt's end serves only the same prompt, and one in its middle little more.
  if (snapshot.kind == Snapshot::Kind::prompt_end || snapshot.kind == Snapshot::Kind::sparse ||
      std::ssize(snapshot.tokens) < kLeastTokens)
    return;
  const SessionKind kind = kind_of(snapshot.kind);
  if (kind != SessionKind::shared)
    noted_.remove_if(
        [&](const Noted& n) { return n.kind == kind && begins_with(snapshot.tokens, n.tokens); });
  noted_.push_back({.kind = kind, .tokens = snapshot.tokens, .since = Clock::now()});
}

bool SnapshotSaver::is_due(Clock::time_point now, bool busy) const {
  if (copy_) return !busy || disk_.has_room();
  if (noted_.empty()) return false;
  return now - noted_.front().since >= disk_.options().save_after * (busy ? kPatienceWhenBusy : 1);
}

std::optional<SnapshotSaver::Clock::duration> SnapshotSaver::next_due(Clock::time_point now) const {
  if (copy_) return kWriterPoll;
  if (noted_.empty()) return {};
  return std::max<Clock::duration>(noted_.front().since + disk_.options().save_after - now, kWriterPoll);
}

// False if nothing of what is noted is left in the cache.
bool SnapshotSaver::begin(const PrefixCache& cache) {
  while (!noted_.empty()) {
    const Noted noted = std::move(noted_.front());
    noted_.pop_front();
    const Snapshot* const snapshot = cache.exactly(noted.tokens);
    if (snapshot == nullptr || disk_.contains(noted.tokens)) continue;
    Copy copy{.header = header_of(*snapshot, layout_), .state = snapshot->state.share()};
    copy.header.kind = noted.kind;
    copy.header.identity = disk_.options().identity;
    for (size_t i = 0; i < snapshot->blocks.size(); ++i)
      copy.blocks.push_back(snapshot->blocks[i].share(tokens_in(snapshot->tokens, i)));
    copy.n_pieces = copy.header.n_pieces();
    copy.n_state_pieces = copy.header.n_state_pieces();
    copy_ = std::move(copy);
    disk_.begin(copy_->header);
    return true;
  }
  return false;
}

void SnapshotSaver::copy_piece() {
  Copy& copy = *copy_;
  if (copy.next < copy.n_state_pieces) {
    disk_.add(executor_.read_state(copy.state.id(), copy.next));
  } else {
    const auto block = static_cast<size_t>(copy.next - copy.n_state_pieces);
    disk_.add(executor_.read_kv(copy.blocks[block].id(), copy.header.piece_tokens(copy.next)));
  }
  if (++copy.next < copy.n_pieces) return;
  disk_.end(true);
  copy_.reset();
}

bool SnapshotSaver::advance(const PrefixCache& cache) {
  if (!disk_.has_room()) return false;
  // What cannot be saved is no reason to end what runs.
  try {
    if (copy_ || begin(cache)) copy_piece();
  } catch (const std::exception& e) {
    give_up();
    log(LogLevel::warning, "a session is not saved: {}", e.what());
  }
  return true;
}

void SnapshotSaver::save_all(const PrefixCache& cache) {
  while (copy_ || !noted_.empty()) {
    disk_.await_room();
    advance(cache);
  }
}

bool SnapshotSaver::give_up() {
  if (!copy_) return false;
  copy_.reset();
  disk_.end(false);
  return true;
}

void SnapshotSaver::forget_all() {
  give_up();
  noted_.clear();
}

}  // namespace lily::engine
