// General and fixed-block attention for few rows; see attention_decode.h and attention_blocks.h.
#include "attention_blocks.h"
#include "attention_decode.h"

#define INSTANTIATE(bits, name)                                              \
  template [[host_name("attention_decode" name)]] [[kernel]]                 \
  decltype(attention_decode<4, true, bits>) attention_decode<4, true, bits>; \
  template [[host_name("attention_part" name)]] [[kernel]]                   \
  decltype(attention_part<4, true, bits>) attention_part<4, true, bits>;
INSTANTIATE(16, "")
INSTANTIATE(8, "_int8")

[[kernel]] void attention_merge(device const float* partial [[buffer(0)]], device bfloat* y [[buffer(1)]],
                                device const bfloat* gate [[buffer(4)]],
                                constant AttentionParams& p [[buffer(20)]],
                                device const StepRow* rows [[buffer(29)]],
                                constant StepHeader& step [[buffer(30)]],
                                uint2 at [[threadgroup_position_in_grid]],
                                uint lid [[thread_index_in_threadgroup]]) {
  const uint t = at.y;
  if (t >= step.n_rows) return;
  const uint n_parts = rows[t].position / kSplitTokens + 1;
  device const float* from = partial + (ulong(t) * p.n_q_heads + at.x) * p.n_parts * kPartValues;
  float top = kLowest;
  for (uint i = 0; i < n_parts; ++i) top = max(top, from[i * kPartValues + kAttentionHead]);
  float total = 0.0f;
  float value = 0.0f;
  for (uint i = 0; i < n_parts; ++i) {
    device const float* part = from + i * kPartValues;
    const float weight = exp(part[kAttentionHead] - top);
    total = fma(part[kAttentionHead + 1], weight, total);
    value = fma(part[lid], weight, value);
  }
  float o = value / total;
  if (p.gated != 0)
    o *=
        sigmoid(float(gate[ulong(t) * p.gate_stride + p.gate_first + (2 * at.x + 1) * kAttentionHead + lid]));
  y[ulong(t) * p.y_stride + at.x * kAttentionHead + lid] = bfloat(o);
}
