// gemm_q4 with the tensor operations of Metal 4.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
#include <metal_tensor>

#include "q4.h"
using namespace metal;
using namespace mpp::tensor_ops;

// Tile 64 (tokens) x 32 (outputs), K in steps of 32. Weights are dequantised to
// threadgroup memory; activations are read by the matmul straight from device
// memory; the accumulator stays in registers (cooperative tensor).
kernel void gemm_q4_tensor(device const uint* codes [[buffer(0)]], device const bfloat* scales [[buffer(1)]],
                           device const bfloat* biases [[buffer(2)]], device bfloat* x [[buffer(3)]],
                           device bfloat* y [[buffer(4)]], constant LinearParams& p [[buffer(5)]],
                           uint2 tg [[threadgroup_position_in_grid]],
                           uint lid [[thread_index_in_threadgroup]]) {
  constexpr int BM = 64, BN = 32, BK = 32;
  threadgroup bfloat ws[32 * 32];
  const uint m0 = tg.y * BM, n0 = tg.x * BN;
  constexpr auto desc =
      matmul2d_descriptor(BM, BN, BK, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<desc, execution_simdgroups<4>> op;
  tensor<device bfloat, dextents<int32_t, 2>, tensor_inline> tx(
      x, dextents<int32_t, 2>(int(p.inputs), int(p.rows)));
  tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline> tw(ws, dextents<int32_t, 2>(BK, BN));
  auto probe = tx.slice(0, int(m0));
  auto acc = op.get_destination_cooperative_tensor<decltype(probe), decltype(tw), float>();
  for (uint16_t i = 0; i < acc.get_capacity(); i++) acc[i] = 0.0f;
  for (uint k0 = 0; k0 < p.inputs; k0 += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint r = lid / 4, c = (lid % 4) * 8, n = n0 + r, k = k0 + c;
    uint q = 0;
    float s = 0.0f, b = 0.0f;
    if (n < p.outputs) {
      q = codes[ulong(n) * (p.inputs / 8) + k / 8];
      const ulong g = ulong(n) * (p.inputs / 64) + k / 64;
      s = float(scales[g]);
      b = float(biases[g]);
    }
    for (uint i = 0; i < 8; i++) ws[r * BK + c + i] = bfloat(fma(s, float((q >> (4 * i)) & 15u), b));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    auto xs = tx.slice(int(k0), int(m0));  // dynamic extents: the M edge is checked
    op.run(xs, tw, acc);
  }
  for (uint16_t i = 0; i < acc.get_capacity(); i++) {
    if (!acc.is_valid_element(i)) continue;
    auto ix = acc.get_multidimensional_index(i);
    const uint n = n0 + uint(ix[0]), m = m0 + uint(ix[1]);
    if (m < p.rows && n < p.outputs) y[ulong(m) * p.outputs + n] = bfloat(acc[i]);
  }
}
