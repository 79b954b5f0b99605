// greedy_part, greedy_token: arg max over the real tokens of each output row, lowest id on ties.
//
// Grid (parts of 2,048 logits, O), then (O): 256 threads find the best key of a part, then of the parts.
// Comparisons only. Bound by the bytes of the logits.
#include "vocabulary.h"

// The largest key of the threadgroup; simdgroups leave theirs in best [8].
inline ulong largest_key(ulong key, uint sg, uint lane, threadgroup ulong* best) {
  // By halves: the order first, then the id among equals.
  const uint order = simd_max(uint(key >> 32));
  const uint rest = simd_max(uint(key >> 32) == order ? uint(key) : 0u);
  if (lane == 0) best[sg] = ulong(order) << 32 | ulong(rest);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong winner = 0;
  for (uint i = 0; i < kVocabularyThreads / 32; ++i) winner = max(winner, best[i]);
  return winner;
}

[[kernel]] void greedy_part(device const float* logits [[buffer(0)]], device ulong* keys [[buffer(1)]],
                            constant VocabularyParams& p [[buffer(20)]],
                            constant StepHeader& step [[buffer(30)]],
                            uint2 at [[threadgroup_position_in_grid]],
                            uint lid [[thread_index_in_threadgroup]],
                            uint sg [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong best[kVocabularyThreads / 32];
  if (at.y >= step.n_outputs) return;
  const uint first = at.x * kRankChunk;
  const uint end = min(step.n_tokens, first + kRankChunk);
  ulong mine = 0;
  for (uint i = first + lid; i < end; i += kVocabularyThreads)
    mine = max(mine, key_of(logits[ulong(at.y) * p.stride + i], i));
  const ulong winner = largest_key(mine, sg, lane, best);
  if (lid == 0) keys[at.y * p.n_out + at.x] = winner;
}

[[kernel]] void greedy_token(
    device const ulong* keys [[buffer(1)]], device int* tokens [[buffer(2)]],
    device int* token_slots [[buffer(3)]], constant VocabularyParams& p [[buffer(20)]],
    device const uint* output_rows [[buffer(25)]], device const StepSegment* segments [[buffer(28)]],
    device const StepRow* rows [[buffer(29)]], constant StepHeader& step [[buffer(30)]],
    uint o [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong best[kVocabularyThreads / 32];
  if (o >= step.n_outputs) return;
  ulong mine = 0;
  for (uint i = lid; i < p.n_chunks; i += kVocabularyThreads) mine = max(mine, keys[o * p.n_chunks + i]);
  const ulong winner = largest_key(mine, sg, lane, best);
  if (lid == 0) store_token(id_of(winner), o, tokens, token_slots, output_rows, segments, rows);
}
