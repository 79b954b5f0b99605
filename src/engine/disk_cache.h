// Sessions and prefixes that outlive the process: a folder of session files (session_file.h), one a snapshot
// or a replayed answer.
//
// Files are found by their names: the identity of model and arithmetic, the number of tokens and their hash.
// What a file holds is believed only after its checksums and its tokens have been compared. Processes may
// share a folder: files appear whole, have the same name only if they hold the same, and one that has gone
// meanwhile is no error. What does not belong here is not touched.
//
// Threads: a thread of its own writes and deletes, so that the engine's only copies. Every member may be
// called from any thread, but begin() to end() belong to the engine's.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "engine/replay.h"
#include "engine/session_io.h"

namespace lily::engine {

struct DiskCacheOptions {
  std::filesystem::path folder;
  int64_t max_bytes = int64_t{16} << 30;
  std::string identity;  // 64 digits, of all that the state of a prefix depends on beside its tokens
  // A snapshot is written when it has been kept for so long: most give way to the next turn's before.
  std::chrono::milliseconds save_after = std::chrono::seconds(10);
  int64_t queue_bytes = int64_t{32} << 20;  // copied from the device and not yet written
};

struct DiskCacheStats {
  int64_t n_files = 0, n_bytes = 0;  // of this identity
  int64_t n_written = 0, n_failed = 0, n_ignored = 0;
};

class DiskCache final : public ReplayStore {
 public:
  // Makes the folder. Throws Error(Fault::user) where that cannot be done.
  explicit DiskCache(DiskCacheOptions options);
  ~DiskCache() override;  // what is queued is written
  DiskCache(const DiskCache&) = delete;
  DiskCache& operator=(const DiskCache&) = delete;

  const DiskCacheOptions& options() const { return options_; }

  // The snapshot of most tokens, more than `more_than` and at most `max_tokens`, that the prompt begins with.
  std::optional<SessionReader> find(std::span<const int32_t> prompt, int64_t more_than, int64_t max_tokens);
  bool contains(std::span<const int32_t> tokens);
  // A file that turned out not to be what it says; one line in the log, and it is not asked again.
  void ignore(const std::filesystem::path& path, const std::string& why);

  // One snapshot at a time: begin, its pieces in order as long as there is room, and end.
  void begin(SessionHeader header);
  bool has_room();
  void add(std::vector<float> piece);
  void end(bool is_whole);
  void await_room();
  // Until everything is written.
  void flush();
  // Deletes every file of this identity.
  void clear();

  void keep(const std::string& conversation, const std::vector<int32_t>& ids) override;
  std::optional<std::vector<int32_t>> find(const std::string& conversation) override;

  DiskCacheStats stats();

 private:
  // Of a file of this identity, told by its name.
  struct Entry {
    SessionKind kind = SessionKind::turn;
    int64_t n_tokens = 0;
    uint64_t hash = 0;  // of the tokens
    int64_t n_bytes = 0;
  };
  struct Piece {
    std::vector<float> values;
  };
  struct End {
    bool is_whole;
  };
  using Command = std::variant<SessionHeader, Piece, End>;

  std::filesystem::path path_of(const SessionHeader& header) const;
  static std::optional<Entry> parse_name(std::string_view name, std::string_view identity);
  void scan_if_changed();  // with the lock held
  void push(Command command, int64_t n_bytes);
  void run();
  void say_failed(const char* why) noexcept;
  void carry_out(Command& command);
  void carry_out_begin(SessionHeader header);
  void published(const SessionHeader& header);
  bool make_room(int64_t n_bytes, bool is_replay);
  void remove(const std::filesystem::path& path);

  const DiskCacheOptions options_;
  const std::string prefix_;  // of the names of files of this identity

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::string, Entry> entries_;  // by file name
  std::set<std::string> ignored_;         // files that have been found damaged
  std::optional<std::filesystem::file_time_type> scanned_;
  std::deque<std::pair<Command, int64_t>> queue_;
  int64_t n_queued_bytes_ = 0;
  bool writing_ = false, stopping_ = false;
  DiskCacheStats stats_;

  // The writer's thread only.
  std::optional<SessionWriter> writer_;
  std::string last_failure_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace lily::engine
