// attention_prefill (11) (12): for many rows.
//
// y [T, q heads * 256] bf16. Grid (query tiles, q heads / 4): a threadgroup has 8 rows of one segment and 4
// query heads of one KV head, a simdgroup each head. 8 keys at a time: K stands in threadgroup memory as
// bf16, V as fp32 (rows past the end are zero), scores and outputs are 8x8 simdgroup matrices with fp32
// accumulators, the softmax runs between them in fp32; outputs are rescaled only when a row's maximum rises.
// Of an 8-bit cache the keys stand there as their codes, which bf16 holds exactly: the scores of each group
// of 64 dimensions are multiplied by a diagonal matrix of the keys' scales, so nothing is rounded that the
// cache has not rounded. Threadgroup memory: queries 16 KB, K 4 KB, V 8 KB, scores 1 KB, scales 1 KB. Bound
// by matrix products.
#include <metal_simdgroup_matrix>

#include "attention.h"

constant constexpr uint kKeyTile = 8;
constant constexpr uint kKeyStride = kAttentionHead + 8;
constant constexpr uint kValueStride = kAttentionHead + 4;
constant constexpr uint kDimTiles = kAttentionHead / 8;

template <int kKvBits>
[[kernel]] void attention_prefill(
    device const bfloat* q [[buffer(0)]], device bfloat* y [[buffer(1)]],
    device const uchar* k_cache [[buffer(2)]], device const uchar* v_cache [[buffer(3)]],
    device const bfloat* gate [[buffer(4)]], constant AttentionParams& p [[buffer(20)]],
    device const QueryTile* tiles [[buffer(26)]], device const uint* blocks [[buffer(27)]],
    device const StepSegment* segments [[buffer(28)]], device const StepRow* rows [[buffer(29)]],
    constant StepHeader& step [[buffer(30)]], uint2 at [[threadgroup_position_in_grid]],
    uint lid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup bfloat queries[kPackedHeads * kQueryTile * kAttentionHead];
  threadgroup bfloat keys[kKeyTile * kKeyStride];
  threadgroup float values[kKeyTile * kValueStride];
  threadgroup float scales[kRowScales * kKeyTile * kKeyTile];  // [group] diagonals, of 8 bits
  threadgroup float small[kPackedHeads * 64];  // [head][8][8]: scores, weights, diagonals, results
  if (at.x >= step.n_query_tiles) return;
  const uint first_row = tiles[at.x].first_row;
  const uint n_rows = tiles[at.x].n_rows;
  const uint first_head = at.y * kPackedHeads;
  const uint kv_head = first_head / (p.n_q_heads / p.n_kv_heads);
  const uint first_position = rows[first_row].position;
  const uint first_block = segments[rows[first_row].segment].first_block;
  const uint n_keys = first_position + n_rows;
  const uint block_words = step.block_words;

  for (uint e = lid; e < kPackedHeads * kQueryTile * kAttentionHead; e += 128) {
    const uint h = e / (kQueryTile * kAttentionHead);
    const uint r = e / kAttentionHead % kQueryTile;
    const uint column = (first_head + h) * kAttentionHead + e % kAttentionHead;
    queries[e] = r < n_rows ? q[ulong(first_row + r) * p.q_stride + column] : bfloat(0.0f);
  }

  simdgroup_matrix<float, 8, 8> o[kDimTiles];
  for (uint d = 0; d < kDimTiles; ++d) o[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  threadgroup float* mine = small + sg * 64;
  // A lane has two scores of one row; the four lanes of a row agree on its maximum and sum.
  const uint row = lane / 4;
  const uint column = lane % 4 * 2;
  float largest = kLowest;
  float sum = 0.0f;

  for (uint key = 0; key < n_keys; key += kKeyTile) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = lid; e < kKeyTile * 32; e += 128) {
      const uint i = e / 32;
      const uint part = e % 32;
      float k[8];
      float v[8];
      float scale = 0.0f;
      if (key + i < n_keys) {
        const ulong plane = plane_at<kKvBits>(blocks, first_block, key + i, kv_head, block_words);
        const uint token = (key + i) % kCacheTokens;
        scale = read_cached<kKvBits, true>(k_cache + plane, token, part, k);
        load_cached<kKvBits, true>(v_cache + plane, token, part, v);
      } else {
        for (uint d = 0; d < kLaneDims; ++d) k[d] = v[d] = 0.0f;
      }
      for (uint d = 0; d < kLaneDims; ++d) {
        keys[i * kKeyStride + part * kLaneDims + d] = bfloat(k[d]);
        values[i * kValueStride + part * kLaneDims + d] = v[d];
      }
      if (kKvBits == 8) {
        // Its eight parts have a group's row of the diagonal matrix.
        const uint column = part % kKeyTile;
        scales[(part / kKeyTile * kKeyTile + i) * kKeyTile + column] = column == i ? scale : 0.0f;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> scores = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    constexpr uint kGroupTiles = kKvBits == 8 ? kGroup / 8 : kDimTiles;
    for (uint first = 0; first < kDimTiles; first += kGroupTiles) {
      simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      for (uint d = first; d < first + kGroupTiles; ++d) {
        simdgroup_matrix<bfloat, 8, 8> a;
        simdgroup_matrix<bfloat, 8, 8> b;
        simdgroup_load(a, queries + sg * kQueryTile * kAttentionHead + d * 8, kAttentionHead);
        simdgroup_load(b, keys + d * 8, kKeyStride, ulong2(0), true);
        simdgroup_multiply_accumulate(sums, a, b, sums);
      }
      if (kKvBits == 16) {
        scores = sums;
      } else {
        simdgroup_matrix<float, 8, 8> diagonal;
        simdgroup_load(diagonal, scales + first / kGroupTiles * kKeyTile * kKeyTile, kKeyTile);
        simdgroup_multiply_accumulate(scores, sums, diagonal, scores);
      }
    }
    simdgroup_store(scores, mine, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float s[2];
    for (uint i = 0; i < 2; ++i) {
      const bool seen = key + column + i <= first_position + row;
      s[i] = seen ? mine[row * 8 + column + i] * kScoreScale : kLowest;
    }
    float next = max(largest, max(s[0], s[1]));
    next = max(next, simd_shuffle_xor(next, 1));
    next = max(next, simd_shuffle_xor(next, 2));
    const float keep = exp(largest - next);
    for (uint i = 0; i < 2; ++i) s[i] = s[i] == kLowest ? 0.0f : exp(s[i] - next);
    float added = s[0] + s[1];
    added += simd_shuffle_xor(added, 1);
    added += simd_shuffle_xor(added, 2);
    sum = fma(sum, keep, added);
    largest = next;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (simd_any(keep != 1.0f)) {
      for (uint i = 0; i < 2; ++i) mine[row * 8 + column + i] = column + i == row ? keep : 0.0f;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<float, 8, 8> diagonal;
      simdgroup_load(diagonal, mine, 8);
      for (uint d = 0; d < kDimTiles; ++d) {
        simdgroup_matrix<float, 8, 8> scaled;
        simdgroup_multiply(scaled, diagonal, o[d]);
        o[d] = scaled;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = 0; i < 2; ++i) mine[row * 8 + column + i] = s[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> weights;
    simdgroup_load(weights, mine, 8);
    for (uint d = 0; d < kDimTiles; ++d) {
      simdgroup_matrix<float, 8, 8> v;
      simdgroup_load(v, values + d * 8, kValueStride);
      simdgroup_multiply_accumulate(o[d], weights, v, o[d]);
    }
  }

  const uint head = first_head + sg;
  for (uint d = 0; d < kDimTiles; ++d) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_store(o[d], mine, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (row >= n_rows) continue;
    for (uint i = 0; i < 2; ++i) {
      const uint dim = d * 8 + column + i;
      float value = mine[row * 8 + column + i] / sum;
      if (p.gated != 0)
        value *= sigmoid(float(gate[ulong(first_row + row) * p.gate_stride + p.gate_first +
                                    (2 * head + 1) * kAttentionHead + dim]));
      y[ulong(first_row + row) * p.y_stride + head * kAttentionHead + dim] = bfloat(value);
    }
  }
}

template [[host_name("attention_prefill")]] [[kernel]] decltype(attention_prefill<16>) attention_prefill<16>;
template
    [[host_name("attention_prefill_int8")]] [[kernel]] decltype(attention_prefill<8>) attention_prefill<8>;
