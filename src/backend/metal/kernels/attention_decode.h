// attention_decode (11) (12), general path: for few rows, one pass over the cache.
//
// y [T, q heads * 256] bf16. Grid (q heads / kHeads, T); 16 simdgroups share a row's keys, simdgroup i takes
// keys i, i + 16, ... With kHeads = 4 four query heads read each KV row once (D6). Running softmax and sums
// are fp32, merged in the order of the simdgroups, whatever kHeads is. Bound by KV bytes.
// Where queries and keys are prepared inside (one row a sequence), each threadgroup prepares its heads and
// the row's key, and the first of a KV head appends to the cache: the append needs no barrier in front of the
// scan. The KV cache is bf16 or has 8 bits (kKvBits): kv_cache.h.
#ifndef LILY_METAL_ATTENTION_DECODE_H
#define LILY_METAL_ATTENTION_DECODE_H

#include "attention.h"

constant constexpr uint kDecodeSimdgroups = 16;

template <int kHeads, bool kCoalesced, int kKvBits>
[[kernel]] void attention_decode(
    device const bfloat* q [[buffer(0)]], device bfloat* y [[buffer(1)]], device uchar* k_cache [[buffer(2)]],
    device uchar* v_cache [[buffer(3)]], device const bfloat* gate [[buffer(4)]],
    device const float* q_norm [[buffer(5)]], device const float* k_norm [[buffer(6)]],
    constant AttentionParams& p [[buffer(20)]], device const uint* blocks [[buffer(27)]],
    device const StepSegment* segments [[buffer(28)]], device const StepRow* rows [[buffer(29)]],
    constant StepHeader& step [[buffer(30)]], uint2 at [[threadgroup_position_in_grid]],
    uint lid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float memory[kDecodeSimdgroups * kAttentionHead];
  threadgroup float largest[kDecodeSimdgroups];
  threadgroup float sums[kDecodeSimdgroups];
  threadgroup float prepared[kPreparedValues];
  const uint t = at.y;
  if (t >= step.n_rows) return;
  const uint first_head = at.x * kHeads;
  const uint kv_head = first_head / (p.n_q_heads / p.n_kv_heads);
  const uint position = rows[t].position;
  const uint first_block = segments[rows[t].segment].first_block;
  device const bfloat* row = gate + ulong(t) * p.gate_stride;  // with prepares: before preparation
  float queries[kHeads * 8];
  if (p.prepares != 0) {
    prepare_row<kHeads, kKvBits>(row, q_norm, k_norm, p, position, first_head, kv_head, sg, lane, prepared);
    prepared_queries<kHeads>(prepared, lane, queries);
    if (sg == 0 && first_head % (p.n_q_heads / p.n_kv_heads) == 0)
      append<kKvBits>(prepared + kHeads * kAttentionHead, row + p.v_first + kv_head * kAttentionHead, k_cache,
                      v_cache, plane_at<kKvBits>(blocks, first_block, position, kv_head, step.block_words),
                      position % kCacheTokens, lane);
  } else {
    load_queries<kHeads>(q + ulong(t) * p.q_stride + first_head * kAttentionHead, lane, queries);
  }
  Running<kHeads> running;
  running.clear();
  scan_keys<kHeads, kCoalesced, kKvBits>(k_cache, v_cache, blocks, first_block, kv_head, step.block_words, sg,
                                         kDecodeSimdgroups, p.prepares != 0 ? position : position + 1, lane,
                                         queries, running);
  if (p.prepares != 0 && position % kDecodeSimdgroups == sg)
    add_own<kHeads, kKvBits>(prepared, row + p.v_first + kv_head * kAttentionHead, lane, queries, running);
  for (uint h = 0; h < uint(kHeads); ++h) {
    for (uint i = 0; i < kLaneDims; ++i) memory[sg * kAttentionHead + lane * kLaneDims + i] = running.o[h][i];
    if (lane == 0) {
      largest[sg] = running.largest[h];
      sums[sg] = running.sum[h];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lid < kAttentionHead) {
      float top, total;
      const float value = merge(memory, largest, sums, kDecodeSimdgroups, lid, top, total);
      const uint head = first_head + h;
      float o = value / total;
      if (p.gated != 0)
        o *= sigmoid(
            float(gate[ulong(t) * p.gate_stride + p.gate_first + (2 * head + 1) * kAttentionHead + lid]));
      y[ulong(t) * p.y_stride + head * kAttentionHead + lid] = bfloat(o);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

#endif
