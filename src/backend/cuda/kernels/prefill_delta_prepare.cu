// First kernel of the delta rule: convolution, SiLU, L2 norms into images, gates (formulas in
// prefill_delta.h).
//
// A warp takes one head and 16 tokens, a lane 4 channels; the three rows before are carried in registers, so
// a row is read 19/16 times. One warp a value head and block adds up the gates. Rows past the end of the last
// block are zeros with beta = g = 0: they leave the state as it is. Bound by bytes: reads m, writes q, k, v.
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_delta.h"

namespace lily::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kStrip = 16;  // tokens a warp
constexpr float kEpsilon = 1e-6f;

__device__ __forceinline__ void unpack4(const uint2& bits, float (&x)[4]) {
  x[0] = bf16_low(bits.x), x[1] = bf16_high(bits.x), x[2] = bf16_low(bits.y), x[3] = bf16_high(bits.y);
}

__device__ __forceinline__ void convolve(const DeltaParams& p, int head, int strip) {
  const DeltaArgs& a = p.args;
  const int lane = static_cast<int>(lane_id());
  const int n_heads = 2 * a.n_key_heads + a.n_value_heads;
  const int64_t channels = int64_t{n_heads} * kDim;
  const int64_t channel = int64_t{head} * kDim + 4 * lane;
  const int first = strip * kStrip;
  // The row of m at token t >= -3, from the conv state where t < 0.
  const auto row = [&](int t) -> uint2 {
    if (t >= a.n_tokens) return make_uint2(0, 0);
    if (t >= 0) return *reinterpret_cast<const uint2*>(a.qkv + t * a.qkv_stride + channel);
    if (a.conv_in == nullptr) return make_uint2(0, 0);
    return *reinterpret_cast<const uint2*>(a.conv_in + (t + 3) * channels + channel);
  };
  float w[4][4];  // [channel][tap]
  {
    const auto* from = reinterpret_cast<const uint4*>(a.conv_weight + channel * 4);
    float taps[8];
    unpack8(from[0], taps);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i / 4][i % 4] = taps[i];
    unpack8(from[1], taps);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[2 + i / 4][i % 4] = taps[i];
  }
  uint2 raw[kStrip + 3];
#pragma unroll
  for (int i = 0; i < kStrip + 3; ++i) raw[i] = row(first + i - 3);
  float y[kStrip][4];
#pragma unroll
  for (int i = 0; i < kStrip; ++i) {
    float m[4][4];
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) unpack4(raw[i + tap], m[tap]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float sum = 0;
#pragma unroll
      for (int tap = 0; tap < 4; ++tap) sum = fmaf(w[c][tap], m[tap][c], sum);
      y[i][c] = first + i < a.n_tokens ? silu_fast(sum) : 0.0f;
    }
  }
  const int block = first / kDeltaBlock;
  unsigned char* image;
  float factor = 1.0f;
  if (head < a.n_key_heads) {
    image = p.q + tile_index(p, head, block) * kImageBytes;
    factor = 0.08838834764831845f;  // 128^(-1/2)
  } else if (head < 2 * a.n_key_heads) {
    image = p.k + tile_index(p, head - a.n_key_heads, block) * kImageBytes;
  } else {
    image = p.v + tile_index(p, head - 2 * a.n_key_heads, block) * kImageBytes;
  }
#pragma unroll
  for (int i = 0; i < kStrip; ++i) {
    float scale = 1.0f;
    if (head < 2 * a.n_key_heads) {
      const float squares =
          warp_sum(y[i][0] * y[i][0] + y[i][1] * y[i][1] + y[i][2] * y[i][2] + y[i][3] * y[i][3]);
      scale = factor / sqrtf(squares + kEpsilon);
    }
    *reinterpret_cast<uint2*>(image + image_offset(first % kDeltaBlock + i, 4 * lane)) =
        make_uint2(bf16_pair(y[i][0] * scale, y[i][1] * scale), bf16_pair(y[i][2] * scale, y[i][3] * scale));
  }
  // The state is read by this warp alone, so it may be replaced in place.
  if (strip == 0) {
    uint2 last[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) last[i] = row(a.n_tokens - 3 + i);
#pragma unroll
    for (int i = 0; i < 3; ++i) *reinterpret_cast<uint2*>(a.conv_out + i * channels + channel) = last[i];
  }
}

// Gates of one head and block: a lane takes two neighbouring tokens; the sums are scanned in fp64.
__device__ __forceinline__ void add_up_gates(const DeltaParams& p, int head, int block) {
  const DeltaArgs& args = p.args;
  const int lane = static_cast<int>(lane_id());
  const float rate = -expf(args.a_log[head]), dt = args.dt_bias[head];
  float g[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t t = block * kDeltaBlock + 2 * lane + i;
    g[i] = beta[i] = 0;
    if (t < args.n_tokens) {
      const float x = bf16_value(args.a[t * args.ab_stride + head]) + dt;
      g[i] = rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
      beta[i] = sigmoid(bf16_value(args.b[t * args.ab_stride + head]));
    }
  }
  double sum = static_cast<double>(g[0]) + static_cast<double>(g[1]);
#pragma unroll
  for (int m = 1; m < 32; m *= 2) {
    const double before = shuffle_from(sum, static_cast<unsigned>(lane - m));
    if (lane >= m) sum += before;
  }
  const size_t to = tile_index(p, head, block) * kDeltaBlock + static_cast<size_t>(2 * lane);
  *reinterpret_cast<float2*>(p.gamma + to) =
      make_float2(static_cast<float>(sum - static_cast<double>(g[1])), static_cast<float>(sum));
  *reinterpret_cast<float2*>(p.decay + to) = make_float2(expf(g[0]), expf(g[1]));
  *reinterpret_cast<float2*>(p.beta + to) = make_float2(beta[0], beta[1]);
}

__global__ void __launch_bounds__(kWarps * 32) prepare_kernel(const __grid_constant__ DeltaParams p) {
  pdl_wait();
  pdl_trigger();
  const int n_heads = 2 * p.args.n_key_heads + p.args.n_value_heads;
  int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int n_gates = p.args.n_value_heads * p.n_blocks;
  if (index < n_gates) return add_up_gates(p, index % p.args.n_value_heads, index / p.args.n_value_heads);
  index -= n_gates;
  if (index < n_heads * p.n_blocks * (kDeltaBlock / kStrip)) convolve(p, index % n_heads, index / n_heads);
}

}  // namespace

DeltaParams delta_params(const DeltaArgs& args) {
  require(args.n_tokens > 0 && args.n_value_heads == 2 * args.n_key_heads,
          "delta rule: two value heads a key head");
  DeltaParams p{};
  p.args = args;
  p.n_blocks = delta_blocks(args.n_tokens);
  auto* at = reinterpret_cast<unsigned char*>(args.scratch);
  const auto take = [&](int heads, size_t bytes) {
    unsigned char* from = at;
    at += static_cast<size_t>(heads) * static_cast<size_t>(p.n_blocks) * bytes;
    return from;
  };
  p.q = take(args.n_key_heads, kImageBytes);
  p.k = take(args.n_key_heads, kImageBytes);
  p.v = take(args.n_value_heads, kImageBytes);
  p.u = take(args.n_value_heads, kUBytes);
  p.w = take(args.n_value_heads, kImageBytes);
  p.x = take(args.n_value_heads, kXBytes);
  p.state = take(args.n_value_heads, kStateFragBytes);
  p.gamma = reinterpret_cast<float*>(take(args.n_value_heads, kDeltaBlock * sizeof(float)));
  p.decay = reinterpret_cast<float*>(take(args.n_value_heads, kDeltaBlock * sizeof(float)));
  p.beta = reinterpret_cast<float*>(take(args.n_value_heads, kDeltaBlock * sizeof(float)));
  return p;
}

void delta_prepare(const DeltaParams& p, cudaStream_t stream) {
  const int n_heads = 2 * p.args.n_key_heads + p.args.n_value_heads;
  const int warps = p.n_blocks * (p.args.n_value_heads + n_heads * (kDeltaBlock / kStrip));
  launch(prepare_kernel, p,
         LaunchShape{dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)), kWarps * 32, 0}, stream);
}

}  // namespace lily::cuda
