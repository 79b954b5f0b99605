// sample_whole: a draw over the whole vocabulary, for rows whose top-k is off or beyond what rank_sample
// holds.
//
// The kept tokens are a prefix of the candidates' order, described by a cut: logits above cut.order, and the
// first cut.ties of those equal to it. Top-k, top-p and the draw each find a place in that order by building
// 32 bits of it from the top, one pass over the logits a bit: counts for top-k, fp32 sums of weights for the
// others, added in one fixed order. One threadgroup of 256 a row; bound by those passes. Rare, so simple.
#include "vocabulary.h"

struct Cut {
  uint order;
  uint ties;
};

struct Row {
  device const float* logits;
  uint n_tokens;
  float largest;
  float temperature;
  threadgroup float* parts;
  uint lid, sg, lane;

  float weight(uint order) const {
    const float w = exp((logit_of(order) - largest) / temperature);
    return w == w ? w : 0.0f;
  }
  // Number, or sum of weights, of the tokens at or above `order`.
  float at_least(uint order, bool counts) const {
    float sum = 0.0f;
    for (uint i = lid; i < n_tokens; i += kVocabularyThreads) {
      const uint mine = ordered(logits[i]);
      if (mine >= order) sum += counts ? 1.0f : weight(mine);
    }
    return sum_all(sum, sg, lane, parts);
  }
  float above(uint order, bool counts) const {
    return order == 0xffffffffu ? 0.0f : at_least(order + 1, counts);
  }

  // Sum of weights of the kept tokens at or above `order`.
  float kept_at_least(uint order, Cut cut) const {
    if (order > cut.order) return at_least(order, false);
    return above(cut.order, false) + float(cut.ties) * weight(cut.order);
  }
};

[[kernel]] void sample_whole(
    device const float* logits [[buffer(0)]], device int* tokens [[buffer(2)]],
    device int* token_slots [[buffer(3)]], constant VocabularyParams& p [[buffer(20)]],
    device const StepSampling* sampling [[buffer(24)]], device const uint* output_rows [[buffer(25)]],
    device const StepSegment* segments [[buffer(28)]], device const StepRow* rows [[buffer(29)]],
    constant StepHeader& step [[buffer(30)]], uint o [[threadgroup_position_in_grid]],
    uint lid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[kVocabularyThreads / 32];
  threadgroup uint best[kVocabularyThreads / 32];
  if (o >= step.n_outputs) return;
  const StepSampling s = sampling[o];
  if (s.temperature <= 0.0f || (s.top_k > 0 && s.top_k <= int(p.n_kept))) return;

  Row row;
  row.logits = logits + ulong(o) * p.stride;
  row.n_tokens = step.n_tokens;
  row.temperature = s.temperature;
  row.parts = parts;
  row.lid = lid;
  row.sg = sg;
  row.lane = lane;
  uint top = 0;
  uint bottom = 0xffffffffu;
  for (uint i = lid; i < row.n_tokens; i += kVocabularyThreads) {
    top = max(top, ordered(row.logits[i]));
    bottom = min(bottom, ordered(row.logits[i]));
  }
  top = simd_max(top);
  if (lane == 0) best[sg] = top;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < kVocabularyThreads / 32; ++i) top = max(top, best[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  bottom = simd_min(bottom);
  if (lane == 0) best[sg] = bottom;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < kVocabularyThreads / 32; ++i) bottom = min(bottom, best[i]);
  row.largest = logit_of(top);

  // Everything, then top-k.
  Cut cut;
  cut.order = bottom;
  cut.ties = uint(row.at_least(bottom, true) - row.above(bottom, true));
  if (s.top_k > 0 && uint(s.top_k) < row.n_tokens) {
    uint order = 0;
    for (uint bit = 0x80000000u; bit != 0; bit >>= 1)
      if (row.at_least(order | bit, true) >= float(s.top_k)) order |= bit;
    cut.order = order;
    cut.ties = uint(float(s.top_k) - row.above(order, true));
  }
  // Top-p: the shortest prefix whose weight reaches its share.
  if (s.top_p < 1.0f) {
    const float wanted = s.top_p * row.kept_at_least(0u, cut);
    uint order = 0;
    for (uint bit = 0x80000000u; bit != 0; bit >>= 1)
      if ((order | bit) <= top && row.kept_at_least(order | bit, cut) >= wanted) order |= bit;
    if (order >= cut.order) {
      const float missing = wanted - row.above(order, false);
      const float each = row.weight(order);
      const uint equal =
          order == cut.order ? cut.ties : uint(row.at_least(order, true) - row.above(order, true));
      uint ties = each > 0.0f ? uint(ceil(missing / each)) : equal;
      cut.order = order;
      cut.ties = min(max(ties, 1u), equal);
    }
  }
  // Min-p: weights fall along the order, so what it drops is the end of it.
  if (s.min_p > 0.0f && row.weight(cut.order) < s.min_p) {
    uint low = cut.order;  // dropped
    uint high = top;       // kept
    while (high - low > 1) {
      const uint middle = low + (high - low) / 2;
      if (row.weight(middle) < s.min_p) low = middle;
      else high = middle;
    }
    cut.order = high;
    cut.ties = uint(row.at_least(high, true) - row.above(high, true));
  }
  // The draw: the first token in order at which the sum exceeds the target.
  const float total = row.kept_at_least(0u, cut);
  const float target = uniform_of(s.seed_low, s.seed_high, s.sequence, s.step) * total;
  uint order = 0;
  for (uint bit = 0x80000000u; bit != 0; bit >>= 1)
    if ((order | bit) <= top && row.kept_at_least(order | bit, cut) > target) order |= bit;
  order = max(order, cut.order);
  const float each = row.weight(order);
  const uint equal = order == cut.order ? cut.ties : uint(row.at_least(order, true) - row.above(order, true));
  const float past = max(target - row.above(order, false), 0.0f);
  const uint index = equal == 0 ? 0u : min(each > 0.0f ? uint(past / each) : 0u, equal - 1);
  // The token with this logit that has `index` others before it.
  uint id = 0;
  for (uint bit = 1u << 23; bit != 0; bit >>= 1) {
    if (id + bit >= row.n_tokens) continue;
    float before = 0.0f;
    for (uint i = lid; i < id + bit; i += kVocabularyThreads)
      if (ordered(row.logits[i]) == order) before += 1.0f;
    if (sum_all(before, sg, lane, parts) <= float(index)) id += bit;
  }
  if (lid == 0) store_token(int(id), o, tokens, token_slots, output_rows, segments, rows);
}
