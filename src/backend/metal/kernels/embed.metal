// Rows in and out of a step.
//
// embed: y[t] = row token[t] of the embedding, dequantised (1). [T, H] fp32. One threadgroup a row, a thread
//   16 columns at a time. A token of -1 is read from the segment's token slot, where an earlier step left it.
// gather_rows: y[o] = x[output_rows[o]]. [O, H] fp32. One threadgroup a row.
// Bound by bytes; no sums.
#include "quantised.h"

template <int kBits>
[[kernel]] void embed(device const uchar* w [[buffer(0)]], device float* y [[buffer(1)]],
                      device const int* token_slots [[buffer(2)]], constant LinearParams& p [[buffer(20)]],
                      device const StepSegment* segments [[buffer(28)]],
                      device const StepRow* rows [[buffer(29)]], constant StepHeader& step [[buffer(30)]],
                      uint t [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]],
                      uint n_threads [[threads_per_threadgroup]]) {
  if (t >= step.n_rows) return;
  int token = rows[t].token;
  if (token < 0) token = token_slots[segments[rows[t].segment].token_in];
  for (uint k = lid * kSpan; k < p.in; k += n_threads * kSpan) {
    float codes[16];
    load_codes<kBits>(w, ulong(token), p.in, k, codes);
    const float2 affine = load_affine<kBits>(w, uint2(p.scales[0], p.biases[0]), ulong(token), p.in, k);
    for (uint i = 0; i < kSpan; ++i) y[ulong(t) * p.in + k + i] = fma(affine.x, codes[i], affine.y);
  }
}
template [[host_name("embed_q4")]] [[kernel]] decltype(embed<4>) embed<4>;
template [[host_name("embed_q8")]] [[kernel]] decltype(embed<8>) embed<8>;
template [[host_name("embed_bf16")]] [[kernel]] decltype(embed<16>) embed<16>;

[[kernel]] void gather_rows(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                            device const uint* output_rows [[buffer(2)]],
                            constant RowsParams& p [[buffer(20)]], constant StepHeader& step [[buffer(30)]],
                            uint o [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]],
                            uint n_threads [[threads_per_threadgroup]]) {
  if (o >= step.n_outputs) return;
  const ulong from = ulong(output_rows[o]) * p.width;
  for (uint c = lid; c < p.width; c += n_threads) y[ulong(o) * p.width + c] = x[from + c];
}
