// The delta rule token by token (prefill_delta.h): the state's columns stay in registers through the whole
// chunk, are read once and written once; everything fp32.
//
// A block is one value head: 512 threads, 4 lanes a column of 128 rows. A lane holds 32 rows: rows 8 j + 2 r
// + {0, 1} for lane r of the quad, so that the quad's reads of k and q are 16 consecutive bytes. Two
// exchanges inside the quad and one sum over the block (for the gated norm) a token. Bound by the latency of
// one token, about 1 us.
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_delta.h"

namespace lily::cuda {
namespace {

constexpr int kThreads = 512;
constexpr float kEpsilon = 1e-6f;

__device__ __forceinline__ float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

__global__ void __launch_bounds__(kThreads) scan_kernel(const __grid_constant__ DeltaParams p) {
  pdl_wait();
  pdl_trigger();
  const DeltaArgs& a = p.args;
  float* partial =
      reinterpret_cast<float*>(shared_memory());  // [2][16]: alternating, so one barrier a token suffices
  const int head = static_cast<int>(blockIdx.x), column = static_cast<int>(threadIdx.x) / 4;
  const int r = static_cast<int>(threadIdx.x) % 4;
  const size_t base =
      (static_cast<size_t>(head) * kDim + static_cast<size_t>(column)) * kDim + static_cast<size_t>(2 * r);
  float s[32];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    s[2 * j] = a.state_in ? a.state_in[base + static_cast<size_t>(8 * j)] : 0.0f;
    s[2 * j + 1] = a.state_in ? a.state_in[base + static_cast<size_t>(8 * j + 1)] : 0.0f;
  }
  for (int t = 0; t < a.n_tokens; ++t) {
    const int block = t / kDeltaBlock, i = t % kDeltaBlock;
    const size_t gate = tile_index(p, head, block) * kDeltaBlock + static_cast<size_t>(i);
    const float decay = p.decay[gate], beta = p.beta[gate];
    const unsigned char* k_image = p.k + tile_index(p, head / 2, block) * kImageBytes;
    const unsigned char* q_image = p.q + tile_index(p, head / 2, block) * kImageBytes;
    const unsigned char* v_image = p.v + tile_index(p, head, block) * kImageBytes;
    uint32_t k[16];
    float read = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      k[j] = *reinterpret_cast<const uint32_t*>(k_image + image_offset(i, 8 * j) + 4 * r);
      s[2 * j] *= decay, s[2 * j + 1] *= decay;
      read = fmaf(s[2 * j], bf16_low(k[j]), read);
      read = fmaf(s[2 * j + 1], bf16_high(k[j]), read);
    }
    read = quad_sum(read);
    const float v = bf16_value(
        *reinterpret_cast<const uint16_t*>(v_image + image_offset(i, column / 4 * 4) + column % 4 * 2));
    const float delta = beta * (v - read);
    float o = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint32_t q = *reinterpret_cast<const uint32_t*>(q_image + image_offset(i, 8 * j) + 4 * r);
      s[2 * j] = fmaf(bf16_low(k[j]), delta, s[2 * j]);
      s[2 * j + 1] = fmaf(bf16_high(k[j]), delta, s[2 * j + 1]);
      o = fmaf(s[2 * j], bf16_low(q), o);
      o = fmaf(s[2 * j + 1], bf16_high(q), o);
    }
    o = quad_sum(o);
    float squares = warp_sum(r == 0 ? o * o : 0.0f);
    float* slots = partial + t % 2 * 16;
    if (lane_id() == 0) slots[threadIdx.x / 32] = squares;
    block_sync();
    squares = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) squares += slots[w];
    if (r == 0) {
      const int64_t at = int64_t{head} * kDim + column;
      const float z = bf16_value(a.z[t * a.z_stride + at]);
      const float y = o / sqrtf(squares / kDim + kEpsilon) * a.norm[column] * silu(z);
      a.y[int64_t{t} * a.n_value_heads * kDim + at] = static_cast<uint16_t>(bf16_bits(y));
    }
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    a.state_out[base + static_cast<size_t>(8 * j)] = s[2 * j];
    a.state_out[base + static_cast<size_t>(8 * j + 1)] = s[2 * j + 1];
  }
}

}  // namespace

void delta_scan_prefill(const DeltaArgs& args, cudaStream_t stream) {
  const DeltaParams p = delta_params(args);
  delta_prepare(p, stream);
  launch(scan_kernel, p, LaunchShape{dim3(static_cast<unsigned>(args.n_value_heads)), kThreads, 128}, stream);
}

}  // namespace lily::cuda
