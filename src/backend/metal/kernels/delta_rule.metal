// The recurrence (19) with its state in registers (P4), and its fusions (D4d).
//
// A state column (one of 128 dv) belongs to one simdgroup, split among its lanes, loaded once, carried
// through all rows of the segment, written once; lanes exchange by simd_sum. Four columns a simdgroup. State,
// gates and sums are fp32. Bound by state bytes for one row, by the chain of sums for many.
//
// delta_rule: o [T, value heads * 128] fp32. Grid (value heads * 8, segments), four simdgroups a group, no
//   barrier.
// delta_rule_norm: then the gated norm (20): y bf16. Grid (value heads, segments); 32 simdgroups hold the
//   whole head (64 KB of registers), so that the norm's sum stays in the threadgroup.
// delta_mixer: the convolution (14), the l2 norms (16) and the gates (18) in front of that, for decode.
#include "delta.h"

[[kernel]] void delta_rule(device const float* q [[buffer(0)]], device const float* k [[buffer(1)]],
                           device const bfloat* v [[buffer(2)]], device const float* g [[buffer(3)]],
                           device const float* beta [[buffer(4)]], device float* state [[buffer(5)]],
                           device float* o [[buffer(6)]], constant DeltaParams& p [[buffer(20)]],
                           device const StepSegment* segments [[buffer(28)]],
                           constant StepHeader& step [[buffer(30)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint sg [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  if (at.y >= step.n_segments) return;
  const StepSegment s = segments[at.y];
  const uint slot_words = step.slot_words;
  const uint h = at.x / 8;
  const uint first = (at.x % 8 * 4 + sg) * kColumns;
  const uint key_width = p.n_key_heads * kDeltaHead;
  float4 columns[kColumns];
  for (uint c = 0; c < kColumns; ++c) columns[c] = load_column(state, s.src, slot_words, h, first + c, lane);
  for (uint t = s.first_row; t < s.first_row + s.n_rows; ++t) {
    const ulong key = ulong(t) * key_width + h / 2 * kDeltaHead + lane * 4;
    const float4 qv = *(device const float4*)(q + key);
    const float4 kv = *(device const float4*)(k + key);
    const float decay = exp(g[ulong(t) * p.n_value_heads + h]);
    const float b = beta[ulong(t) * p.n_value_heads + h];
    for (uint c = 0; c < kColumns; ++c) {
      const uint dv = h * kDeltaHead + first + c;
      const float value = float(v[ulong(t) * p.v_stride + p.v_first + dv]);
      const float out = delta_step(columns[c], qv, kv, value, decay, b);
      if (lane == 0) o[ulong(t) * p.y_stride + dv] = out;
    }
  }
  for (uint c = 0; c < kColumns; ++c) store_column(state, s.dst, slot_words, h, first + c, lane, columns[c]);
}

// (20) for one row and head: outputs [128] in threadgroup memory; simdgroup 0 writes y.
inline void store_gated_norm(threadgroup const float* outputs, device const bfloat* z, device const float* w,
                             device bfloat* y, uint sg, uint lane) {
  if (sg != 0) return;
  float4 out;
  for (uint i = 0; i < 4; ++i) out[i] = outputs[lane * 4 + i];
  const float scale = rsqrt(simd_sum(dot(out, out)) / float(kDeltaHead) + kEpsilon);
  for (uint i = 0; i < 4; ++i)
    y[lane * 4 + i] = bfloat(out[i] * scale * w[lane * 4 + i] * silu(float(z[lane * 4 + i])));
}

[[kernel]] void delta_rule_norm(device const float* q [[buffer(0)]], device const float* k [[buffer(1)]],
                                device const bfloat* v [[buffer(2)]], device const float* g [[buffer(3)]],
                                device const float* beta [[buffer(4)]], device float* state [[buffer(5)]],
                                device bfloat* y [[buffer(6)]], device const bfloat* z [[buffer(7)]],
                                device const float* w [[buffer(8)]], constant DeltaParams& p [[buffer(20)]],
                                device const StepSegment* segments [[buffer(28)]],
                                constant StepHeader& step [[buffer(30)]],
                                uint2 at [[threadgroup_position_in_grid]],
                                uint sg [[simdgroup_index_in_threadgroup]],
                                uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float outputs[kDeltaHead];
  if (at.y >= step.n_segments) return;
  const StepSegment s = segments[at.y];
  const uint slot_words = step.slot_words;
  const uint h = at.x;
  const uint first = sg * kColumns;
  const uint key_width = p.n_key_heads * kDeltaHead;
  float4 columns[kColumns];
  for (uint c = 0; c < kColumns; ++c) columns[c] = load_column(state, s.src, slot_words, h, first + c, lane);
  for (uint t = s.first_row; t < s.first_row + s.n_rows; ++t) {
    const ulong key = ulong(t) * key_width + h / 2 * kDeltaHead + lane * 4;
    const float4 qv = *(device const float4*)(q + key);
    const float4 kv = *(device const float4*)(k + key);
    const float decay = exp(g[ulong(t) * p.n_value_heads + h]);
    const float b = beta[ulong(t) * p.n_value_heads + h];
    for (uint c = 0; c < kColumns; ++c) {
      const uint dv = h * kDeltaHead + first + c;
      const float value = float(v[ulong(t) * p.v_stride + p.v_first + dv]);
      const float out = delta_step(columns[c], qv, kv, value, decay, b);
      if (lane == 0) outputs[first + c] = out;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_gated_norm(outputs, z + ulong(t) * p.z_stride + p.z_first + h * kDeltaHead, w,
                     y + ulong(t) * p.y_stride + h * kDeltaHead, sg, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint c = 0; c < kColumns; ++c) store_column(state, s.dst, slot_words, h, first + c, lane, columns[c]);
}

[[kernel]] void delta_mixer(device const bfloat* in [[buffer(0)]], device bfloat* y [[buffer(1)]],
                            device const float* conv [[buffer(2)]], device const float* a_log [[buffer(3)]],
                            device const float* dt_bias [[buffer(4)]], device const float* w [[buffer(5)]],
                            device bfloat* conv_state [[buffer(6)]], device float* state [[buffer(7)]],
                            constant DeltaParams& p [[buffer(20)]],
                            device const StepSegment* segments [[buffer(28)]],
                            constant StepHeader& step [[buffer(30)]],
                            uint2 at [[threadgroup_position_in_grid]],
                            uint lid [[thread_index_in_threadgroup]],
                            uint sg [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float mixed[kMixerChannels];
  threadgroup float outputs[kDeltaHead];
  if (at.y >= step.n_segments) return;
  const StepSegment s = segments[at.y];
  const uint slot_words = step.slot_words;
  const uint h = at.x;
  const uint first = sg * kColumns;
  float4 columns[kColumns];
  for (uint c = 0; c < kColumns; ++c) columns[c] = load_column(state, s.src, slot_words, h, first + c, lane);
  const bool convolves = lid < kMixerChannels;
  const uint ch = channel_of(h, convolves ? lid : 0, p.n_key_heads);
  float m[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (convolves && s.src >= 0)
    for (uint j = 0; j < 3; ++j) m[j] = float(conv_state[conv_index(uint(s.src), slot_words, h, j, lid)]);

  for (uint t = s.first_row; t < s.first_row + s.n_rows; ++t) {
    device const bfloat* row = in + ulong(t) * p.qkv_stride;
    if (convolves) {
      m[3] = float(row[p.qkv_first + ch]);
      mixed[lid] = convolve(conv + ulong(ch) * kTaps, m[0], m[1], m[2], m[3]);
      for (uint j = 0; j < 3; ++j) m[j] = m[j + 1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float4 q, k;
    for (uint i = 0; i < 4; ++i) {
      q[i] = mixed[lane * 4 + i];
      k[i] = mixed[kDeltaHead + lane * 4 + i];
    }
    q = l2_normalised(q, kQueryScale);
    k = l2_normalised(k, 1.0f);
    const float decay = exp(log_decay(a_log[h], dt_bias[h], float(row[p.a_first + h])));
    const float beta = sigmoid(float(row[p.b_first + h]));
    for (uint c = 0; c < kColumns; ++c) {
      const float out = delta_step(columns[c], q, k, mixed[2 * kDeltaHead + first + c], decay, beta);
      if (lane == 0) outputs[first + c] = out;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_gated_norm(outputs, row + p.z_first + h * kDeltaHead, w, y + ulong(t) * p.y_stride + h * kDeltaHead,
                     sg, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint c = 0; c < kColumns; ++c) store_column(state, s.dst, slot_words, h, first + c, lane, columns[c]);
  if (convolves)
    for (uint j = 0; j < 3; ++j) conv_state[conv_index(s.dst, slot_words, h, j, lid)] = bfloat(m[j]);
}
