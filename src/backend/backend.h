// The boundary between the engine and a device: the only header of backend/ that the engine sees.
//
// A Device holds the weights, the state slots, the KV blocks and the token slots of all sequences. A Program
// is a plan made executable. One thread (the engine's) calls everything here; a backend may have threads of
// its own below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace lily {
class Trace;
namespace model {
class Checkpoint;
}
}  // namespace lily

namespace lily::backend {

// Tokens in a KV block; the same on every backend, so that sessions can be saved by one and read by another.
inline constexpr int kKvBlockTokens = 64;

enum class StateSlot : int32_t {};        // conv and delta state of one sequence at one position
enum class TokenSlot : int32_t {};        // one token id on the device
inline constexpr StateSlot kNoState{-1};  // as src: the zero state before the first token
inline constexpr TokenSlot kNoToken{-1};
inline constexpr int32_t kTokenFromSlot = -1;  // in StepInputs::tokens: read the segment's token_in

// Consecutive rows of a step that belong to one sequence. Sequences of a step differ from one another in
// every slot they write. The KV blocks that a segment's rows are written to belong to this sequence alone.
struct Segment {
  int32_t first_row = 0;
  int32_t n_rows = 0;
  int32_t position = 0;            // of the first row = tokens already in the sequence's KV
  StateSlot src = kNoState;        // state after `position` tokens
  StateSlot dst{0};                // state after position + n_rows tokens; may equal src
  int32_t first_block = 0;         // index into StepInputs::block_table; entry i holds positions i * 64 ...
  TokenSlot token_in = kNoToken;   // read by rows whose token is kTokenFromSlot
  TokenSlot token_out = kNoToken;  // written by Ending::greedy and Ending::sampled, unless kNoToken
};

// docs/numerics.md, "Sampling": what Ending::sampled needs of model settings. One an output row.
struct Sampling {
  float temperature = 1;  // 0: arg max
  float top_p = 1;
  float min_p = 0;
  int32_t top_k = 0;  // 0: off
  uint64_t seed = 0;
  uint32_t sequence = 0;  // with seed and step the key of the one random number drawn
  uint32_t step = 0;      // index of the generated token in its sequence
};

// One step's inputs. Spans need to live until submit() returns.
struct StepInputs {
  std::span<const int32_t> tokens;       // [rows] ids or kTokenFromSlot
  std::span<const Segment> segments;     // cover all rows in order
  std::span<const int32_t> block_table;  // KV block ids of all segments
  std::span<const int32_t> output_rows;  // [outputs], rising
  std::span<const Sampling> sampling;    // [outputs] for Ending::sampled, else empty
  int32_t n_tokens = 0;                  // ids >= n_tokens are padding rows of the vocabulary, masked
};

// What a step leaves, by the plan's ending. Spans stay valid until the second submit() after this step's.
struct StepOutputs {
  std::span<const float> logits;            // [outputs, vocab], padding rows are -infinity
  std::span<const int32_t> tokens;          // [outputs]
  std::span<const int32_t> candidate_ids;   // [outputs, n_candidates]
  std::span<const float> candidate_logits;  // [outputs, n_candidates]
  std::span<const float> logsumexp;         // [outputs]
};

class Program {
 public:
  virtual ~Program() = default;
  virtual const plan::Plan& plan() const = 0;

  // Starts a step. At most two steps are in flight; a step sees everything that earlier ones wrote.
  // Inputs outside the plan's bounds are our own mistake (LILY_CHECK).
  virtual void submit(const StepInputs& inputs) = 0;
  // Waits for the oldest step in flight. Throws Error(Fault::device) if it failed or timed out; the sequences
  // of that step are then undefined, others and the device go on if the message does not say otherwise.
  virtual StepOutputs wait() = 0;

  // For diff, conformance and golden tests; needs Options::keep_values. Values are converted to or from fp32
  // (i32 values exactly up to 2^24). `run_ops` runs ops [first, last) alone, with whatever the values hold.
  virtual std::vector<float> read(plan::ValueId value) = 0;  // rows of the last step * cols
  virtual void write(plan::ValueId value, std::span<const float> data) = 0;
  virtual void run_ops(const StepInputs& inputs, int first, int last) = 0;
};

// What is reserved at start; a step allocates nothing.
struct MemorySpec {
  int n_state_slots = 2;
  int n_kv_blocks = 64;
  int n_token_slots = 2;
  // Shape bounds for scratch; programs beyond it grow it when they are compiled.
  int max_rows = 512;
  // States and blocks lie in the same memory: slot s where blocks s * n .. s * n + n - 1 do, with n =
  // SharedPlaces::blocks_per_state and n_kv_blocks = n_state_slots * n. Whoever hands them out sees to it
  // that of these only the slot, or only blocks, are in use.
  bool shared_places = false;
};

// How a device that cannot give memory back lets states and KV have one budget: a state is as large as some
// blocks, and either kind may lie anywhere.
struct SharedPlaces {
  int blocks_per_state = 0;  // 0: not on this device, each kind has its own memory
  int64_t most_bytes = 0;    // of all places together; 0: no bound but the memory's
};

struct DeviceInfo {
  std::string backend;       // "cpu"
  std::string name;          // "AMD EPYC, 2 threads, AVX-512 VNNI"
  int64_t memory_bytes = 0;  // what weights, state and KV may take in all
  bool keeps_values = true;  // Options::keep_values, Program::read, write and run_ops work
};

// Called now and then from the loading thread; false cancels (Error "interrupted").
using Progress = std::function<bool(int64_t done_bytes, int64_t total_bytes)>;

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  // What this device does by default for a model of these dimensions.
  virtual plan::Policy policy(const model::Dims& dims) const = 0;

  // Bytes of scratch memory that programs of all these plans take together, before load as well as after it:
  // what the plans say, and what the backend's own way to run them needs beyond that.
  virtual int64_t scratch_bytes(std::span<const plan::Plan> plans) const {
    int64_t most = 0;
    for (const plan::Plan& plan : plans) most = most < plan.scratch_bytes ? plan.scratch_bytes : most;
    return most;
  }

  virtual void load(const model::Checkpoint& checkpoint, const Progress& progress) = 0;  // once
  // After load; again only while no step is in flight: all slots and blocks are lost. The KV type is the
  // policy's.
  virtual void reserve(const MemorySpec& memory, const plan::Policy& policy) = 0;
  virtual std::unique_ptr<Program> compile(plan::Plan plan) = 0;

  virtual void copy_state(StateSlot src, StateSlot dst) = 0;

  // True where states and KV blocks take memory from their first use on only, until they are given back. More
  // of them than there is memory for may be reserved then: whoever hands them out counts those in use.
  virtual bool gives_back() const { return false; }
  // For states and blocks of this policy, in bytes of blocks: MemorySpec::shared_places may be asked for.
  virtual SharedPlaces shared_places(const model::Dims&, const plan::Policy&) const { return {}; }
  // Of a slot or block that nobody uses; what it held is lost.
  virtual void give_back_state(StateSlot) {}
  virtual void give_back_kv(int32_t /*block*/) {}

  // Canonical fp32 layouts, for tests, diff and saved sessions. No step may be in flight.
  virtual std::vector<float> read_delta_state(StateSlot slot, int layer) = 0;  // [value head][dk][dv]
  virtual void write_delta_state(StateSlot slot, int layer, std::span<const float> data) = 0;
  virtual std::vector<float> read_conv_state(StateSlot slot,
                                             int layer) = 0;  // [3][channels], oldest row first
  virtual void write_conv_state(StateSlot slot, int layer, std::span<const float> data) = 0;
  // K or V of the first n_tokens positions of a block: [n_tokens][kv head][256].
  enum class Kv { k, v };
  virtual std::vector<float> read_kv(Kv which, int layer, int block, int n_tokens) = 0;
  virtual void write_kv(Kv which, int layer, int block, int n_tokens, std::span<const float> data) = 0;
};

struct DeviceOptions {
  int threads = 0;          // 0: physical cores (cpu, reference)
  bool tensor_ops = false;  // Metal 4's tensor operations, on chips that have them (metal)
  Trace* trace = nullptr;   // outlives the device; ops are recorded there (cpu, reference)
};

// "reference", "cpu", "cuda", "metal", "metal-emulated" or "auto"; throws Error(Fault::user) with the list of
// those that are compiled in and present.
std::unique_ptr<Device> make_device(std::string_view backend, const DeviceOptions& options = {});
// The backends this binary has, in the order that "auto" prefers them.
std::vector<std::string> compiled_backends();

}  // namespace lily::backend
