// The experts of a few rows, assignment by assignment. Bound by weight bytes; sums fp32.
//
// experts_gate_up_decode (24) (D4a): mid [A, width] bf16 = silu(x G^T) * (x U^T). Grid (width / 8, 9, T):
// slots
//   0 to 7 are the row's routed experts, slot 8 the shared one. Two simdgroups; each computes four gate and
//   four up rows, so that the activation needs no memory. Where the router is inside, each simdgroup chooses
//   the experts from the logits itself, which costs less than a barrier between all of them, and one writes
//   them.
// experts_linear_decode: one projection, y [A, out] bf16. Grid (out / 8, 8, T).
// experts_down_combine_decode (24) (26) (D4b): residual + sum of weight * down row + sigmoid(gate) * shared.
//   Grid (H / 4, T): nine simdgroups, one an expert and one for the shared expert, compute the same four
//   rows; four threads add them up in the order 0 .. 7, shared. Nothing between the projection and the
//   residual touches memory.
// experts_combine (26): the sum alone, for any number of rows. Grid (H, T), a thread an element.
#include "router.h"

constant constexpr uint kOut = 4;

// dot_rows for a storage that is known at run time: the shared expert's may differ from the routed ones'.
inline void dot_rows_of(uint bits, device const uchar* w, uint2 part, ulong first_row, uint n_out, uint in,
                        device const bfloat* x, uint lane, thread float* acc) {
  if (bits == 4) dot_rows<4, 4>(w, part, first_row, n_out, in, x, lane, acc);
  else if (bits == 8) dot_rows<8, 4>(w, part, first_row, n_out, in, x, lane, acc);
  else dot_rows<16, 4>(w, part, first_row, n_out, in, x, lane, acc);
}

template <int kBits>
[[kernel]] void experts_gate_up_decode(
    device const bfloat* x [[buffer(0)]], device int* ids [[buffer(1)]], device bfloat* mid [[buffer(2)]],
    device bfloat* shared_mid [[buffer(3)]], device const uchar* gate [[buffer(4)]],
    device const uchar* up [[buffer(5)]], device const uchar* shared_gate [[buffer(6)]],
    device const uchar* shared_up [[buffer(7)]], device const float* router [[buffer(8)]],
    device float* weights [[buffer(9)]], constant ExpertsParams& p [[buffer(20)]],
    constant StepHeader& step [[buffer(30)]], uint3 at [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint t = at.z;
  const uint slot = at.y;
  if (t >= step.n_rows) return;
  const bool is_shared = slot == kTopK;
  const uint out = is_shared ? p.shared_in : p.out;
  const uint first = (at.x * 2 + sg) * kOut;
  if (first >= out) return;
  const uint n_out = min(kOut, out - first);
  device const bfloat* row = x + ulong(t) * p.x_stride;
  float g[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float u[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (is_shared) {
    dot_rows_of(p.shared_bits, shared_gate, uint2(p.shared_scales[0], p.shared_biases[0]), first, n_out, p.in,
                row, lane, g);
    dot_rows_of(p.shared_bits, shared_up, uint2(p.shared_scales[1], p.shared_biases[1]), first, n_out, p.in,
                row, lane, u);
  } else {
    uint expert;
    if (p.n_experts != 0) {
      float weight;
      const uint id =
          top_experts(router + ulong(t) * p.router_stride + p.router_first, p.n_experts, lane, weight);
      expert = simd_shuffle(id, ushort(slot));
      if (slot == 0 && first == 0 && lane < kTopK) {
        ids[t * kTopK + lane] = int(id);
        weights[t * kTopK + lane] = weight;
      }
    } else {
      expert = uint(ids[t * kTopK + slot]);
    }
    const ulong weight_row = ulong(expert) * p.out + first;
    dot_rows<kBits, 4>(gate, uint2(p.scales[0], p.biases[0]), weight_row, n_out, p.in, row, lane, g);
    dot_rows<kBits, 4>(up, uint2(p.scales[1], p.biases[1]), weight_row, n_out, p.in, row, lane, u);
  }
  device bfloat* y =
      is_shared ? shared_mid + ulong(t) * p.shared_in : mid + ulong(t * kTopK + slot) * p.y_stride;
  for (uint r = 0; r < n_out; ++r) {
    const float value = silu(simd_sum(g[r])) * simd_sum(u[r]);
    if (lane == 0) y[first + r] = bfloat(value);
  }
}

template <int kBits>
[[kernel]] void experts_linear_decode(
    device const bfloat* x [[buffer(0)]], device const int* ids [[buffer(1)]], device bfloat* y [[buffer(2)]],
    device const uchar* w [[buffer(4)]], constant ExpertsParams& p [[buffer(20)]],
    constant StepHeader& step [[buffer(30)]], uint3 at [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint t = at.z;
  const uint a = t * kTopK + at.y;
  const uint first = (at.x * 2 + sg) * kOut;
  if (t >= step.n_rows || first >= p.out) return;
  const uint n_out = min(kOut, p.out - first);
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  dot_rows<kBits, 4>(w, uint2(p.scales[0], p.biases[0]), ulong(ids[a]) * p.out + first, n_out, p.in,
                     x + ulong(p.from_tokens != 0 ? t : a) * p.x_stride, lane, acc);
  for (uint r = 0; r < n_out; ++r) {
    const float value = simd_sum(acc[r]);
    if (lane == 0) y[ulong(a) * p.y_stride + first + r] = bfloat(value);
  }
}

template <int kBits>
[[kernel]] void experts_down_combine_decode(
    device const bfloat* mid [[buffer(0)]], device const int* ids [[buffer(1)]],
    device const float* weights [[buffer(2)]], device const bfloat* shared [[buffer(3)]],
    device const float* shared_gate [[buffer(4)]], device const float* residual [[buffer(5)]],
    device float* y [[buffer(6)]], device const uchar* down [[buffer(7)]],
    device const uchar* shared_down [[buffer(8)]], constant ExpertsParams& p [[buffer(20)]],
    constant StepHeader& step [[buffer(30)]], uint2 at [[threadgroup_position_in_grid]],
    uint lid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[kTopK + 1][4];
  const uint t = at.y;
  if (t >= step.n_rows) return;
  const uint first = at.x * kOut;
  const uint n_out = min(kOut, p.out - first);
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float scale;
  if (sg < kTopK) {
    const uint a = t * kTopK + sg;
    scale = weights[a];
    dot_rows<kBits, 4>(down, uint2(p.scales[0], p.biases[0]), ulong(ids[a]) * p.out + first, n_out, p.in,
                       mid + ulong(a) * p.x_stride, lane, acc);
  } else {
    scale = sigmoid(shared_gate[ulong(t) * p.gate_stride + p.gate_first]);
    if (p.shared_given != 0) {
      if (lane == 0)
        for (uint r = 0; r < n_out; ++r) acc[r] = float(shared[ulong(t) * p.out + first + r]);
    } else {
      dot_rows_of(p.shared_bits, shared_down, uint2(p.shared_scales[0], p.shared_biases[0]), first, n_out,
                  p.shared_in, shared + ulong(t) * p.shared_in, lane, acc);
    }
  }
  for (uint r = 0; r < n_out; ++r) {
    const float value = simd_sum(acc[r]) * scale;
    if (lane == 0) parts[sg][r] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lid < n_out) {
    float sum = 0.0f;
    for (uint j = 0; j <= kTopK; ++j) sum += parts[j][lid];
    const ulong i = ulong(t) * p.y_stride + first + lid;
    y[i] = residual[i] + sum;
  }
}

[[kernel]] void experts_combine(
    device const bfloat* experts [[buffer(0)]], device const int* position [[buffer(1)]],
    device const float* weights [[buffer(2)]], device const bfloat* shared [[buffer(3)]],
    device const float* shared_gate [[buffer(4)]], device const float* residual [[buffer(5)]],
    device float* y [[buffer(6)]], constant ExpertsParams& p [[buffer(20)]],
    constant StepHeader& step [[buffer(30)]], uint2 at [[thread_position_in_grid]]) {
  const uint t = at.y;
  if (t >= step.n_rows || at.x >= p.out) return;
  float sum = 0.0f;
  for (uint j = 0; j < kTopK; ++j) {
    const uint a = t * kTopK + j;
    const uint row = p.from_tokens != 0 ? a : uint(position[a]);  // without groups rows stand by assignment
    sum = fma(weights[a], float(experts[ulong(row) * p.x_stride + at.x]), sum);
  }
  const float gate = sigmoid(shared_gate[ulong(t) * p.gate_stride + p.gate_first]);
  sum = fma(gate, float(shared[ulong(t) * p.out + at.x]), sum);
  const ulong i = ulong(t) * p.y_stride + at.x;
  y[i] = residual[i] + sum;
}

#define INSTANTIATE(bits, name)                                          \
  template [[host_name("experts_gate_up_decode_" name)]] [[kernel]]      \
  decltype(experts_gate_up_decode<bits>) experts_gate_up_decode<bits>;   \
  template [[host_name("experts_linear_decode_" name)]] [[kernel]]       \
  decltype(experts_linear_decode<bits>) experts_linear_decode<bits>;     \
  template [[host_name("experts_down_combine_decode_" name)]] [[kernel]] \
  decltype(experts_down_combine_decode<bits>) experts_down_combine_decode<bits>;
INSTANTIATE(4, "q4")
INSTANTIATE(8, "q8")
INSTANTIATE(16, "bf16")
