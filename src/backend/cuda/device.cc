#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>

#include "backend/backend.h"
#include "backend/cuda/kv_values.h"
#include "backend/cuda/prefill_linear.h"
#include "backend/cuda/program.h"
#include "base/error.h"
#include "base/half.h"

namespace lily::backend {
namespace cuda_device {
namespace {

using namespace lily::cuda;

// The oldest generation that runs the kernels, and the only one with warpgroup products.
constexpr int kHopper = 9;
constexpr int kSharedBytes =
    227 << 10;  // what a block must be able to have: later chips of the small kind cannot

int device_count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const DeviceOptions& options)
      : pool_(options.threads > 0 ? options.threads : std::min(physical_cores(), 8)) {
    cudaDeviceProp p{};
    check(cudaGetDeviceProperties(&p, 0), "reading the device's properties");
    info_.backend = "cuda";
    info_.name = fmt::format("{}, {} multiprocessors", p.name, p.multiProcessorCount);
    info_.memory_bytes = static_cast<int64_t>(p.totalGlobalMem);
    n_sms_ = p.multiProcessorCount;
    has_wgmma_ = p.major == kHopper;
  }

  const DeviceInfo& info() const override { return info_; }

  plan::Policy policy(const model::Dims&) const override {
    using plan::Mechanism;
    plan::Policy p;
    p.activation = plan::FloatType::bf16;
    p.residual = plan::FloatType::f32;
    p.kv = plan::KvType::bf16;
    p.kv_types.set(static_cast<size_t>(plan::KvType::int8));
    p.prefill = {.norm_linear = true,
                 .linear_add = true,
                 .norm_router = true,
                 .gate_up = true,
                 .shared_in_experts = true,
                 .down_combine = true,
                 .qk_prepare = true,
                 .delta_norm = true,
                 .delta_mixer = true,
                 .attention_gate = true};
    p.decode = p.prefill;
    p.delta_blocks_from_rows = 32;
    p.tile = {.small = kFewTileTokens, .large = kMaxTileTokens, .large_from = 25};
    p.max_chunk_rows = 4096;
    p.matrix_unit = has_wgmma_ ? plan::MatrixUnit::tensor : plan::MatrixUnit::simdgroup;
    // Grouping is part of the expert kernels here, not an op.
    p.group_experts_from_rows = std::numeric_limits<int>::max();
    p.tokens_stay_on_device = true;
    p.fixed_blocks_from_context = 0;
    p.unfuses_prefill = false;
    p.max_decode_rows = 8;
    p.mechanisms.set();
    if (!has_wgmma_)
      p.mechanisms.reset(static_cast<size_t>(Mechanism::p1));  // its ablation is Hopper's kernel
    return p;
  }

  void load(const model::Checkpoint& checkpoint, const Progress& progress) override {
    LILY_CHECK(!weights_, "weights are loaded once");
    const model::Dims& d = checkpoint.dims();
    const auto require = [](bool holds, const char* key, int found, const char* wanted) {
      if (!holds)
        fail(Fault::model, "{} is {}, the cuda backend needs {}; use --backend cpu", key, found, wanted);
    };
    require(d.n_q_heads == 8 * d.n_kv_heads, "num_attention_heads", d.n_q_heads, "8 for each KV head");
    require(d.n_experts % 32 == 0 && d.n_experts <= 512, "num_experts", d.n_experts,
            "a multiple of 32, at most 512");
    require(d.hidden % 128 == 0 && d.hidden <= 4096, "hidden_size", d.hidden,
            "a multiple of 128, at most 4096");
    require(d.expert_width % 128 == 0, "moe_intermediate_size", d.expert_width, "a multiple of 128");
    require(d.shared_width == d.expert_width, "shared_expert_intermediate_size", d.shared_width,
            "the width of the routed experts");
    weights_.emplace(checkpoint, pool_, progress);
  }

  void reserve(const MemorySpec& memory, const plan::Policy& policy) override {
    const plan::Policy published = this->policy(weights().dims());
    if (!published.has(policy.kv))
      fail(Fault::user, "the cuda backend keeps keys and values as {}, not {}; leave --kv out",
           plan::kv_type_names(published), plan::name(policy.kv));
    memory_.reset();  // the old one first: both might not fit
    memory_.emplace(weights().dims(), memory, kv_form(policy.kv));
  }

  std::unique_ptr<Program> compile(plan::Plan plan) override {
    return std::make_unique<CudaProgram>(std::move(plan), weights(), memory(), stream_, n_sms_, has_wgmma_);
  }

  SharedPlaces shared_places(const model::Dims& dims, const plan::Policy& policy) const override {
    return lily::cuda::shared_places(dims, kv_form(policy.kv));
  }

  void copy_state(StateSlot src, StateSlot dst) override {
    memory().copy_state(static_cast<int>(src), static_cast<int>(dst), stream_.get());
  }

  std::vector<float> read_delta_state(StateSlot slot, int layer) override {
    std::vector<float> s = fetch(delta_at(slot, layer), memory().delta_floats());
    return transposed(s);
  }
  void write_delta_state(StateSlot slot, int layer, std::span<const float> data) override {
    LILY_CHECK(std::ssize(data) == memory().delta_floats(), "{} values for a delta state", data.size());
    store(delta_at(slot, layer), std::span<const float>(transposed(data)));
  }
  std::vector<float> read_conv_state(StateSlot slot, int layer) override {
    return widened(fetch(conv_at(slot, layer), memory().conv_values()));
  }
  void write_conv_state(StateSlot slot, int layer, std::span<const float> data) override {
    LILY_CHECK(std::ssize(data) == memory().conv_values(), "{} values for a convolution state", data.size());
    store(conv_at(slot, layer), std::span<const uint16_t>(rounded(data)));
  }
  std::vector<float> read_kv(Kv which, int layer, int block, int n_tokens) override {
    return kv_values(fetch(kv_at(which, layer, block), part_bytes()), memory().form(), n_kv_heads(),
                     n_tokens);
  }
  void write_kv(Kv which, int layer, int block, int n_tokens, std::span<const float> data) override {
    LILY_CHECK(std::ssize(data) == int64_t{n_tokens} * n_kv_heads() * kHeadCols, "{} values for {} tokens",
               data.size(), n_tokens);
    std::byte* const at = kv_at(which, layer, block);
    std::vector<std::byte> part = fetch(at, part_bytes());
    put_kv_values(part, memory().form(), n_kv_heads(), data);
    store(at, std::span<const std::byte>(part));
  }

 private:
  const Weights& weights() const {
    LILY_CHECK(weights_.has_value(), "no weights are loaded");
    return *weights_;
  }
  const Memory& memory() const {
    LILY_CHECK(memory_.has_value(), "no memory is reserved");
    return *memory_;
  }
  float* delta_at(StateSlot slot, int layer) const {
    return memory().delta_state(layer) + static_cast<int64_t>(slot) * memory().delta_slot_stride();
  }
  uint16_t* conv_at(StateSlot slot, int layer) const {
    return memory().conv_state(layer) + static_cast<int64_t>(slot) * memory().conv_slot_stride();
  }
  int n_kv_heads() const { return weights().dims().n_kv_heads; }
  int64_t part_bytes() const {  // of K or V of a layer's block
    return int64_t{n_kv_heads()} * kv_head_bytes(memory().form());
  }
  std::byte* kv_at(Kv which, int layer, int block) const {
    const KvCache cache = memory().kv(layer);
    return reinterpret_cast<std::byte*>(which == Kv::k ? cache.k : cache.v) +
           int64_t{block} * cache.block_bytes;
  }
  template <typename T>
  std::vector<T> fetch(const T* from, int64_t n) const {
    stream_.synchronize();
    std::vector<T> data(static_cast<size_t>(n));
    check(cudaMemcpy(data.data(), from, data.size() * sizeof(T), cudaMemcpyDeviceToHost),
          "reading device memory");
    return data;
  }
  template <typename T>
  void store(T* to, std::span<const T> data) const {
    stream_.synchronize();
    check(cudaMemcpy(to, data.data(), data.size() * sizeof(T), cudaMemcpyHostToDevice),
          "writing device memory");
  }
  static std::vector<float> widened(const std::vector<uint16_t>& bits) {
    std::vector<float> data(bits.size());
    std::transform(bits.begin(), bits.end(), data.begin(), [](uint16_t b) { return to_float(Bf16{b}); });
    return data;
  }
  static std::vector<uint16_t> rounded(std::span<const float> data) {
    std::vector<uint16_t> bits(data.size());
    std::transform(data.begin(), data.end(), bits.begin(), [](float x) { return to_bf16(x).bits; });
    return bits;
  }
  // Canonical states are [head][dk][dv], ours [head][dv][dk].
  static std::vector<float> transposed(std::span<const float> state) {
    constexpr size_t n = model::kDeltaHeadDim;
    std::vector<float> out(state.size());
    for (size_t head = 0; head < state.size() / (n * n); ++head)
      for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < n; ++j) out[(head * n + j) * n + i] = state[(head * n + i) * n + j];
    return out;
  }

  ThreadPool pool_;
  DeviceInfo info_;
  int n_sms_ = 0;
  bool has_wgmma_ = false;
  Stream stream_;
  std::optional<Weights> weights_;
  std::optional<Memory> memory_;
};

}  // namespace
}  // namespace cuda_device

std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options) {
  return std::make_unique<cuda_device::CudaDevice>(options);
}

bool cuda_device_present() {
  if (cuda_device::device_count() == 0) return false;
  const auto attribute = [](cudaDeviceAttr which) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, 0) == cudaSuccess ? value : 0;
  };
  return attribute(cudaDevAttrComputeCapabilityMajor) >= cuda_device::kHopper &&
         attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= cuda_device::kSharedBytes;
}

}  // namespace lily::backend
