// Fixed-block attention for long caches (D7), few rows: parts of 1,024 keys are scanned apart and merged in
// their order.
//
// attention_part: partial [T, q heads, parts, 258] fp32: 256 outputs, the largest score, the sum of weights.
//   Grid (parts, q heads / kHeads, T), 8 simdgroups. Bound by KV bytes, spread over the whole GPU.
// attention_merge: y [T, q heads * 256] bf16, gated where asked. Grid (q heads, T), a thread a dimension.
#ifndef LILY_METAL_ATTENTION_BLOCKS_H
#define LILY_METAL_ATTENTION_BLOCKS_H

#include "attention.h"

constant constexpr uint kPartSimdgroups = 8;
constant constexpr uint kPartValues = kAttentionHead + 2;

template <int kHeads, bool kCoalesced, int kKvBits>
[[kernel]] void attention_part(
    device const bfloat* q [[buffer(0)]], device float* partial [[buffer(1)]],
    device uchar* k_cache [[buffer(2)]], device uchar* v_cache [[buffer(3)]],
    device const bfloat* gate [[buffer(4)]], device const float* q_norm [[buffer(5)]],
    device const float* k_norm [[buffer(6)]], constant AttentionParams& p [[buffer(20)]],
    device const uint* blocks [[buffer(27)]], device const StepSegment* segments [[buffer(28)]],
    device const StepRow* rows [[buffer(29)]], constant StepHeader& step [[buffer(30)]],
    uint3 at [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float memory[kPartSimdgroups * kAttentionHead];
  threadgroup float largest[kPartSimdgroups];
  threadgroup float sums[kPartSimdgroups];
  threadgroup float prepared[kPreparedValues];
  const uint t = at.z;
  if (t >= step.n_rows) return;
  const uint n_keys = rows[t].position + 1;
  const uint first_key = at.x * kSplitTokens;
  if (first_key >= n_keys) return;
  const uint first_head = at.y * kHeads;
  const uint kv_head = first_head / (p.n_q_heads / p.n_kv_heads);
  const uint position = n_keys - 1;
  const uint first_block = segments[rows[t].segment].first_block;
  const bool has_own = p.prepares != 0 && position / kSplitTokens == at.x;
  device const bfloat* row = gate + ulong(t) * p.gate_stride;  // with prepares: before preparation
  float queries[kHeads * 8];
  if (p.prepares != 0) {
    prepare_row<kHeads, kKvBits>(row, q_norm, k_norm, p, position, first_head, kv_head, sg, lane, prepared);
    prepared_queries<kHeads>(prepared, lane, queries);
    if (has_own && sg == 0 && first_head % (p.n_q_heads / p.n_kv_heads) == 0)
      append<kKvBits>(prepared + kHeads * kAttentionHead, row + p.v_first + kv_head * kAttentionHead, k_cache,
                      v_cache, plane_at<kKvBits>(blocks, first_block, position, kv_head, step.block_words),
                      position % kCacheTokens, lane);
  } else {
    load_queries<kHeads>(q + ulong(t) * p.q_stride + first_head * kAttentionHead, lane, queries);
  }
  Running<kHeads> running;
  running.clear();
  scan_keys<kHeads, kCoalesced, kKvBits>(
      k_cache, v_cache, blocks, first_block, kv_head, step.block_words, first_key + sg, kPartSimdgroups,
      min(has_own ? position : n_keys, first_key + kSplitTokens), lane, queries, running);
  if (has_own && (position - first_key) % kPartSimdgroups == sg)
    add_own<kHeads, kKvBits>(prepared, row + p.v_first + kv_head * kAttentionHead, lane, queries, running);
  for (uint h = 0; h < uint(kHeads); ++h) {
    for (uint i = 0; i < kLaneDims; ++i) memory[sg * kAttentionHead + lane * kLaneDims + i] = running.o[h][i];
    if (lane == 0) {
      largest[sg] = running.largest[h];
      sums[sg] = running.sum[h];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float top, total;
    const float value = merge(memory, largest, sums, kPartSimdgroups, lid, top, total);
    device float* to = partial + ((ulong(t) * p.n_q_heads + first_head + h) * p.n_parts + at.x) * kPartValues;
    to[lid] = value;
    if (lid == 0) {
      to[kAttentionHead] = top;
      to[kAttentionHead + 1] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

#endif
