// A checkpoint on a device, with its memory divided: what every command that computes starts from.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/trace.h"
#include "engine/device_executor.h"
#include "model/checkpoint.h"
#include "plan/policy.h"

namespace lily::engine {

struct LoadOptions {
  std::string backend = "auto";
  int threads = 0;                       // 0: physical cores
  bool tensor_ops = false;               // DeviceOptions::tensor_ops
  std::optional<plan::KvType> kv;        // nothing: the backend's default
  std::optional<int> activation_planes;  // 1 or 2, of the CPU backends; nothing: the backend's default
  std::shared_ptr<Trace> trace;          // records steps, and ops on cpu and reference; null: nothing
  std::vector<plan::Mechanism> disable;  // an error where the backend does not have one of them
  MemoryOptions memory;
};

// The policy that the device publishes, with this KV type (nothing: the device's; the reference keeps bf16 as
// fp32), these planes of activations (nothing: the device's) and without these mechanisms. Throws
// Error(Fault::user) for a KV type, a mechanism or planes that the backend does not have.
plan::Policy policy_of(const backend::Device& device, const model::Dims& dims, std::optional<plan::KvType> kv,
                       std::span<const plan::Mechanism> disable, std::optional<int> activation_planes = {});
// The same of a policy that a backend of this name has published.
plan::Policy policy_of(const plan::Policy& published, std::string_view backend,
                       std::optional<plan::KvType> kv, std::span<const plan::Mechanism> disable,
                       std::optional<int> activation_planes = {});

// Has no thread of its own: one at a time may use it, an Engine's for as long as that lives.
class LoadedModel {
 public:
  // The device is made and the memory planned, but nothing is read: `lily serve` prints the plan first.
  // Throws Error(Fault::user) for a backend, a KV type, a mechanism or a context that is not to be had here.
  // n_tokens is the tokenizer's size.
  LoadedModel(const model::Checkpoint& checkpoint, int32_t n_tokens, const LoadOptions& options);

  // Reads the weights of the checkpoint. Once.
  void load(const backend::Progress& progress = {});

  backend::Device& device() { return *device_; }
  const model::Dims& dims() const { return checkpoint_.dims(); }
  const plan::Policy& policy() const { return policy_; }
  const MemoryPlan& memory() const { return memory_; }
  int32_t n_tokens() const { return n_tokens_; }

  // After load(). An executor has the device's whole memory: make one at a time. It must not outlive this.
  // Throws Error(Fault::model) if the logits of a short text are not finite.
  std::unique_ptr<DeviceExecutor> make_executor();

 private:
  const model::Checkpoint& checkpoint_;
  const int32_t n_tokens_;
  std::shared_ptr<Trace> trace_;
  std::unique_ptr<backend::Device> device_;
  plan::Policy policy_;
  MemoryPlan memory_;
};

}  // namespace lily::engine
