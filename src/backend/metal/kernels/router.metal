// Routing on the GPU (P2).
//
// router_top (22) (23): the 8 experts with the largest logits, lower index on ties, in falling order, and
// their
//   softmax weights renormalised. ids, weights [T, 8]. One simdgroup a row (router.h).
// count_assignments, group_assignments: the grouping of T * 8 assignments by expert, stable. Grid: one
//   threadgroup of 256 an expert. The first counts; in the second each expert finds its offset and its place
//   among the experts by falling load from all counts, then lists its assignments by rising index (its
//   threads look through consecutive runs and add up in front of them) and its blocks. Integers: any schedule
//   gives the same result. Bound by latency.
#include "router.h"

constant constexpr uint kGroupThreads = 256;

[[kernel]] void router_top(device const float* logits [[buffer(0)]], device int* ids [[buffer(1)]],
                           device float* weights [[buffer(2)]], constant RouterParams& p [[buffer(20)]],
                           constant StepHeader& step [[buffer(30)]], uint t [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
  if (t >= step.n_rows) return;
  float weight;
  const uint id = top_experts(logits + ulong(t) * p.stride + p.first, p.n_experts, lane, weight);
  if (lane < kTopK) {
    ids[t * kTopK + lane] = int(id);
    weights[t * kTopK + lane] = weight;
  }
}

// The sum of v over the threads in front of this one, and over all; parts [8].
inline uint sum_before(uint v, uint sg, uint lane, threadgroup uint* parts, thread uint& total) {
  const uint before = simd_prefix_exclusive_sum(v);
  if (lane == 31) parts[sg] = before + v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint base = 0;
  total = 0;
  for (uint i = 0; i < kGroupThreads / 32; ++i) {
    if (i < sg) base += parts[i];
    total += parts[i];
  }
  return base + before;
}

[[kernel]] void count_assignments(device const int* ids [[buffer(0)]], device uint* counts [[buffer(1)]],
                                  constant StepHeader& step [[buffer(30)]],
                                  uint expert [[threadgroup_position_in_grid]],
                                  uint lid [[thread_index_in_threadgroup]],
                                  uint sg [[simdgroup_index_in_threadgroup]],
                                  uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint parts[kGroupThreads / 32];
  uint mine = 0;
  for (uint a = lid; a < step.n_rows * kTopK; a += kGroupThreads) mine += ids[a] == int(expert) ? 1u : 0u;
  uint total;
  sum_before(mine, sg, lane, parts, total);
  if (lid == 0) counts[expert] = total;
}

[[kernel]] void group_assignments(
    device const int* ids [[buffer(0)]], device const uint* counts [[buffer(1)]],
    device int* offsets [[buffer(2)]], device int* order [[buffer(3)]], device int* position [[buffer(4)]],
    device int4* blocks [[buffer(5)]], device int* n_blocks [[buffer(6)]],
    constant RouterParams& p [[buffer(20)]], constant StepHeader& step [[buffer(30)]],
    uint expert [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint parts[4][kGroupThreads / 32];
  const uint n = step.n_rows * kTopK;
  const uint load = counts[expert];
  uint lower = 0;    // assignments of experts with a lower index
  uint heavier = 0;  // blocks of experts that come first
  uint all_blocks = 0;
  for (uint e = lid; e < p.n_experts; e += kGroupThreads) {
    const uint count = counts[e];
    const uint tile = count >= p.large_from ? p.tile_large : p.tile_small;
    const uint n_tiles = (count + tile - 1) / tile;
    if (e < expert) lower += count;
    if (count > load || (count == load && e < expert)) heavier += n_tiles;
    all_blocks += n_tiles;
  }
  uint first, first_block, total_blocks;
  sum_before(lower, sg, lane, parts[0], first);
  sum_before(heavier, sg, lane, parts[1], first_block);
  sum_before(all_blocks, sg, lane, parts[2], total_blocks);

  const uint run = (n + kGroupThreads - 1) / kGroupThreads;
  const uint begin = min(n, lid * run);
  const uint end = min(n, begin + run);
  uint mine = 0;
  for (uint a = begin; a < end; ++a) mine += ids[a] == int(expert) ? 1u : 0u;
  uint total;
  uint at = first + sum_before(mine, sg, lane, parts[3], total);
  for (uint a = begin; a < end; ++a) {
    if (ids[a] != int(expert)) continue;
    order[at] = int(a);
    position[a] = int(at);
    ++at;
  }
  const uint tile = load >= p.large_from ? p.tile_large : p.tile_small;
  for (uint b = lid; b * tile < load; b += kGroupThreads)
    blocks[first_block + b] = int4(int(expert), int(first + b * tile), int(min(tile, load - b * tile)), 0);
  if (lid == 0) {
    offsets[expert] = int(first);
    if (expert == 0) {
      offsets[p.n_experts] = int(n);
      n_blocks[0] = int(total_blocks);
      n_blocks[1] = 1;
      n_blocks[2] = 1;
      n_blocks[3] = 0;
    }
  }
}
