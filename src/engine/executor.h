// What the engine drives: a machine that runs steps. DeviceExecutor (device_executor.h) is the real one; the
// engine's tests script another.
//
// A step is data: rows of one or several sequences, where their state and KV are, and how it ends. The
// executor picks the program; the engine decides everything else. One thread calls everything here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "plan/plan.h"

namespace lily::engine {

// What the model and the memory reserved at start allow.
struct Limits {
  int vocab = 0;            // columns of a row of logits
  int n_tokens = 0;         // real token ids are 0 .. n_tokens - 1
  int max_context = 0;      // tokens of a sequence
  int max_chunk_rows = 1;   // rows of a prompt step
  int max_decode_rows = 1;  // sequences in a decode step
  int n_candidates = 0;     // of a step that ends in candidates
  int depth = 1;            // steps in flight: 2 where tokens stay on the device, else 1
  int n_state_slots = 0;
  int n_kv_blocks = 0;  // of backend::kKvBlockTokens tokens
  int n_token_slots = 0;

  // Bytes of a state (in shared places of its place) and of a KV block; what a state in the cache costs, and
  // its blocks.
  int64_t state_bytes = 1, block_bytes = 0;
  // What states and blocks may take together where that is less than all of them, and give_back_* works; 0:
  // all of them.
  int64_t pool_bytes = 0;
  // Shared places (backend::MemorySpec::shared_places): a state lies where so many blocks do; n_kv_blocks is
  // n_state_slots times as many. 0: each has its own place.
  int blocks_per_state = 0;
  // With one step in flight nobody goes back to the state before a token: a decode step writes a state where
  // it was read, which spares memory a third of a state's traffic.
  bool writes_in_place(plan::Phase phase) const { return phase == plan::Phase::decode && depth == 1; }

  // Of shared places: so many never hold blocks at the same time, and sequences that run have at most so many
  // states; one is for a session that is loaded beside them, where there was room for it.
  int n_state_places = 0;
};

struct Step {
  plan::Phase phase = plan::Phase::prefill;
  plan::Ending ending = plan::Ending::none;
  std::vector<int32_t> tokens;              // [rows] ids, or backend::kTokenFromSlot
  std::vector<backend::Segment> segments;   // cover the rows in order
  std::vector<int32_t> block_table;         // of all segments
  std::vector<int32_t> output_rows;         // [outputs], rising; none with Ending::none
  std::vector<backend::Sampling> sampling;  // [outputs] with Ending::sampled

  int n_rows() const { return static_cast<int>(tokens.size()); }
  // Tokens in the longest sequence, this step's included.
  int64_t context() const {
    int64_t longest = 0;
    for (const backend::Segment& s : segments) longest = std::max<int64_t>(longest, s.position + s.n_rows);
    return longest;
  }
  // Keeps the memory: a step allocates nothing once the largest one has been seen.
  void clear() {
    tokens.clear();
    segments.clear();
    block_table.clear();
    output_rows.clear();
    sampling.clear();
  }
};

// A state and the KV of a token as saved sessions hold them: in fp32, in pieces that a step need not wait
// long for.
struct SavedLayout {
  std::vector<uint32_t> state_floats;        // of each piece of a state
  uint32_t kv_floats = 0;                    // of a token: K and V of all layers
  plan::KvType kv_type = plan::KvType::f32;  // what every value of them can be held in exactly
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual const Limits& limits() const = 0;

  // Starts a step; at most limits().depth are in flight. A step sees everything that earlier ones wrote.
  // Throws Error(Fault::device) if it cannot be started; it is not in flight then.
  virtual void submit(const Step& step) = 0;
  // Waits for the oldest step in flight, which is then no longer in flight even if it failed:
  // Error(Fault::device), after which whatever the step was to write is undefined and everything else stands.
  // Spans are valid until the second submit() after that of this step.
  virtual backend::StepOutputs wait() = 0;

  // Copies K and V of the first n_tokens positions of a block, in all layers. No step may be in flight.
  virtual void copy_kv(int32_t from_block, int32_t to_block, int n_tokens) = 0;

  // Memory of a slot or a block that nobody uses goes back to the system (Limits::pool_bytes).
  virtual void give_back_state(backend::StateSlot) {}
  virtual void give_back_kv(int32_t /*block*/) {}

  // For saved sessions; no step may be in flight. KV is that of the first n_tokens positions of a block.
  virtual SavedLayout saved_layout() const = 0;
  virtual std::vector<float> read_state(backend::StateSlot slot, int piece) = 0;
  virtual void write_state(backend::StateSlot slot, int piece, std::span<const float> values) = 0;
  virtual std::vector<float> read_kv(int32_t block, int n_tokens) = 0;
  virtual void write_kv(int32_t block, int n_tokens, std::span<const float> values) = 0;
};

}  // namespace lily::engine
