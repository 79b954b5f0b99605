// The experts without mechanisms: the grouped GEMM without matrix units (P6 off; see experts_gemm.h), and the
// expansion of a whole weight to bf16 in memory in front of it (P1 off).
//
// expand_weight: y [matrices * out, in] bf16. A thread 16 columns, in two stores; grid (in / 16 / 32, rows).
// Bound by bytes.
#include "experts_gemm.h"

#define INSTANTIATE(bits, name)                                                                        \
  template [[host_name("experts_gate_up_prefill_vector_" name)]] [[kernel]]                            \
  decltype(experts_gate_up_prefill<bits, VectorProduct>) experts_gate_up_prefill<bits, VectorProduct>; \
  template [[host_name("experts_linear_prefill_vector_" name)]] [[kernel]]                             \
  decltype(experts_linear_prefill<bits, VectorProduct>) experts_linear_prefill<bits, VectorProduct>;
INSTANTIATE(4, "q4")
INSTANTIATE(8, "q8")
INSTANTIATE(16, "bf16")

template <int kBits>
[[kernel]] void expand_weight(device const uchar* w [[buffer(0)]], device bfloat* y [[buffer(1)]],
                              constant ExpertsParams& p [[buffer(20)]],
                              uint2 at [[thread_position_in_grid]]) {
  const uint k = at.x * kSpan;
  if (k >= p.in) return;
  float codes[16];
  load_codes<kBits>(w, ulong(at.y), p.in, k, codes);
  const float2 affine = load_affine<kBits>(w, uint2(p.scales[0], p.biases[0]), ulong(at.y), p.in, k);
  static_assert(kSpan == 16, "two words of 16 bytes");
  uint4 words[2];
  for (uint i = 0; i < kSpan; i += 2) {
    ushort pair[2];
    for (uint j = 0; j < 2; ++j)
      pair[j] = as_type<ushort>(bfloat(kBits == 16 ? codes[i + j] : fma(affine.x, codes[i + j], affine.y)));
    words[i / 8][i / 2 % 4] = uint(pair[0]) | uint(pair[1]) << 16;
  }
  device uint4* to = (device uint4*)(y + ulong(at.y) * p.in + k);
  to[0] = words[0];
  to[1] = words[1];
}
template [[host_name("expand_weight_q4")]] [[kernel]] decltype(expand_weight<4>) expand_weight<4>;
template [[host_name("expand_weight_q8")]] [[kernel]] decltype(expand_weight<8>) expand_weight<8>;
template [[host_name("expand_weight_bf16")]] [[kernel]] decltype(expand_weight<16>) expand_weight<16>;
