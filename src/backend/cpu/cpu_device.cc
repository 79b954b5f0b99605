
#include <algorithm>
#include <fstream>
#include <optional>

#include "backend/backend.h"
#include "backend/cpu/kernels/matrix_unit.h"
#include "backend/cpu/kernels/targets.h"
#include "backend/cpu/program.h"
#include "base/error.h"
#include "base/memory_limit.h"
#include "base/printable.h"
#include "model/checkpoint.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lily::backend {
namespace cpu {
namespace {

std::string processor_name() {
#if defined(__APPLE__)
  char name[256];
  size_t size = sizeof name;
  if (sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0) == 0) return name;
#else
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name") && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
#endif
  return "CPU";
}

// The rest is for the program itself, the system and the page cache.
constexpr double kMemoryShare = 0.92;

// Context from which the splits of a cache go to several threads (D7).
constexpr int64_t kFixedBlocksFrom = 512;

class CpuDevice final : public Device {
 public:
  CpuDevice(const char* backend, SimdTarget target, const DeviceOptions& options)
      : target_(target),
        pool_(options.threads > 0 ? options.threads : physical_cores()),
        trace_(options.trace),
        scratch_(pool_.n_threads()) {
    info_.backend = backend;
    info_.name =
        fmt::format("{}, {}, {}", processor_name(), counted(pool_.n_threads(), "thread"), to_string(target_));
    info_.memory_bytes = static_cast<int64_t>(static_cast<double>(memory_limit()) * kMemoryShare);
  }

  const DeviceInfo& info() const override { return info_; }

  plan::Policy policy(const model::Dims& dims) const override {
    using plan::Mechanism;
    plan::Policy p;
    p.prefill = {.norm_linear = true,
                 .linear_add = true,
                 .norm_router = true,
                 .gate_up = true,
                 .shared_in_experts = true,
                 .down_combine = true,
                 .qk_prepare = true,
                 .delta_norm = true,
                 .delta_mixer = false,  // would hold a head's whole chunk beside its state
                 .attention_gate = true};
    p.decode = p.prefill;
    // One barrier less, if the key heads occupy all threads.
    p.decode.delta_mixer = dims.n_key_heads >= pool_.n_threads();
    p.max_chunk_rows = 512;
    p.group_experts_from_rows = kMaxTileRows + 1;
    p.fixed_blocks_from_context = kFixedBlocksFrom;
    p.max_decode_rows = kMaxTileRows;
    p.kv_types.set();
    for (const Mechanism m : {Mechanism::p1, Mechanism::p4, Mechanism::p5, Mechanism::d3, Mechanism::d4,
                              Mechanism::d6, Mechanism::d7})
      p.mechanisms.set(static_cast<size_t>(m));
    if (matrix_unit_present() && target_ == SimdTarget::avx512_vnni) {
      p.matrix_unit = plan::MatrixUnit::tensor;
      p.mechanisms.set(static_cast<size_t>(Mechanism::p6));
    }
    return p;
  }

  int64_t scratch_bytes(std::span<const plan::Plan> plans) const override {
    if (plans.empty()) return 0;
    use_target(target_);
    const Weights shapes(plans.front().dims);
    ScratchSizes most;  // programs share the memory, values and workers each for itself
    for (const plan::Plan& plan : plans) {
      const ScratchSizes sizes = scratch_sizes(plan, shapes);
      most.value_bytes = std::max(most.value_bytes, sizes.value_bytes);
      most.worker_bytes = std::max(most.worker_bytes, sizes.worker_bytes);
    }
    return Scratch::bytes_of(most.value_bytes, most.worker_bytes, pool_.n_threads());
  }

  void load(const model::Checkpoint& checkpoint, const Progress& progress) override {
    LILY_CHECK(!weights_, "weights are loaded once");
    weights_.emplace(checkpoint, pool_, progress);
  }

  void reserve(const MemorySpec& memory, const plan::Policy& policy) override {
    memory_.reset();  // the old one first: both might not fit
    memory_.emplace(weights().dims(), memory, policy.kv);
  }

  std::unique_ptr<Program> compile(plan::Plan plan) override {
    LILY_CHECK(plan.policy.kv == memory().kv_type(), "the plan's KV type is not the one reserved");
    return std::make_unique<CpuProgram>(std::move(plan), weights(), memory(), target_, pool_, scratch_,
                                        trace_);
  }

  void copy_state(StateSlot src, StateSlot dst) override { memory().copy_state(src, dst); }

  bool gives_back() const override { return true; }
  void give_back_state(StateSlot slot) override { memory().give_back_state(slot); }
  void give_back_kv(int32_t block) override { memory().give_back_kv(block); }

  std::vector<float> read_delta_state(StateSlot slot, int layer) override {
    const float* s = memory().delta_state(slot, layer);
    return {s, s + memory().delta_floats()};
  }
  void write_delta_state(StateSlot slot, int layer, std::span<const float> data) override {
    assign(memory().delta_state(slot, layer), memory().delta_floats(), data);
  }
  std::vector<float> read_conv_state(StateSlot slot, int layer) override {
    const float* s = memory().conv_state(slot, layer);
    return {s, s + memory().conv_floats()};
  }
  void write_conv_state(StateSlot slot, int layer, std::span<const float> data) override {
    assign(memory().conv_state(slot, layer), memory().conv_floats(), data);
  }

  std::vector<float> read_kv(Kv which, int layer, int block, int n_tokens) override {
    std::vector<float> data(static_cast<size_t>(n_tokens) * static_cast<size_t>(weights().dims().kv_width()));
    for_each_head(n_tokens, [&](int head, int key, int64_t at) {
      const auto load = which == Kv::k ? load_key : load_value;
      load(memory().kv(layer), block, head, key, data.data() + at);
    });
    return data;
  }
  void write_kv(Kv which, int layer, int block, int n_tokens, std::span<const float> data) override {
    LILY_CHECK(std::ssize(data) == int64_t{n_tokens} * weights().dims().kv_width(), "{} values for {} tokens",
               data.size(), n_tokens);
    for_each_head(n_tokens, [&](int head, int key, int64_t at) {
      const auto store = which == Kv::k ? store_key : store_value;
      store(memory().kv(layer), block, head, key, data.data() + at);
    });
  }

 private:
  const Weights& weights() const {
    LILY_CHECK(weights_.has_value(), "no weights are loaded");
    return *weights_;
  }
  Memory& memory() {
    LILY_CHECK(memory_.has_value(), "no memory is reserved");
    return *memory_;
  }
  static void assign(float* to, int64_t n, std::span<const float> data) {
    LILY_CHECK(std::ssize(data) == n, "{} values for {}", data.size(), n);
    std::copy(data.begin(), data.end(), to);
  }
  template <typename F>
  void for_each_head(int n_tokens, F f) const {
    const int n_heads = weights().dims().n_kv_heads;
    for (int key = 0; key < n_tokens; ++key)
      for (int head = 0; head < n_heads; ++head)
        f(head, key, (int64_t{key} * n_heads + head) * model::kHeadDim);
  }

  const SimdTarget target_;
  ThreadPool pool_;
  Trace* const trace_;
  DeviceInfo info_;
  Scratch scratch_;
  std::optional<Weights> weights_;
  std::optional<Memory> memory_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options) {
  return std::make_unique<cpu::CpuDevice>("cpu", cpu::runnable_targets().front(), options);
}

bool cpu_device_present() { return true; }

// The same device on a processor that has AVX2 and nothing wider, on any that has it: for tests and for
// figures.
std::unique_ptr<Device> make_cpu_avx2_device(const DeviceOptions& options) {
  return std::make_unique<cpu::CpuDevice>("cpu-avx2", cpu::SimdTarget::avx2, options);
}

bool cpu_avx2_device_present() {
  const auto targets = cpu::runnable_targets();
  return std::find(targets.begin(), targets.end(), cpu::SimdTarget::avx2) != targets.end();
}

}  // namespace lily::backend
