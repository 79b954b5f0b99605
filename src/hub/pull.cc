#include "hub/pull.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "hub/blob_hash.h"
#include "hub/cache.h"
#include "hub/part_file.h"
#include "model/config.h"

namespace lily::hub {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxSmallFileBytes = uint64_t{16} << 20;
// The links, and so that the disk is not full to the last byte when the download ends.
constexpr uint64_t kSpareBytes = uint64_t{64} << 20;

uint64_t size_of(const fs::path& path) {
  std::error_code error;
  const uint64_t n_bytes = fs::file_size(path, error);
  return error ? 0 : n_bytes;
}

// Fetches files into the blobs folder, several pieces at a time.
class Transfer {
 public:
  Transfer(const PullOptions& options, const std::string& commit, const CachedRepository& cached,
           const PullListener& listener)
      : options_(options), commit_(commit), cached_(cached), listener_(listener) {}

  void add(const RemoteFile& file);
  uint64_t n_bytes() const { return n_bytes_; }
  uint64_t n_missing() const { return n_bytes_ - n_present_; }
  uint64_t n_fetched() const { return n_fetched_; }

  // Throws Stopped or the first error of any thread, when all threads have ended.
  void run();

 private:
  struct Job {
    RemoteFile file;
    std::unique_ptr<PartFile> part;  // none: the blob is here and has to be verified
    int n_open = 0;                  // pieces that are not finished
    int n_failed_checks = 0;
  };
  struct Task {
    Job* job;
    int piece;  // -1: verify the blob that is here
  };

  bool stopped() const { return is_ending_ || listener_.stop(); }
  void open_part(Job& job);
  void work();
  void perform(HubClient& client, const Task& task);
  void verify_present(Job& job);
  void verify_part(Job& job);
  std::string hash_of(const RemoteFile& file, const fs::path& path);
  void push_pieces(Job& job);

  const PullOptions& options_;
  const std::string& commit_;
  const CachedRepository& cached_;
  const PullListener& listener_;
  uint64_t n_bytes_ = 0;
  std::atomic<uint64_t> n_present_{0}, n_fetched_{0};
  std::atomic<bool> is_ending_{false};
  std::deque<Job> jobs_;  // their addresses stay

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::vector<std::string> notices_;
  int n_unfinished_ = 0;  // jobs
  int n_workers_ = 0;
  std::exception_ptr error_;
};

void Transfer::add(const RemoteFile& file) {
  // Two names of one content are one blob.
  for (const Job& job : jobs_)
    if (job.file.blob_id == file.blob_id) return;
  Job& job = jobs_.emplace_back();
  job.file = file;
  n_bytes_ += file.n_bytes;
  ++n_unfinished_;
  std::error_code error;
  if (fs::is_regular_file(cached_.blob(file.blob_id), error) &&
      size_of(cached_.blob(file.blob_id)) == file.n_bytes) {
    n_present_ += file.n_bytes;
    tasks_.push_back({&job, -1});
  } else {
    open_part(job);
    n_present_ += job.part->n_present();
  }
}

// `n_present_` is the caller's affair.
void Transfer::open_part(Job& job) {
  job.part =
      std::make_unique<PartFile>(cached_.blob(job.file.blob_id), job.file.n_bytes, options_.piece_bytes);
  push_pieces(job);
}

void Transfer::push_pieces(Job& job) {
  job.n_open = job.part->n_pieces();
  for (int piece = 0; piece < job.part->n_pieces(); ++piece) tasks_.push_back({&job, piece});
}

std::string Transfer::hash_of(const RemoteFile& file, const fs::path& path) {
  const auto hash = blob_hash_of_file(file.blob_id, path, [&](uint64_t) { return !stopped(); });
  if (!hash) throw Stopped{};
  return *hash;
}

void Transfer::verify_present(Job& job) {
  const fs::path blob = cached_.blob(job.file.blob_id);
  const bool is_right = hash_of(job.file, blob) == job.file.blob_id;
  const std::lock_guard lock(mutex_);
  if (is_right) {
    --n_unfinished_;
  } else {
    notices_.push_back(fmt::format(
        "{}: the copy in the cache is damaged; it is fetched again and then replaced", job.file.name));
    open_part(job);
    n_present_ -= job.file.n_bytes - job.part->n_present();
  }
  changed_.notify_all();
}

void Transfer::verify_part(Job& job) {
  const std::string found = hash_of(job.file, job.part->data_path());
  if (found == job.file.blob_id) {
    job.part->publish();
    const std::lock_guard lock(mutex_);
    job.part.reset();
    --n_unfinished_;
    changed_.notify_all();
    return;
  }
  const std::string problem = fmt::format("{}: the checksum of what arrived is {}, the hub's is {}",
                                          job.file.name, found, job.file.blob_id);
  const std::lock_guard lock(mutex_);
  if (++job.n_failed_checks == 2) {
    job.part.reset();
    PartFile::remove(cached_.blob(job.file.blob_id));
    fail(Fault::model, "{}; it was fetched twice and thrown away: is a proxy in between that changes files?",
         problem);
  }
  notices_.push_back(problem + "; it is fetched once more");
  n_present_ -= job.file.n_bytes;
  job.part->restart();
  push_pieces(job);
  changed_.notify_all();
}

void Transfer::perform(HubClient& client, const Task& task) {
  Job& job = *task.job;
  if (task.piece < 0) return verify_present(job);
  PartFile& part = *job.part;
  if (part.next_of(task.piece) < part.end_of(task.piece))
    client.fetch(options_.repository, commit_, job.file.name, job.file.n_bytes, part.next_of(task.piece),
                 part.end_of(task.piece), [&](std::string_view bytes) {
                   part.append(task.piece, bytes);
                   n_present_ += bytes.size();
                   n_fetched_ += bytes.size();
                 });
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    is_last = --job.n_open == 0;
  }
  if (is_last) verify_part(job);
}

void Transfer::work() {
  try {
    HubClient client(options_.address, [this] { return stopped(); });
    for (;;) {
      Task task{};
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty() || n_unfinished_ == 0 || is_ending_; });
        if (is_ending_ || tasks_.empty()) break;
        task = tasks_.front();
        tasks_.pop_front();
      }
      if (stopped()) throw Stopped{};
      perform(client, task);
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
    is_ending_ = true;
  }
  const std::lock_guard lock(mutex_);
  --n_workers_;
  changed_.notify_all();
}

void Transfer::run() {
  std::vector<std::thread> threads;
  n_workers_ = options_.n_connections;
  for (int i = 0; i < options_.n_connections; ++i) threads.emplace_back([this] { work(); });
  const auto tell = [&](std::unique_lock<std::mutex>& lock) {
    std::vector<std::string> notices;
    notices.swap(notices_);
    lock.unlock();
    for (const std::string& notice : notices) listener_.on_notice(notice);
    const uint64_t n_present = n_present_;
    listener_.on_progress({n_bytes_, n_present, n_fetched_, n_present == n_bytes_});
    lock.lock();
  };
  std::unique_lock lock(mutex_);
  while (n_workers_ > 0) {
    tell(lock);
    changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return n_workers_ == 0; });
  }
  tell(lock);
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  if (error_) std::rethrow_exception(error_);
}

// A small file that is looked at before anything else is fetched. From the cache, if it is there and right.
std::string small_file(HubClient& client, const PullOptions& options, const std::string& commit,
                       const CachedRepository& cached, const RemoteFile& file) {
  if (file.n_bytes > kMaxSmallFileBytes || file.blob_id.empty())
    fail(Fault::model, "{}: the hub says it has {} bytes{}", file.name, file.n_bytes,
         file.blob_id.empty() ? " and gives no checksum; it is not fetched"
                              : ", more than such a file can have");
  if (size_of(cached.blob(file.blob_id)) == file.n_bytes) {
    std::string text = read_text_file(cached.blob(file.blob_id), kMaxSmallFileBytes);
    if (blob_hash_of(file.blob_id, text) == file.blob_id) return text;
  }
  std::string text;
  client.fetch(options.repository, commit, file.name, file.n_bytes, 0, file.n_bytes,
               [&](std::string_view bytes) { text += bytes; });
  if (const std::string found = blob_hash_of(file.blob_id, text); found != file.blob_id)
    fail(Fault::model,
         "{}: the checksum of what arrived is {}, the hub's is {}; it was thrown away: run lily pull again",
         file.name, found, file.blob_id);
  return text;
}

fs::path existing_parent(fs::path path) {
  std::error_code error;
  while (!fs::exists(path, error) && path.has_parent_path() && path != path.parent_path())
    path = path.parent_path();
  return path;
}

uint64_t free_bytes_at(const fs::path& path) {
  std::error_code error;
  const auto space = fs::space(existing_parent(path), error);
  return error ? UINT64_MAX : space.available;
}

std::string in_gb(uint64_t n_bytes) { return fmt::format("{:.2f} GB", static_cast<double>(n_bytes) / 1e9); }

}  // namespace

std::optional<Pulled> pull(const PullOptions& options, const PullListener& listener) {
  if (!is_repository_name(options.repository))
    fail(Fault::user, "'{}' is not the name of a repository; such a name is OWNER/NAME, as in {}",
         printable(options.repository), kRealModel);
  if (!is_revision_name(options.revision))
    fail(Fault::user, "'{}' is not the name of a revision", printable(options.revision));
  try {
    HubClient client(options.address, listener.stop);
    if (client.withholds_token())
      listener.on_notice("the access token is not sent, because HF_ENDPOINT is not https");
    const Listing listing =
        parse_listing(client.listing(options.repository, options.revision, kMaxListingBytes));

    const CachedRepository cached(options.cache, options.repository);
    const RemoteFile* config = listing.find("config.json");
    const RemoteFile* index = listing.find(kIndexFile);
    Pulled pulled{.commit = listing.commit};
    if (config == nullptr) choose_files(listing, "");  // says what is wrong
    const std::string config_text = small_file(client, options, listing.commit, cached, *config);
    // Better to hear it now than 20 GB later.
    model::parse_config(config_text);
    const std::string index_text =
        index == nullptr ? "" : small_file(client, options, listing.commit, cached, *index);
    pulled.files = choose_files(listing, index_text);

    const RepositoryLock lock(options.cache, options.repository);
    cached.make_folders();
    cached.write_blob(config->blob_id, config_text);
    if (index != nullptr) cached.write_blob(index->blob_id, index_text);
    Transfer transfer(options, listing.commit, cached, listener);
    for (const RemoteFile& file : pulled.files.wanted) transfer.add(file);
    pulled.n_bytes = transfer.n_bytes();
    const uint64_t n_free =
        options.free_bytes ? options.free_bytes(options.cache) : free_bytes_at(options.cache);
    if (transfer.n_missing() > 0 && n_free < transfer.n_missing() + kSpareBytes)
      fail(Fault::device,
           "{}: {} are still to come and {} are free; make room, or name another disk's folder in "
           "HF_HUB_CACHE",
           printable(options.cache.string(), 400), in_gb(transfer.n_missing() + kSpareBytes), in_gb(n_free));
    transfer.run();
    pulled.n_fetched_bytes = transfer.n_fetched();
    std::vector<CachedRepository::Link> links;
    for (const RemoteFile& file : pulled.files.wanted) links.push_back({file.name, file.blob_id});
    cached.publish(listing.commit, options.revision, std::move(links));
    if (const uint64_t n_stale = cached.remove_parts(); n_stale > 0)
      listener.on_notice(
          fmt::format("removed {} of a download of another revision that was not finished", in_gb(n_stale)));
    pulled.folder = cached.snapshot(listing.commit);
    return pulled;
  } catch (const Stopped&) {
    return std::nullopt;
  }
}

}  // namespace lily::hub
