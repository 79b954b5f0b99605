// Row-wise operations between the projections; bound by bytes.
//
// rms_norm (2): y = x / sqrt(mean(x^2) + eps) * w. x [T or O, H] fp32, y bf16. One threadgroup of 256 a row;
//   the mean is a sum of lane sums in fp32, one rounding on store.
// add: y = residual + x, x bf16, the rest fp32. swiglu (24): y = silu(gate) * up in fp32, one rounding.
// attention_gate (12): y = o * sigmoid(gate), head h's gate 256 columns after its query.
//   One thread an element, rows on the grid's y.
// gated_norm (20): per value head, y = o / sqrt(mean(o^2) + eps) * w * silu(z). One simdgroup a head.
#include "quantised.h"

inline uint rows_of(constant RowsParams& p, constant StepHeader& step) {
  return (p.of_outputs != 0 ? step.n_outputs : step.n_rows) * p.per_row;
}

[[kernel]] void rms_norm(device const float* x [[buffer(0)]], device bfloat* y [[buffer(1)]],
                         device const float* w [[buffer(2)]], constant RowsParams& p [[buffer(20)]],
                         constant StepHeader& step [[buffer(30)]], uint t [[threadgroup_position_in_grid]],
                         uint lid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[8];
  if (t >= rows_of(p, step)) return;
  device const float* row = x + ulong(t) * p.width;
  float sum = 0.0f;
  for (uint c = lid; c < p.width; c += 256) sum = fma(row[c], row[c], sum);
  sum = simd_sum(sum);
  if (lane == 0) sums[sg] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < 8; ++i) total += sums[i];
  const float scale = rsqrt(total / float(p.width) + kEpsilon);
  for (uint c = lid; c < p.width; c += 256) y[ulong(t) * p.width + c] = bfloat(row[c] * scale * w[c]);
}

[[kernel]] void add(device const bfloat* x [[buffer(0)]], device const float* residual [[buffer(1)]],
                    device float* y [[buffer(2)]], constant RowsParams& p [[buffer(20)]],
                    constant StepHeader& step [[buffer(30)]], uint2 at [[thread_position_in_grid]]) {
  if (at.y >= rows_of(p, step) || at.x >= p.width) return;
  const ulong i = ulong(at.y) * p.width + at.x;
  y[i] = residual[i] + float(x[i]);
}

[[kernel]] void swiglu(device const bfloat* gate [[buffer(0)]], device const bfloat* up [[buffer(1)]],
                       device bfloat* y [[buffer(2)]], constant RowsParams& p [[buffer(20)]],
                       constant StepHeader& step [[buffer(30)]], uint2 at [[thread_position_in_grid]]) {
  if (at.y >= rows_of(p, step) || at.x >= p.width) return;
  const float g = float(gate[ulong(at.y) * p.a_stride + p.a_first + at.x]);
  const float u = float(up[ulong(at.y) * p.b_stride + p.b_first + at.x]);
  y[ulong(at.y) * p.y_stride + at.x] = bfloat(silu(g) * u);
}

[[kernel]] void attention_gate(device const bfloat* o [[buffer(0)]], device const bfloat* gate [[buffer(1)]],
                               device bfloat* y [[buffer(2)]], constant RowsParams& p [[buffer(20)]],
                               constant StepHeader& step [[buffer(30)]],
                               uint2 at [[thread_position_in_grid]]) {
  if (at.y >= rows_of(p, step) || at.x >= p.width) return;
  const uint column = at.x / kAttentionHead * 2 * kAttentionHead + kAttentionHead + at.x % kAttentionHead;
  const float g = float(gate[ulong(at.y) * p.b_stride + p.b_first + column]);
  y[ulong(at.y) * p.y_stride + at.x] = bfloat(float(o[ulong(at.y) * p.a_stride + at.x]) * sigmoid(g));
}

[[kernel]] void gated_norm(device const float* o [[buffer(0)]], device const bfloat* z [[buffer(1)]],
                           device bfloat* y [[buffer(2)]], device const float* w [[buffer(3)]],
                           constant RowsParams& p [[buffer(20)]], constant StepHeader& step [[buffer(30)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
  if (at.y >= rows_of(p, step)) return;
  const uint first = at.x * kDeltaHead + lane * 4;
  float v[4];
  float sum = 0.0f;
  for (uint i = 0; i < 4; ++i) {
    v[i] = o[ulong(at.y) * p.a_stride + first + i];
    sum = fma(v[i], v[i], sum);
  }
  const float scale = rsqrt(simd_sum(sum) / float(kDeltaHead) + kEpsilon);
  for (uint i = 0; i < 4; ++i) {
    const float gate = silu(float(z[ulong(at.y) * p.b_stride + p.b_first + first + i]));
    y[ulong(at.y) * p.y_stride + first + i] = bfloat(v[i] * scale * w[lane * 4 + i] * gate);
  }
}
