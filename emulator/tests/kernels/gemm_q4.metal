// y[m][n] = sum over k of x[m][k] * (scale * code + bias)[n][k]. A threadgroup of four simdgroups makes a
// tile of 32 rows x 32 outputs, each simdgroup a quarter as 2 x 2 matrices; the dequantised tile of weights
// is never in memory.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "q4.h"
using namespace metal;

kernel void gemm_q4(device const uint* codes [[buffer(0)]], device const bfloat* scales [[buffer(1)]],
                    device const bfloat* biases [[buffer(2)]], device const bfloat* x [[buffer(3)]],
                    device bfloat* y [[buffer(4)]], constant LinearParams& p [[buffer(5)]],
                    uint2 tg [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]],
                    uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr uint BM = 32, BN = 32, BK = 32, LD = BK + 4;
  threadgroup bfloat xs[32 * 36];
  threadgroup bfloat ws[32 * 36];
  threadgroup float ys[32 * 33];
  const uint m0 = tg.y * BM, n0 = tg.x * BN, r0 = (sg / 2) * 16, c0 = (sg % 2) * 16;
  simdgroup_matrix<float, 8, 8> acc[2][2];
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++) acc[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k0 = 0; k0 < p.inputs; k0 += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    {  // x: 32x32, 8 values a thread
      const uint r = lid / 4, c = (lid % 4) * 8;
      for (uint i = 0; i < 8; i++)
        xs[r * LD + c + i] = m0 + r < p.rows ? x[ulong(m0 + r) * p.inputs + k0 + c + i] : bfloat(0.0f);
    }
    {  // w: 32 rows of 32 codes, one word a thread
      const uint r = lid / 4, c = (lid % 4) * 8, n = n0 + r, k = k0 + c;
      uint q = 0;
      float s = 0.0f, b = 0.0f;
      if (n < p.outputs) {
        q = codes[ulong(n) * (p.inputs / 8) + k / 8];
        const ulong g = ulong(n) * (p.inputs / 64) + k / 64;
        s = float(scales[g]);
        b = float(biases[g]);
      }
      for (uint i = 0; i < 8; i++) ws[r * LD + c + i] = bfloat(fma(s, float((q >> (4 * i)) & 15u), b));
    }
#ifndef WITHOUT_THREADGROUP_BARRIER
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
    for (uint kk = 0; kk < BK; kk += 8) {
      simdgroup_matrix<bfloat, 8, 8> a[2], b[2];
      for (uint i = 0; i < 2; i++) simdgroup_load(a[i], xs + (r0 + 8 * i) * LD + kk, LD);
      for (uint j = 0; j < 2; j++) simdgroup_load(b[j], ws + (c0 + 8 * j) * LD + kk, LD, ulong2(0), true);
      for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 2; j++) simdgroup_multiply_accumulate(acc[i][j], a[i], b[j], acc[i][j]);
    }
  }
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++) simdgroup_store(acc[i][j], ys + (r0 + 8 * i) * 33 + c0 + 8 * j, 33);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = lid; e < BM * BN; e += 128) {
    const uint r = e / BN, c = e % BN;
    if (m0 + r < p.rows && n0 + c < p.outputs) y[ulong(m0 + r) * p.outputs + n0 + c] = bfloat(ys[r * 33 + c]);
  }
}
