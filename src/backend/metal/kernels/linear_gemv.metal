// linear_decode (D1): y = x W^T for 1 to 8 rows, up to four weights one below the other; with kNorm,
// y = RMSNorm(x) W^T.
//
// x [T, in] bf16, or fp32 with kNorm; y [T, out] bf16, fp32, or fp32 added to the residual.
// A threadgroup is two simdgroups; each computes four output rows for all rows of x: a lane reads 16
// consecutive columns of each of the four and its sums meet in simd_sum. So every weight is read once, in
// runs of 256 bytes (4-bit). Bound by weight bytes.
// The norm costs no pass of its own: sum(W x w) / rms = W (x w / rms), and the lane that reads x squares it.
// Sums are fp32 and in one order for any number of rows: a row does not depend on its neighbours.
#include "quantised.h"

constant constexpr uint kOut = 4;

template <int kBits, bool kNorm, int kRows>
[[kernel]] void linear_decode(device const uchar* x [[buffer(0)]], device uchar* y [[buffer(1)]],
                              device const float* residual [[buffer(2)]],
                              device const float* norm [[buffer(3)]], device const uchar* w0 [[buffer(4)]],
                              device const uchar* w1 [[buffer(5)]], device const uchar* w2 [[buffer(6)]],
                              device const uchar* w3 [[buffer(7)]], constant LinearParams& p [[buffer(20)]],
                              constant StepHeader& step [[buffer(30)]],
                              uint group [[threadgroup_position_in_grid]],
                              uint sg [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  const uint first = (group * 2 + sg) * kOut;
  if (first >= p.end[p.n_weights - 1]) return;
  uint which = 0;
  while (first >= p.end[which]) ++which;
  device const uchar* w = which == 0 ? w0 : which == 1 ? w1 : which == 2 ? w2 : w3;
  const ulong row = first - (which == 0 ? 0u : p.end[which - 1]);
  const uint n_out = min(kOut, p.end[which] - first);
  const uint2 part(p.scales[which], p.biases[which]);
  const uint n_rows = p.of_outputs != 0 ? step.n_outputs : step.n_rows;

  float acc[kRows][4];
  float squares[kRows];
  for (uint t = 0; t < uint(kRows); ++t) {
    squares[t] = 0.0f;
    for (uint r = 0; r < kOut; ++r) acc[t][r] = 0.0f;
  }
  for (uint k = lane * kSpan; k < p.in; k += 32 * kSpan) {
    float codes[4][16];
    float2 affine[4];
    for (uint r = 0; r < kOut; ++r) {
      const ulong at = row + min(r, n_out - 1);
      load_codes<kBits>(w, at, p.in, k, codes[r]);
      affine[r] = load_affine<kBits>(w, part, at, p.in, k);
    }
    for (uint t = 0; t < uint(kRows); ++t) {
      if (t >= n_rows) break;
      float xs[16];
      float sum = 0.0f;
      if (kNorm) {
        device const float* from = (device const float*)x + ulong(t) * p.x_stride + p.x_first + k;
        for (uint i = 0; i < kSpan; ++i) {
          squares[t] = fma(from[i], from[i], squares[t]);
          xs[i] = from[i] * norm[k + i];
          sum += xs[i];
        }
      } else {
        sum = load_span((device const bfloat*)x + ulong(t) * p.x_stride + p.x_first + k, xs);
      }
      for (uint r = 0; r < kOut; ++r) {
        float dot = 0.0f;
        for (uint i = 0; i < kSpan; ++i) dot = fma(codes[r][i], xs[i], dot);
        acc[t][r] = kBits == 16 ? acc[t][r] + dot : fma(affine[r].x, dot, fma(affine[r].y, sum, acc[t][r]));
      }
    }
  }
  for (uint t = 0; t < uint(kRows); ++t) {
    if (t >= n_rows) break;
    const float scale = kNorm ? rsqrt(simd_sum(squares[t]) / float(p.in) + kEpsilon) : 1.0f;
    for (uint r = 0; r < kOut; ++r) {
      if (r >= n_out) break;
      const float value = simd_sum(acc[t][r]) * scale;
      if (lane == 0) store_output(y, residual, ulong(t) * p.y_stride + p.y_first + first + r, value, p.store);
    }
  }
}

#define INSTANTIATE(bits, name)                                                                             \
  template                                                                                                  \
      [[host_name("linear_decode_" name                                                                     \
                  "_1")]] [[kernel]] decltype(linear_decode<bits, false, 1>) linear_decode<bits, false, 1>; \
  template                                                                                                  \
      [[host_name("linear_decode_" name                                                                     \
                  "_8")]] [[kernel]] decltype(linear_decode<bits, false, 8>) linear_decode<bits, false, 8>; \
  template                                                                                                  \
      [[host_name("norm_linear_decode_" name                                                                \
                  "_1")]] [[kernel]] decltype(linear_decode<bits, true, 1>) linear_decode<bits, true, 1>;   \
  template                                                                                                  \
      [[host_name("norm_linear_decode_" name                                                                \
                  "_8")]] [[kernel]] decltype(linear_decode<bits, true, 8>) linear_decode<bits, true, 8>;
INSTANTIATE(4, "q4")
INSTANTIATE(8, "q8")
INSTANTIATE(16, "bf16")
