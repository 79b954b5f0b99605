// The engine: one loaded model, many conversations.
//
//   Engine engine(std::move(executor));
//   Generation answer = engine.generate({.prompt = ids, .stop_ids = stop_ids});
//   while (auto event = answer.next()) ...
//
// Threads. One thread, owned by Engine, drives the executor, and with it the device, the state slots, the KV
// blocks and all sequences. Everyone else hands over requests through a bounded queue (generate(), from any
// thread) and reads events from a bounded channel (Generation, one reader at a time). No lock is held while
// the device works or a constraint is asked. A reader that leaves, or that lets its channel fill up, is
// cancelled; the others do not notice. Where the thread itself fails (memory of the host ran out), all that
// run end with Finish::error, and the engine goes on with those that wait.
//
// Callers hand over the whole token prefix of a conversation. What the engine still has of it is not computed
// again: see engine/prefix_cache.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "engine/executor.h"
#include "engine/request.h"

namespace lily::engine {

class DiskCache;
class EventChannel;
class SessionReader;
struct SessionHeader;

// The reader's end of a request. Moves, does not copy; may outlive the engine. Destroying it cancels.
class Generation {
 public:
  explicit Generation(std::shared_ptr<EventChannel> channel);
  Generation(Generation&&) noexcept;
  Generation& operator=(Generation&&) noexcept;
  ~Generation();

  // Waits for the next event. Nothing comes after Finished.
  std::optional<Event> next();
  // Waits for at most `timeout`; nothing also if none came (done() tells).
  std::optional<Event> next_for(std::chrono::milliseconds timeout);
  bool done() const;  // Finished has been read

  // The request ends with Finish::cancelled within one prompt chunk or one token. From any thread.
  void cancel();

 private:
  std::shared_ptr<EventChannel> channel_;
};

struct EngineOptions {
  int max_sequences = 4;      // that are computed at the same time; the others wait
  int queue_capacity = 64;    // requests that wait
  int event_capacity = 4096;  // tokens that a reader may leave unread before it is cancelled
  // Rows of a prompt chunk while other sequences are writing tokens, so that these do not wait long; 0: as
  // ever, and then a prompt is cut in the same chunks whatever else runs.
  int shared_chunk_rows = 0;
  // Tokens of a prompt after which another state is kept, at the end of a chunk; 0: never. One that turns out
  // to be of little use is the first to go.
  int state_interval = 4096;
  // What other programs could have of the machine's memory, -1 where it is not known. If it is less than
  // least_available_bytes, the cache gives memory back, as far as the device can (Limits::pool_bytes). Empty:
  // never. Called from the engine's thread, a few times a second.
  std::function<int64_t()> available_memory;
  int64_t least_available_bytes = int64_t{1} << 30;
};

struct EngineStats {
  int n_waiting = 0, n_running = 0;
  int64_t n_requests = 0, n_failed = 0;  // since the start
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  int64_t n_steps = 0;
  int n_cached_states = 0;  // entries of the prefix cache
  int64_t cache_hits = 0, cache_misses = 0;
  int64_t cache_misses_parted =
      0;  // of these: prompts that begin like one remembered, but no state was kept there
  int64_t cache_evictions = 0;
  int64_t cache_disk_hits = 0;          // saved states that were brought back
  int n_free_blocks = 0, n_blocks = 0;  // KV
  int n_free_states = 0, n_states = 0;
  int64_t resident_bytes = 0, pool_bytes = 0;  // of states and blocks, where these have one budget
  int64_t given_back_bytes = 0;                // since the start, because the machine's memory was short

  double cached_share() const {
    return prompt_tokens > 0 ? static_cast<double>(cached_tokens) / static_cast<double>(prompt_tokens) : 0;
  }
};

class Engine {
 public:
  // With a disk cache, which outlives the engine, states are kept there too.
  explicit Engine(std::unique_ptr<Executor> executor, const EngineOptions& options = {},
                  DiskCache* disk = nullptr);
  // Requests that wait or run end with Finish::cancelled; a step in flight is waited for, and what is to be
  // saved is.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws Error(Fault::user) for what cannot be done (an empty prompt, an id out of range, ContextExceeded),
  // QueueFull when too many wait.
  Generation generate(GenerateRequest request);

  const Limits& limits() const;
  EngineStats stats() const;
  // Requests that wait or run end with Finish::cancelled, and no others are taken. Waits for a step in
  // flight: for ever, if the device never brings it back. What is to be saved is left to the destructor.
  void stop();
  // Drops all states and KV blocks that no running request uses, those on the disk too.
  void clear_cache();
  // Writes the longest state remembered that `tokens` begin with, with what the header says of the
  // conversation; false if there is none. Waits for it; throws Error(Fault::device) where the disk fails.
  bool save_session(std::span<const int32_t> tokens, const std::filesystem::path& path, SessionHeader header);
  // Takes up the state of a saved session; false if there is no room for it beside what runs. Throws if it is
  // damaged or another model's.
  bool load_session(SessionReader& reader);

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace lily::engine
