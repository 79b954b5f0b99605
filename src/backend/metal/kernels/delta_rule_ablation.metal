// The recurrence in blocks of 32 tokens (P4 off): equations (b1) to (b7) of the WY form.
//
// o [T, value heads * 128] fp32. Grid (value heads * 4, segments): 128 threads have 32 of a head's 128 state
// columns. The state lies in device memory and is read and written once a block, the block's products meet at
// threadgroup barriers: that traffic and those stops are what the register scan avoids. fp32 throughout; all
// exponents are at most 0.
#include "delta.h"

constant constexpr uint kDvTile = 32;

[[kernel]] void delta_rule_blocks(device const float* q [[buffer(0)]], device const float* k [[buffer(1)]],
                                  device const bfloat* v [[buffer(2)]], device const float* g [[buffer(3)]],
                                  device const float* beta [[buffer(4)]], device float* state [[buffer(5)]],
                                  device float* o [[buffer(6)]], constant DeltaParams& p [[buffer(20)]],
                                  device const StepSegment* segments [[buffer(28)]],
                                  constant StepHeader& step [[buffer(30)]],
                                  uint2 at [[threadgroup_position_in_grid]],
                                  uint lid [[thread_index_in_threadgroup]]) {
  threadgroup float gamma[kScanBlock];
  threadgroup float betas[kScanBlock];
  threadgroup float a[kScanBlock * kScanBlock];  // (b3)
  threadgroup float w[kScanBlock * kScanBlock];  // lower(q k^T * D) of (b6)
  threadgroup float x[kScanBlock * kDvTile];     // (b4), then (b5)
  if (at.y >= step.n_segments) return;
  const StepSegment s = segments[at.y];
  const uint slot_words = step.slot_words;
  const uint h = at.x / 4;
  const uint first_dv = at.x % 4 * kDvTile;
  const uint key_width = p.n_key_heads * kDeltaHead;
  device const float* qh = q + h / 2 * kDeltaHead;
  device const float* kh = k + h / 2 * kDeltaHead;
  const uint head_row = h * kDeltaHead + first_dv;
  device float* to = state + state_index(s.dst, slot_words, head_row);
  // The first block reads slot src, later ones what the block before left in dst.
  device const float* from = s.src < 0 ? to : state + state_index(uint(s.src), slot_words, head_row);
  bool is_zero = s.src < 0;

  for (uint t0 = s.first_row; t0 < s.first_row + s.n_rows; t0 += kScanBlock) {
    const uint n = min(kScanBlock, s.first_row + s.n_rows - t0);
    if (lid == 0) {
      float sum = 0.0f;
      for (uint i = 0; i < n; ++i) {
        sum += g[ulong(t0 + i) * p.n_value_heads + h];
        gamma[i] = sum;
        betas[i] = beta[ulong(t0 + i) * p.n_value_heads + h];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = lid; e < n * kScanBlock; e += 128) {
      const uint i = e / kScanBlock;
      const uint j = e % kScanBlock;
      if (j > i) continue;
      float kk = 0.0f;
      float qk = 0.0f;
      for (uint d = 0; d < kDeltaHead; ++d) {
        const float kj = kh[ulong(t0 + j) * key_width + d];
        kk = fma(kh[ulong(t0 + i) * key_width + d], kj, kk);
        qk = fma(qh[ulong(t0 + i) * key_width + d], kj, qk);
      }
      const float decay = exp(gamma[i] - gamma[j]);
      a[e] = betas[i] * kk * decay;
      w[e] = qk * decay;
    }
    for (uint e = lid; e < n * kDvTile; e += 128) {
      const uint i = e / kDvTile;
      const uint c = e % kDvTile;
      float read = 0.0f;
      if (!is_zero)
        for (uint d = 0; d < kDeltaHead; ++d)
          read = fma(kh[ulong(t0 + i) * key_width + d], from[c * kDeltaHead + d], read);
      const float value = float(v[ulong(t0 + i) * p.v_stride + p.v_first + head_row + c]);
      x[e] = betas[i] * (value - exp(gamma[i]) * read);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lid < kDvTile)  // (b5) by forward substitution: a thread solves its column
      for (uint i = 1; i < n; ++i) {
        float sum = x[i * kDvTile + lid];
        for (uint j = 0; j < i; ++j) sum = fma(-a[i * kScanBlock + j], x[j * kDvTile + lid], sum);
        x[i * kDvTile + lid] = sum;
      }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = lid; e < n * kDvTile; e += 128) {
      const uint i = e / kDvTile;
      const uint c = e % kDvTile;
      float out = 0.0f;
      if (!is_zero)
        for (uint d = 0; d < kDeltaHead; ++d)
          out = fma(qh[ulong(t0 + i) * key_width + d], from[c * kDeltaHead + d], out);
      out *= exp(gamma[i]);
      for (uint j = 0; j <= i; ++j) out = fma(w[i * kScanBlock + j], x[j * kDvTile + c], out);
      o[ulong(t0 + i) * p.y_stride + head_row + c] = out;
    }
    // Everyone has read the old state before anyone replaces it.
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    for (uint e = lid; e < kDvTile * kDeltaHead; e += 128) {
      const uint c = e / kDeltaHead;
      const uint d = e % kDeltaHead;
      float sum = is_zero ? 0.0f : exp(gamma[n - 1]) * from[e];
      for (uint i = 0; i < n; ++i)
        sum = fma(exp(gamma[n - 1] - gamma[i]) * kh[ulong(t0 + i) * key_width + d], x[i * kDvTile + c], sum);
      to[e] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    from = to;
    is_zero = false;
  }
}
