// delta_mixer_decode. Grid: a cluster of 8 blocks a key head and row; block r owns 32 columns of the state of
// value head 2 k + r / 4: 8 threads a column, 16 of its 128 values each, in registers. Bound by the state:
// read once (before the wait: the previous token wrote it) and written once. Everything inside is fp32; the
// convolved values are rounded to bf16 once, as is y. Each block convolves the q and k channels of its key
// head again, which is cheaper than exchanging them. Blocks send one another their part of the norm's sum;
// who has all parts may overwrite the convolution state in place.
#include "backend/cuda/kernels/delta_decode.h"

#include "backend/cuda/kernels/launch.h"

namespace lily::cuda {
namespace {

constexpr int kHead = 128;  // values of a head; rows and columns of a state
constexpr unsigned kCluster = 8, kThreads = 256;
constexpr int kColumns = 32;  // of a block
constexpr int kParts = kHead / kColumns;

struct Shared {
  float q[kHead], k[kHead], v[kColumns], o[kColumns];
  float squares[8];  // of the warps: q 0 .. 3, k 4 .. 7
  MBarrier arrived;
  float o_squares[kCluster];  // of the blocks of the cluster, which they send to one another
};

struct Channel {  // one channel's convolution
  float w[4], old[3];
  uint16_t old_bits[3];
};

__device__ __forceinline__ Channel load_channel(const DeltaDecode& p, int channel, int src, int channels) {
  Channel c;
  const uint2 w = reinterpret_cast<const uint2*>(p.conv)[channel];
  c.w[0] = bf16_low(w.x);
  c.w[1] = bf16_high(w.x);
  c.w[2] = bf16_low(w.y);
  c.w[3] = bf16_high(w.y);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    c.old_bits[i] = src < 0
                        ? uint16_t{0}
                        : p.conv_state[static_cast<size_t>(src) * static_cast<size_t>(p.conv_slot_stride) +
                                       static_cast<size_t>(i * channels + channel)];
    c.old[i] = bf16_value(c.old_bits[i]);
  }
  return c;
}

__device__ __forceinline__ float convolve(const Channel& c, float now) {
  const float sum = fmaf(c.w[3], now, fmaf(c.w[2], c.old[2], fmaf(c.w[1], c.old[1], c.w[0] * c.old[0])));
  return bf16_value(static_cast<uint16_t>(bf16_bits(silu(sum))));
}

__device__ __forceinline__ void shift_channel(const DeltaDecode& p, const Channel& c, int channel, int dst,
                                              int channels, uint16_t now) {
  uint16_t* state =
      p.conv_state + static_cast<size_t>(dst) * static_cast<size_t>(p.conv_slot_stride) + channel;
  state[0] = c.old_bits[1];
  state[channels] = c.old_bits[2];
  state[2 * static_cast<size_t>(channels)] = now;
}

__global__ void __launch_bounds__(kThreads) delta_mixer_decode(DeltaDecode p) {
  auto* s = reinterpret_cast<Shared*>(shared_memory());
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.y);
  const int rank = static_cast<int>(cluster_rank()), key_head = static_cast<int>(blockIdx.x / kCluster);
  const int head = 2 * key_head + rank / kParts, part = rank % kParts;
  const int key_width = p.n_key_heads * kHead, channels = 4 * key_width;
  const int src = p.step.state_src[row], dst = p.step.state_dst[row];
  if (thread == 0) {
    mbarrier_init(&s->arrived, 1);
    mbarrier_init_fence();
  }
  warp_sync();  // the compiler initialises by an instruction of the whole warp
  if (thread == 0) mbarrier_expect(&s->arrived, kCluster * 4);
  cluster_arrive();

  // Static data and the state: before the wait, unless the kernel in front is still writing it.
  if (p.state_in_flight) pdl_wait();
  const int qk_channel = (thread < kHead ? 0 : key_width - kHead) + key_head * kHead + thread;
  const int v_channel = 2 * key_width + head * kHead + part * kColumns + thread;
  const Channel qk = load_channel(p, qk_channel, src, channels);
  Channel v{};
  if (thread < kColumns) v = load_channel(p, v_channel, src, channels);
  const int column = thread / 8, lane8 = thread % 8;
  const size_t in_state =
      (static_cast<size_t>(head) * kHead + static_cast<size_t>(part * kColumns + column)) * kHead +
      static_cast<size_t>(4 * lane8);
  float4 state[4];
  if (src < 0) {
#pragma unroll
    for (float4& values : state) values = make_float4(0, 0, 0, 0);
  } else {
    const auto* from = reinterpret_cast<const float4*>(
        p.delta_state + static_cast<size_t>(src) * static_cast<size_t>(p.delta_slot_stride) + in_state);
    const bool last = p.evict_source && src != dst;
#pragma unroll
    for (int i = 0; i < 4; ++i) state[i] = last ? load_last(from + 8 * i) : load_l2(from + 8 * i);
  }
  const float decay_rate = expf(p.a_log[head]), dt_bias = p.dt_bias[head];
  const float norm = thread < kColumns ? p.norm[part * kColumns + thread] : 0.0f;
  cluster_wait();  // every block's barrier can take messages
  pdl_wait();
  pdl_trigger();

  // All loads first: one after another they would cost a trip to the L2 each.
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(p.stride);
  const uint16_t qk_now = p.qkv[at + static_cast<size_t>(qk_channel)];
  const uint16_t a_bits = p.a[at + static_cast<size_t>(head)], b_bits = p.b[at + static_cast<size_t>(head)];
  uint16_t v_now = 0, z_bits = 0;
  if (thread < kColumns) {
    v_now = p.qkv[at + static_cast<size_t>(v_channel)];
    z_bits = p.z[at + static_cast<size_t>(head * kHead + part * kColumns + thread)];
  }
  const float x = convolve(qk, bf16_value(qk_now));
  if (thread < kColumns) s->v[thread] = convolve(v, bf16_value(v_now));
  const float square = warp_sum(x * x);
  if (lane_id() == 0) s->squares[thread / 32] = square;
  block_sync();
  {
    const float* q = s->squares + (thread < kHead ? 0 : 4);
    const float length = reciprocal_sqrt(((q[0] + q[1]) + (q[2] + q[3])) + 1e-6f);
    if (thread < kHead) s->q[thread] = x * length * 0.08838834764831845f;  // 128^-1/2
    else s->k[thread - kHead] = x * length;
  }
  const float a = bf16_value(a_bits) + dt_bias;
  const float softplus = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
  const float decay = expf(-decay_rate * softplus);
  const float beta = sigmoid(bf16_value(b_bits));
  block_sync();

  float4 k[4];
  float read = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    k[i] = reinterpret_cast<const float4*>(s->k)[lane8 + 8 * i];
    state[i].x *= decay;
    state[i].y *= decay;
    state[i].z *= decay;
    state[i].w *= decay;
    read = fmaf(k[i].x, state[i].x,
                fmaf(k[i].y, state[i].y, fmaf(k[i].z, state[i].z, fmaf(k[i].w, state[i].w, read))));
  }
#pragma unroll
  for (int m = 1; m < 8; m <<= 1) read += shuffle_xor(read, m);
  const float delta = beta * (s->v[column] - read);
  float o = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 q = reinterpret_cast<const float4*>(s->q)[lane8 + 8 * i];
    state[i].x = fmaf(k[i].x, delta, state[i].x);
    state[i].y = fmaf(k[i].y, delta, state[i].y);
    state[i].z = fmaf(k[i].z, delta, state[i].z);
    state[i].w = fmaf(k[i].w, delta, state[i].w);
    o = fmaf(q.x, state[i].x, fmaf(q.y, state[i].y, fmaf(q.z, state[i].z, fmaf(q.w, state[i].w, o))));
  }
#pragma unroll
  for (int m = 1; m < 8; m <<= 1) o += shuffle_xor(o, m);
  if (lane8 == 0) s->o[column] = o;
  block_sync();
  if (thread < kColumns) {
    const float mine = s->o[thread], o_square = warp_sum(mine * mine);
    if (thread < static_cast<int>(kCluster))
      cluster_send(&s->o_squares[rank], &s->arrived, static_cast<unsigned>(thread), o_square);
    const float gate = norm * silu_bf16(bf16_value(z_bits));
    mbarrier_wait(&s->arrived, 0);
    const float* squares = s->o_squares + rank / kParts * kParts;
    const float sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    const float r = reciprocal_sqrt(sum / kHead + p.epsilon);
    const int col = part * kColumns + thread;
    p.y[static_cast<size_t>(row) * static_cast<size_t>(2 * key_width) +
        static_cast<size_t>(head * kHead + col)] = static_cast<uint16_t>(bf16_bits(mine * r * gate));
    shift_channel(p, v, v_channel, dst, channels, v_now);
  }
  if (rank == 0) {
    mbarrier_wait(&s->arrived, 0);  // all blocks have read the old state, or they could not have sent
    shift_channel(p, qk, qk_channel, dst, channels, qk_now);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *reinterpret_cast<float4*>(p.delta_state +
                               static_cast<size_t>(dst) * static_cast<size_t>(p.delta_slot_stride) +
                               in_state + static_cast<size_t>(32 * i)) = state[i];
}

}  // namespace

void launch_delta_decode(const DeltaDecode& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.cluster = kCluster;
  shape.grid = dim3(static_cast<unsigned>(p.n_key_heads) * kCluster, static_cast<unsigned>(p.rows));
  shape.shared_bytes = sizeof(Shared);
  launch(delta_mixer_decode, p, shape, stream);
}

}  // namespace lily::cuda
