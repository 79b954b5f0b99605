// The executor over a backend::Device: memory reserved at start, and programs cached by shape class.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "engine/executor.h"
#include "model/dims.h"
#include "plan/policy.h"

namespace lily::engine {

struct MemoryOptions {
  int64_t budget_bytes = 0;  // for weights, state, KV and scratch; 0: the device's memory
  int context = 0;           // tokens of a sequence; 0: the most that fits, up to the model's own limit
  int max_sequences = 1;     // computed at the same time, each with a whole context
  int n_cached_states = 8;   // states of earlier prompts that can be kept; fewer where memory is short, up to
                             // four times as many where it is plentiful
  int max_chunk_rows = 0;    // 0: the policy's
  // Of a budget that was given, for the program itself, beside what it takes already (LoadedModel).
  int64_t program_bytes = 0;
  // KV and states have one budget, where the device can do that: it gives memory back, or offers shared
  // places. With a budget that was given, the cache has all that is left of it.
  bool shared_pool = false;
};

// How the memory is divided; `lily serve` prints it before it loads.
struct MemoryPlan {
  backend::MemorySpec spec;
  int context = 0;
  int max_sequences = 0;
  int64_t weight_bytes = 0, state_bytes = 0, kv_bytes = 0, scratch_bytes = 0, program_bytes = 0;
  // Of one budget: what is left for earlier prompts, KV or states.
  int64_t cache_bytes = 0;
  bool shared_pool = false;  // one budget of a device that gives memory back; spec.shared_places: of places
  int64_t budget_bytes = 0;
  // KV and states.
  int64_t pool_bytes() const { return state_bytes + kv_bytes + cache_bytes; }
  int64_t total_bytes() const { return weight_bytes + scratch_bytes + program_bytes + pool_bytes(); }
};

// Bytes of one sequence's recurrent state and of one KV block under a policy.
int64_t state_slot_bytes(const model::Dims& dims, const plan::Policy& policy);
int64_t kv_block_bytes(const model::Dims& dims, const plan::Policy& policy);

// backend::Device::scratch_bytes of the device that the memory is planned for.
using ScratchBytes = std::function<int64_t(std::span<const plan::Plan> plans)>;

// Throws Error(Fault::user) naming the context, or the number of sequences, that fits. Without `scratch_of`
// programs take what their plans say and no more. Of a shared pool: `places` say that states and blocks share
// places, else the device gives memory back.
MemoryPlan plan_memory(const model::Dims& dims, const plan::Policy& policy, int64_t device_bytes,
                       int64_t weight_bytes, const MemoryOptions& options,
                       const ScratchBytes& scratch_of = {}, const backend::SharedPlaces& places = {});
// The same for a device: its memory is the budget if none is given, and it says what its programs take and
// what it can share.
MemoryPlan plan_memory(const backend::Device& device, const model::Dims& dims, const plan::Policy& policy,
                       int64_t weight_bytes, const MemoryOptions& options);

// The smallest shape class that a step fits: programs are compiled once a class, and a step of fewer rows or
// a shorter context runs in the same one. Pure; the classes are listed in docs/numerics.md, since a class
// decides which kernels run.
plan::Shape shape_class(const Step& step, const Limits& limits, const plan::Policy& policy);

class DeviceExecutor final : public Executor {
 public:
  // The device is loaded; it and the trace outlive the executor. Reserves the memory of `memory`. n_tokens is
  // the tokenizer's size. Each step is recorded in the trace, from submit() to the end of wait().
  DeviceExecutor(backend::Device& device, const model::Dims& dims, const plan::Policy& policy,
                 const MemoryPlan& memory, int32_t n_tokens, Trace* trace = nullptr);

  const Limits& limits() const override { return limits_; }
  void submit(const Step& step) override;
  backend::StepOutputs wait() override;
  void copy_kv(int32_t from_block, int32_t to_block, int n_tokens) override;
  void give_back_state(backend::StateSlot slot) override { device_.give_back_state(slot); }
  void give_back_kv(int32_t block) override { device_.give_back_kv(block); }

  SavedLayout saved_layout() const override;
  std::vector<float> read_state(backend::StateSlot slot, int piece) override;
  void write_state(backend::StateSlot slot, int piece, std::span<const float> values) override;
  std::vector<float> read_kv(int32_t block, int n_tokens) override;
  void write_kv(int32_t block, int n_tokens, std::span<const float> values) override;

  const plan::Policy& policy() const { return policy_; }
  int n_programs() const { return static_cast<int>(programs_.size()); }

 private:
  backend::Program& program(const plan::Shape& shape);
  std::vector<int> layers_with(model::Mixer mixer) const;

  backend::Device& device_;
  const model::Dims dims_;
  const plan::Policy policy_;
  Limits limits_;
  std::vector<std::pair<plan::Shape, std::unique_ptr<backend::Program>>> programs_;
  struct InFlight {
    backend::Program* program;
    std::chrono::steady_clock::time_point begin;
    int32_t n_rows, position;  // of the first segment
  };
  std::deque<InFlight> in_flight_;
  Trace* const trace_;
};

}  // namespace lily::engine
