// Kernels that handle one row of the residual stream a block: norm, embedding, the sum over experts (formulas
// in prefill_routing.h). 256 threads, 16 bytes a thread and round; a row stays in registers between its
// rounds. Bound by bytes: combine reads 9 bf16 rows and one fp32, and writes one of each.
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_ops.h"
#include "backend/cuda/prefill_routing.h"

namespace lily::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxRounds = 4;
constexpr int kMaxHidden = kThreads * 8 * kMaxRounds;
constexpr float kEpsilon = 1e-6f;

__device__ __forceinline__ void load8(const float* from, float (&x)[8]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0],
               high = reinterpret_cast<const float4*>(from)[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z,
  x[7] = high.w;
}
__device__ __forceinline__ void store8(float* to, const float (&x)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Sum over the block, the same in every thread and every run.
__device__ __forceinline__ float block_sum(float x) {
  float* partial = reinterpret_cast<float*>(shared_memory());
  x = warp_sum(x);
  if (lane_id() == 0) partial[threadIdx.x / 32] = x;
  block_sync();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) sum += partial[w];
  return sum;
}

// normed = row * rsqrt(mean(row^2) + epsilon) * weight for the row in registers.
template <int kRounds>
__device__ __forceinline__ void write_normed(const float (&row)[kRounds][8], const float* weight,
                                             uint16_t* normed, int hidden) {
  float squares = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r)
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += row[r][e] * row[r][e];
  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(hidden) + kEpsilon);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int at = (r * kThreads + static_cast<int>(threadIdx.x)) * 8;
    if (at >= hidden) continue;
    float w[8];
    load8(weight + at, w);
#pragma unroll
    for (int e = 0; e < 8; ++e) w[e] *= row[r][e] * scale;
    *reinterpret_cast<uint4*>(normed + at) = pack8(w);
  }
}

struct NormParams {
  const float* x;
  const float* weight;
  uint16_t* normed;
  int hidden;
};
template <int kRounds>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const __grid_constant__ NormParams p) {
  pdl_wait();
  pdl_trigger();
  const size_t base = static_cast<size_t>(blockIdx.x) * static_cast<size_t>(p.hidden);
  float row[kRounds][8] = {};
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int at = (r * kThreads + static_cast<int>(threadIdx.x)) * 8;
    if (at < p.hidden) load8(p.x + base + at, row[r]);
  }
  write_normed(row, p.weight, p.normed + base, p.hidden);
}

template <int kRounds>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineArgs p) {
  pdl_wait();
  pdl_trigger();
  const size_t token = blockIdx.x, hidden = static_cast<size_t>(p.hidden);
  const uint16_t* source[kRouted + 1];
#pragma unroll
  for (int j = 0; j < kRouted; ++j)
    source[j] = p.y + static_cast<size_t>(p.row_of_choice[token * kRouted + static_cast<size_t>(j)]) * hidden;
  source[kRouted] = p.y_shared + token * hidden;
  float row[kRounds][8] = {};
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int at = (r * kThreads + static_cast<int>(threadIdx.x)) * 8;
    if (at >= p.hidden) continue;
    uint4 piece[kRouted + 1];
#pragma unroll
    for (int j = 0; j <= kRouted; ++j) piece[j] = *reinterpret_cast<const uint4*>(source[j] + at);
    load8(p.residual + token * hidden + static_cast<size_t>(at), row[r]);
#pragma unroll
    for (int j = 0; j <= kRouted; ++j) {
      float y[8];
      unpack8(piece[j], y);
#pragma unroll
      for (int e = 0; e < 8; ++e) row[r][e] += y[e];
    }
    store8(p.out + token * hidden + static_cast<size_t>(at), row[r]);
  }
  if (p.norm_weight) write_normed(row, p.norm_weight, p.normed + token * hidden, p.hidden);
}

template <int kRounds>
__global__ void __launch_bounds__(kThreads) embedding_kernel(const __grid_constant__ EmbeddingArgs p) {
  pdl_wait();
  pdl_trigger();
  const size_t token = blockIdx.x, hidden = static_cast<size_t>(p.hidden);
  const size_t id = static_cast<size_t>(p.ids[token]);
  float row[kRounds][8] = {};
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int at = (r * kThreads + static_cast<int>(threadIdx.x)) * 8;
    if (at >= p.hidden) continue;
    const uint32_t codes = p.codes[(id * hidden + static_cast<size_t>(at)) / 8];
    const size_t group = (id * hidden + static_cast<size_t>(at)) / 64;
    const float scale = bf16_value(p.scales[group]), bias = bf16_value(p.biases[group]);
#pragma unroll
    for (int e = 0; e < 8; ++e) row[r][e] = fmaf(scale, static_cast<float>(codes >> (4 * e) & 15u), bias);
    store8(p.x + token * hidden + static_cast<size_t>(at), row[r]);
  }
  if (p.norm_weight) write_normed(row, p.norm_weight, p.normed + token * hidden, p.hidden);
}

// Starts the version with as many rounds as the row needs.
template <typename Params>
void start(void (*one)(Params), void (*many)(Params), const Params& p, int n_tokens, int hidden,
           cudaStream_t stream) {
  require(n_tokens > 0 && hidden > 0 && hidden % 8 == 0 && hidden <= kMaxHidden,
          "rows of up to 8,192, in eights");
  const LaunchShape shape{dim3(static_cast<unsigned>(n_tokens)), kThreads, 64};
  launch(hidden <= kThreads * 8 ? one : many, p, shape, stream);
}

}  // namespace

void rms_norm_prefill(const float* x, const float* weight, uint16_t* normed, int n_tokens, int hidden,
                      cudaStream_t stream) {
  start(rms_norm_kernel<1>, rms_norm_kernel<kMaxRounds>, NormParams{x, weight, normed, hidden}, n_tokens,
        hidden, stream);
}

void combine_experts_prefill(const CombineArgs& args, cudaStream_t stream) {
  start(combine_kernel<1>, combine_kernel<kMaxRounds>, args, args.n_tokens, args.hidden, stream);
}

void embedding_q4_prefill(const EmbeddingArgs& args, cudaStream_t stream) {
  start(embedding_kernel<1>, embedding_kernel<kMaxRounds>, args, args.n_tokens, args.hidden, stream);
}

}  // namespace lily::cuda
