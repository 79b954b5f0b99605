// y[n] = sum over k of (scale * code + bias) * x[k], one output a simdgroup. A lane takes 8 columns, one word
// of codes, of every 256: sum of code * x and sum of x, so that scale and bias are applied once a word.
#include <metal_simdgroup>
#include <metal_stdlib>

#include "q4.h"
using namespace metal;

constant bool kAddToY [[function_constant(0)]];

template <typename T>
[[kernel]] void gemv_q4(device const uint* codes [[buffer(0)]], device const bfloat* scales [[buffer(1)]],
                        device const bfloat* biases [[buffer(2)]], device const T* x [[buffer(3)]],
                        device T* y [[buffer(4)]], constant LinearParams& p [[buffer(5)]],
                        uint group [[threadgroup_position_in_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint n_simdgroups [[simdgroups_per_threadgroup]]) {
  const uint n = group * n_simdgroups + simdgroup;
  if (n >= p.outputs) return;  // the whole simdgroup
  device const uint* row = codes + ulong(n) * (p.inputs / 8);
  const ulong first_group = ulong(n) * (p.inputs / 64);
  float sum = 0.0f;
  for (uint k = lane * 8; k < p.inputs; k += 256) {
    const uint word = row[k / 8];
    const float4 x0 = float4(float(x[k]), float(x[k + 1]), float(x[k + 2]), float(x[k + 3]));
    const float4 x1 = float4(float(x[k + 4]), float(x[k + 5]), float(x[k + 6]), float(x[k + 7]));
    const float4 products = fma(high_codes(word), x1, low_codes(word) * x0);
    const float4 plain = x0 + x1;
    const ulong g = first_group + k / 64;
    sum = fma(float(scales[g]), products.x + products.y + products.z + products.w, sum);
    sum = fma(float(biases[g]), plain.x + plain.y + plain.z + plain.w, sum);
  }
  sum = simd_sum(sum);
  if (lane == 0) y[n] = T(kAddToY ? float(y[n]) + sum : sum);
}

#define INSTANTIATE(T) template [[host_name("gemv_q4_" #T)]] [[kernel]] decltype(gemv_q4<T>) gemv_q4<T>;
INSTANTIATE(bfloat)
INSTANTIATE(float)
