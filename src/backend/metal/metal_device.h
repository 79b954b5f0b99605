// The Metal backend's Device, over any GPU that implements metal::Device: Apple's, or the emulated one.
//
// Threads: everything here is called from the engine's thread. Command buffers of all programs run in the
// order of their commits, so programs share one scratch arena and a step sees all that earlier ones wrote.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/device.h"
#include "backend/metal/memory.h"
#include "backend/metal/weights.h"

namespace lily::metal {

class MetalDevice final : public backend::Device {
 public:
  // A step that takes longer than timeout_ms counts as failed. `tensor_kernels` are used on a GPU that has
  // tensor operations if they compile and compute what the others do; else one line of log says why not.
  MetalDevice(std::unique_ptr<metal::Device> gpu, std::string backend, const KernelLibrary& kernels,
              const KernelLibrary& tensor_kernels, bool use_tensor_ops, int64_t timeout_ms);
  ~MetalDevice() override;

  const backend::DeviceInfo& info() const override { return info_; }
  plan::Policy policy(const model::Dims& dims) const override;
  void load(const model::Checkpoint& checkpoint, const backend::Progress& progress) override;
  void reserve(const backend::MemorySpec& memory, const plan::Policy& policy) override;
  backend::SharedPlaces shared_places(const model::Dims& dims, const plan::Policy& policy) const override;
  std::unique_ptr<backend::Program> compile(plan::Plan plan) override;
  void copy_state(backend::StateSlot src, backend::StateSlot dst) override;

  std::vector<float> read_delta_state(backend::StateSlot slot, int layer) override;
  void write_delta_state(backend::StateSlot slot, int layer, std::span<const float> data) override;
  std::vector<float> read_conv_state(backend::StateSlot slot, int layer) override;
  void write_conv_state(backend::StateSlot slot, int layer, std::span<const float> data) override;
  std::vector<float> read_kv(Kv which, int layer, int block, int n_tokens) override;
  void write_kv(Kv which, int layer, int block, int n_tokens, std::span<const float> data) override;

  // ---- For programs
  metal::Device& gpu() { return *gpu_; }
  const Weights& weights() const { return *weights_; }
  const Memory& memory() const;
  const Pipeline& pipeline(const std::string& kernel);
  int64_t timeout_ms() const { return timeout_ms_; }
  // Memory that every step may overwrite; at least as much as any program asked for.
  void need_scratch(size_t bytes);
  const Buffer& scratch() const { return *scratch_; }
  void step_begins() { ++n_in_flight_; }
  void step_ends() { --n_in_flight_; }

 private:
  void wait_for_copy();

  std::unique_ptr<metal::Device> gpu_;
  const int64_t timeout_ms_;
  backend::DeviceInfo info_;
  std::unique_ptr<Library> library_, tensor_library_;  // the second where tensor operations are used
  std::map<std::string, std::unique_ptr<Pipeline>, std::less<>> pipelines_;
  model::Dims dims_;
  std::optional<Weights> weights_;
  std::optional<Memory> memory_;
  std::unique_ptr<Buffer> scratch_;
  std::vector<std::unique_ptr<Buffer>> outgrown_;  // that steps in flight may still use
  int n_in_flight_ = 0;
  std::unique_ptr<CommandBuffer> copy_;  // the last copy_state
};

}  // namespace lily::metal
