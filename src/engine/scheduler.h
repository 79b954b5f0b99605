// Decides what runs next and what becomes of it. No threads here: the engine's loop calls it, tests may too.
//
// - A prompt is read in chunks, one chunk in flight at a time, round robin over the prompts. Chunks alternate
//   with decode steps of the sequences that are writing.
// - A decode step takes up to Limits::max_decode_rows sequences: those whose tokens the device chooses
//   together, or those whose tokens the host chooses.
// - A sequence is admitted if it can be finished: the KV blocks for all its tokens and its state slots are
//   promised before it starts. What nobody has been promised is the prefix cache's, which gives up what
//   saves the least work for its bytes; where the machine's memory runs short, it gives up more.
// - Where states and blocks share places, the sequences' states are promised places that blocks never have
//   (places.h): so a promise holds wherever the blocks of others lie, and admission counts states and blocks.
// - A step that fails ends the requests of that step, and no others.
#pragma once

#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "engine/memory_pool.h"
#include "engine/prefix_cache.h"
#include "engine/sequence.h"
#include "engine/snapshot_saver.h"

namespace lily::engine {

class Scheduler {
 public:
  // `disk` may be null; it outlives the scheduler.
  Scheduler(Executor& executor, const EngineOptions& options, DiskCache* disk = nullptr);
  ~Scheduler();

  // Tokens of this request that have to be computed, as far as can be told.
  int64_t work_of(const GenerateRequest& request) const;
  // Slots and blocks for this request are there; otherwise it has to wait until others are done.
  bool can_admit(const GenerateRequest& request) const;
  void admit(Pending pending);
  // Submits a step if one is due, and waits for the oldest one if no more fit in flight or none is due. False
  // if there was nothing to do.
  bool advance();
  // Ends everything that runs: Finish::cancelled, or Finish::error with this fault.
  void cancel_all(Finish how, Fault fault, std::string_view why) noexcept;
  void clear_cache();

  // Looks after the machine's memory, at most every kPressureInterval; advance() does it too.
  void relieve_pressure(Clock::time_point now);
  // It has to be called although nothing runs.
  bool watches_memory() const { return pool_.gives_back() && cache_.size() > 0; }

  // When advance() has something to save although nothing runs; nothing: not before the next request.
  std::optional<Clock::duration> next_save(Clock::time_point now) const;
  // Copies out everything that is to be saved: before the end.
  void save_all();
  // Writes the longest state remembered that `tokens` begin with. False if there is none.
  bool save(std::span<const int32_t> tokens, const std::filesystem::path& path, SessionHeader header);
  // Takes up a saved state. False if memory for it is not to be had; throws if it is damaged.
  bool load(SessionReader& reader);

  int n_running() const { return static_cast<int>(running_.size()); }
  // Adds what this scheduler knows.
  void report(EngineStats& stats) const;
  // Every slot and block has its holders and no others.
  void check_integrity() const;

 private:
  // A sequence's part in a step.
  struct Part {
    Sequence* sequence;
    int32_t n_after;  // tokens fed when it is done
    StateHold state;  // after them
    int output;       // which of the step's outputs, -1: none
    int round;        // Sequence::round when it was submitted
  };
  struct Flight {
    plan::Phase phase;
    plan::Ending ending;
    std::vector<Part> parts;
  };

  bool submit_one();
  bool submit_prompt_chunk();
  bool submit_decode();
  bool submit(Flight flight);
  void add_rows(Flight& flight, Sequence& sequence, int n_rows, bool with_output);
  void complete_one();
  void settle(Part& part, plan::Ending ending, const backend::StepOutputs& outputs);
  std::optional<Token> choose(Sequence& sequence, plan::Ending ending, int output, uint32_t step,
                              const backend::StepOutputs& outputs);
  std::optional<int32_t> choose_from_top(Sequence& sequence, std::span<const float> logits,
                                         uint32_t step) const;
  void deliver(Sequence& sequence, Token token);
  void reuse_cached(Sequence& sequence);
  void plan_states(Sequence& sequence);
  // Brings a longer prefix from the disk into the cache, if there is one.
  void fetch_saved(Sequence& sequence);
  bool save_a_piece();
  bool make_memory(Wanted wanted);
  bool make_room_for_block();
  void remember(Sequence& sequence, Snapshot::Kind kind);
  void end(Sequence& sequence, Finish how, int32_t stop_id = -1);
  void end_failed(Sequence& sequence, Fault fault, std::string_view error);
  void drop_cancelled();
  void release_finished();
  KvBlock take_block();
  StateHold take_state();
  int blocks_needed(int64_t n_tokens) const;

  Executor& executor_;
  const Limits limits_;
  const EngineOptions options_;

  // Pools outlive what holds their slots.
  MemoryPool pool_;
  SlotPool<backend::TokenSlot> tokens_;
  PrefixCache cache_;
  DiskCache* const disk_;
  std::optional<SnapshotSaver> saver_;  // with disk_
  std::vector<std::unique_ptr<Sequence>> running_;
  std::deque<Flight> flights_;
  Step step_;
  bool prompt_was_last_ = false;
  size_t prompt_turn_ = 0, decode_turn_ = 0;  // where the round robin goes on
  int64_t n_promised_blocks_ = 0;
  Clock::time_point pressure_seen_{};
  EngineStats totals_;
};

}  // namespace lily::engine
