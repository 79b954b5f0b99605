// What the kernels over the vocabulary share.
//
// A logit and its id are one 64-bit key whose falling order is that of candidates: larger logit, then lower
// id. NaN counts as minus infinity. Key 0 is no token.
#ifndef LILY_METAL_VOCABULARY_H
#define LILY_METAL_VOCABULARY_H

#include "quantised.h"

constant constexpr uint kVocabularyThreads = 256;

inline uint ordered(float logit) {
  if (!(logit == logit)) logit = -INFINITY;
  const uint bits = as_type<uint>(logit == 0.0f ? 0.0f : logit);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
inline float logit_of(uint order) {
  return as_type<float>((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}
inline ulong key_of(float logit, uint id) { return ulong(ordered(logit)) << 32 | ulong(0xffffffffu - id); }
inline int id_of(ulong key) { return key == 0 ? -1 : int(0xffffffffu - uint(key)); }

// Sums over the threadgroup's 256 threads, the same for all of them. parts [8].
inline float sum_all(float v, uint sg, uint lane, threadgroup float* parts) {
  v = simd_sum(v);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) parts[sg] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (uint i = 0; i < kVocabularyThreads / 32; ++i) sum += parts[i];
  return sum;
}

// Philox4x32-10: the first word of the block with counter {step, sequence, 0, 0}; its upper 24 bits are the
// uniform number.
inline float uniform_of(uint seed_low, uint seed_high, uint sequence, uint step) {
  uint counter[4] = {step, sequence, 0u, 0u};
  for (uint round = 0; round < 10; ++round) {
    const ulong a = ulong(0xD2511F53u) * counter[0];
    const ulong b = ulong(0xCD9E8D57u) * counter[2];
    counter[0] = uint(b >> 32) ^ counter[1] ^ seed_low;
    counter[2] = uint(a >> 32) ^ counter[3] ^ seed_high;
    counter[1] = uint(b);
    counter[3] = uint(a);
    seed_low += 0x9E3779B9u;
    seed_high += 0xBB67AE85u;
  }
  return float(counter[0] >> 8) * 5.9604644775390625e-8f;
}

// Where the token of an output goes besides the value: the slot that the sequence's next step reads.
inline void store_token(int id, uint o, device int* tokens, device int* token_slots,
                        device const uint* output_rows, device const StepSegment* segments,
                        device const StepRow* rows) {
  tokens[o] = id;
  const int slot = segments[rows[output_rows[o]].segment].token_out;
  if (slot >= 0) token_slots[slot] = id;
}

#endif
