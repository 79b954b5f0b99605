// The largest logits of each output row, in order, by levels: sort a chunk, keep its first n_kept, sort
// those.
//
// rank_logits: chunks of 2,048 logits, grid (chunks, O); also each chunk's largest logit and sum of exponents
//   (fp32). rank_keys: 2,048 keys that the level before kept. rank_candidates: the last level, writes ids,
//   logits and logsumexp. rank_sample: the last level, draws a token: temperature, top-k (1 to 256), top-p,
//   min-p, one uniform number, in this order; rows with another top-k are left to sample_whole.
// A bitonic network of 2,048 keys in 16 KB of threadgroup memory, 256 threads. Bound by its 66 barriers.
#include "vocabulary.h"

inline void sort_falling(threadgroup ulong* keys, uint lid) {
  for (uint size = 2; size <= kRankChunk; size *= 2)
    for (uint stride = size / 2; stride > 0; stride /= 2) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = lid; i < kRankChunk / 2; i += kVocabularyThreads) {
        const uint low = i / stride * 2 * stride + i % stride;
        const uint high = low + stride;
        const bool falling = (low & size) == 0;
        const ulong a = keys[low];
        const ulong b = keys[high];
        if ((a < b) == falling) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

[[kernel]] void rank_logits(device const float* logits [[buffer(0)]], device ulong* kept [[buffer(1)]],
                            device float2* sums [[buffer(2)]], constant VocabularyParams& p [[buffer(20)]],
                            constant StepHeader& step [[buffer(30)]],
                            uint2 at [[threadgroup_position_in_grid]],
                            uint lid [[thread_index_in_threadgroup]],
                            uint sg [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong keys[kRankChunk];
  threadgroup float parts[kVocabularyThreads / 32];
  if (at.y >= step.n_outputs) return;
  const uint first = at.x * kRankChunk;
  device const float* row = logits + ulong(at.y) * p.stride + first;
  const uint n = first < step.n_tokens ? min(kRankChunk, step.n_tokens - first) : 0u;
  for (uint i = lid; i < kRankChunk; i += kVocabularyThreads) keys[i] = i < n ? key_of(row[i], first + i) : 0;
  sort_falling(keys, lid);
  const float largest = keys[0] == 0 ? -INFINITY : logit_of(uint(keys[0] >> 32));
  float sum = 0.0f;
  for (uint i = lid; i < n; i += kVocabularyThreads) {
    const float weight = exp(row[i] - largest);
    if (weight == weight) sum += weight;
  }
  sum = sum_all(sum, sg, lane, parts);
  for (uint i = lid; i < p.n_kept; i += kVocabularyThreads)
    kept[(ulong(at.y) * p.n_out + at.x) * p.n_kept + i] = keys[i];
  if (lid == 0) sums[at.y * p.n_out + at.x] = float2(largest, sum);
}

// Keys of up to 2,048 / n_kept chunks of the level before, from chunk `first` on, sorted.
inline void gather_keys(device const ulong* from, constant VocabularyParams& p, uint o, uint first,
                        threadgroup ulong* keys, uint lid) {
  const uint n = min(kRankChunk / p.n_kept, p.n_chunks - first) * p.n_kept;
  for (uint i = lid; i < kRankChunk; i += kVocabularyThreads)
    keys[i] = i < n ? from[(ulong(o) * p.n_chunks + first) * p.n_kept + i] : 0;
  sort_falling(keys, lid);
}

[[kernel]] void rank_keys(device const ulong* from [[buffer(0)]], device ulong* kept [[buffer(1)]],
                          constant VocabularyParams& p [[buffer(20)]],
                          constant StepHeader& step [[buffer(30)]], uint2 at [[threadgroup_position_in_grid]],
                          uint lid [[thread_index_in_threadgroup]]) {
  threadgroup ulong keys[kRankChunk];
  if (at.y >= step.n_outputs) return;
  gather_keys(from, p, at.y, at.x * (kRankChunk / p.n_kept), keys, lid);
  for (uint i = lid; i < p.n_kept; i += kVocabularyThreads)
    kept[(ulong(at.y) * p.n_out + at.x) * p.n_kept + i] = keys[i];
}

[[kernel]] void rank_candidates(
    device const ulong* from [[buffer(0)]], device const float2* sums [[buffer(1)]],
    device int* ids [[buffer(2)]], device float* values [[buffer(3)]], device float* logsumexp [[buffer(4)]],
    constant VocabularyParams& p [[buffer(20)]], constant StepHeader& step [[buffer(30)]],
    uint o [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong keys[kRankChunk];
  threadgroup float parts[kVocabularyThreads / 32];
  if (o >= step.n_outputs) return;
  gather_keys(from, p, o, 0, keys, lid);
  for (uint i = lid; i < p.n_wanted; i += kVocabularyThreads) {
    ids[ulong(o) * p.n_wanted + i] = id_of(keys[i]);
    values[ulong(o) * p.n_wanted + i] = keys[i] == 0 ? -INFINITY : logit_of(uint(keys[i] >> 32));
  }
  const float largest = keys[0] == 0 ? -INFINITY : logit_of(uint(keys[0] >> 32));
  float sum = 0.0f;
  for (uint c = lid; c < p.chunk; c += kVocabularyThreads) {
    const float2 part = sums[o * p.chunk + c];
    if (part.y > 0.0f) sum = fma(part.y, exp(part.x - largest), sum);
  }
  sum = sum_all(sum, sg, lane, parts);
  if (lid == 0) logsumexp[o] = largest == -INFINITY ? largest : largest + log(sum);
}

[[kernel]] void rank_sample(device const ulong* from [[buffer(0)]], device int* tokens [[buffer(2)]],
                            device int* token_slots [[buffer(3)]],
                            constant VocabularyParams& p [[buffer(20)]],
                            device const StepSampling* sampling [[buffer(24)]],
                            device const uint* output_rows [[buffer(25)]],
                            device const StepSegment* segments [[buffer(28)]],
                            device const StepRow* rows [[buffer(29)]],
                            constant StepHeader& step [[buffer(30)]], uint o [[threadgroup_position_in_grid]],
                            uint lid [[thread_index_in_threadgroup]]) {
  threadgroup ulong keys[kRankChunk];
  threadgroup float weights[kMaxRanked];
  if (o >= step.n_outputs) return;
  const StepSampling s = sampling[o];
  const bool is_greedy = s.temperature <= 0.0f;
  if (!is_greedy && (s.top_k <= 0 || s.top_k > int(p.n_kept))) return;
  gather_keys(from, p, o, 0, keys, lid);
  const float largest = logit_of(uint(keys[0] >> 32));
  if (!is_greedy && lid < uint(s.top_k)) {
    float weight = lid == 0 ? 1.0f : exp((logit_of(uint(keys[lid] >> 32)) - largest) / s.temperature);
    if (keys[lid] == 0 || !(weight == weight)) weight = 0.0f;
    weights[lid] = weight;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lid != 0) return;
  if (is_greedy) {
    store_token(id_of(keys[0]), o, tokens, token_slots, output_rows, segments, rows);
    return;
  }
  uint n = 0;
  float sum = 0.0f;
  while (n < uint(s.top_k) && keys[n] != 0) sum += weights[n++];
  if (s.top_p < 1.0f) {
    float prefix = 0.0f;
    uint kept = 0;
    while (kept < n) {
      prefix += weights[kept++];
      if (prefix >= s.top_p * sum) break;
    }
    n = kept;
  }
  while (n > 1 && weights[n - 1] < s.min_p) --n;
  float total = 0.0f;
  for (uint i = 0; i < n; ++i) total += weights[i];
  const float target = uniform_of(s.seed_low, s.seed_high, s.sequence, s.step) * total;
  uint chosen = 0;
  for (float prefix = weights[0]; prefix <= target && chosen + 1 < n; prefix += weights[chosen]) ++chosen;
  store_token(id_of(keys[chosen]), o, tokens, token_slots, output_rows, segments, rows);
}
