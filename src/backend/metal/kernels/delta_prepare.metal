// The delta net before its recurrence, as separate ops.
//
// short_conv (14): y [T, C] bf16 from x [T, C] bf16 and the conv state. A thread has one channel and 64 rows.
//   Rows 0 to 2 of a segment read the old state and the new state is written by the same thread, the one
//   whose rows include the segment's first: so src may equal dst. fp32 inside, one rounding. Bound by bytes.
// delta_prepare (16) (18): q, k [T, heads * 128] fp32 normalised; g, beta [T, value heads] fp32. One
// simdgroup
//   a row and key head.
#include "delta.h"

constant constexpr uint kConvRows = 64;

[[kernel]] void short_conv(device const bfloat* x [[buffer(0)]], device bfloat* y [[buffer(1)]],
                           device const float* w [[buffer(2)]], device bfloat* state [[buffer(3)]],
                           constant DeltaParams& p [[buffer(20)]],
                           device const StepSegment* segments [[buffer(28)]],
                           device const StepRow* rows [[buffer(29)]],
                           constant StepHeader& step [[buffer(30)]], uint2 at [[thread_position_in_grid]]) {
  const uint ch = at.x;
  const uint key_width = p.n_key_heads * kDeltaHead;
  const uint slot_words = step.slot_words;
  if (ch >= 2 * key_width + p.n_value_heads * kDeltaHead) return;
  // Where the state of this channel is: channel c of value heads h .. h + copies - 1.
  const bool is_value = ch >= 2 * key_width;
  const uint h = is_value ? (ch - 2 * key_width) / kDeltaHead : ch % key_width / kDeltaHead * 2;
  const uint c = ch % kDeltaHead + (is_value ? 2 * kDeltaHead : ch / key_width * kDeltaHead);
  const uint copies = is_value ? 1 : 2;
  device const bfloat* in = x + p.qkv_first + ch;
  w += ulong(ch) * kTaps;

  const uint end = min((at.y + 1) * kConvRows, step.n_rows);
  for (uint t = at.y * kConvRows; t < end; ++t) {
    const StepSegment s = segments[rows[t].segment];
    const uint i = t - s.first_row;
    if (i >= kTaps - 1) {
      float m[4];
      for (uint j = 0; j < kTaps; ++j) m[j] = float(in[ulong(t - 3 + j) * p.qkv_stride]);
      y[ulong(t) * p.y_stride + ch] = bfloat(convolve(w, m[0], m[1], m[2], m[3]));
      continue;
    }
    if (i != 0) continue;
    float m[6];  // the old state, then the first rows of the segment
    for (uint j = 0; j < 3; ++j)
      m[j] = s.src < 0 ? 0.0f : float(state[conv_index(uint(s.src), slot_words, h, j, c)]);
    for (uint j = 0; j < 3; ++j) m[3 + j] = j < s.n_rows ? float(in[ulong(t + j) * p.qkv_stride]) : 0.0f;
    for (uint j = 0; j < min(3u, s.n_rows); ++j)
      y[ulong(t + j) * p.y_stride + ch] = bfloat(convolve(w, m[j], m[j + 1], m[j + 2], m[j + 3]));
    for (uint j = 0; j < 3; ++j) {
      const uint from = s.n_rows + j;  // counted from the oldest row of the old state
      const float v = from < 6 ? m[from] : float(in[ulong(t + from - 3) * p.qkv_stride]);
      for (uint copy = 0; copy < copies; ++copy)
        state[conv_index(s.dst, slot_words, h + copy, j, c)] = bfloat(v);
    }
  }
}

[[kernel]] void delta_prepare(device const bfloat* mixed [[buffer(0)]], device const bfloat* ba [[buffer(1)]],
                              device const float* a_log [[buffer(2)]],
                              device const float* dt_bias [[buffer(3)]], device float* q [[buffer(4)]],
                              device float* k [[buffer(5)]], device float* g [[buffer(6)]],
                              device float* beta [[buffer(7)]], constant DeltaParams& p [[buffer(20)]],
                              constant StepHeader& step [[buffer(30)]],
                              uint2 at [[threadgroup_position_in_grid]],
                              uint lane [[thread_index_in_simdgroup]]) {
  const uint t = at.y;
  if (t >= step.n_rows) return;
  const uint key_width = p.n_key_heads * kDeltaHead;
  const uint first = at.x * kDeltaHead + lane * 4;
  device const bfloat* row = mixed + ulong(t) * p.qkv_stride;
  float4 qv, kv;
  for (uint i = 0; i < 4; ++i) {
    qv[i] = float(row[p.qkv_first + first + i]);
    kv[i] = float(row[p.v_first + first + i]);
  }
  qv = l2_normalised(qv, kQueryScale);
  kv = l2_normalised(kv, 1.0f);
  for (uint i = 0; i < 4; ++i) {
    q[ulong(t) * key_width + first + i] = qv[i];
    k[ulong(t) * key_width + first + i] = kv[i];
  }
  if (lane < 2) {
    const uint h = at.x * 2 + lane;
    const float a = float(ba[ulong(t) * p.a_stride + p.a_first + h]);
    const float b = float(ba[ulong(t) * p.b_stride + p.b_first + h]);
    g[ulong(t) * p.n_value_heads + h] = log_decay(a_log[h], dt_bias[h], a);
    beta[ulong(t) * p.n_value_heads + h] = sigmoid(b);
  }
}
