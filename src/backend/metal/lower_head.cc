// Lowering of what a step ends in.
#include "backend/metal/lowering.h"
#include "base/error.h"

namespace lily::metal {

using kernels::kMaxRanked;
using kernels::kRankChunk;
using kernels::kSampleRanked;
using kernels::VocabularyParams;

namespace {

uint32_t chunks_of(uint32_t n, uint32_t chunk) { return (n + chunk - 1) / chunk; }

constexpr Size3 kThreads{256, 1, 1};

}  // namespace

void Lowering::lower(const plan::GreedyToken& o) {
  const int64_t n_outputs = rows_bound(plan_, plan_.value(o.logits));
  const uint32_t n_chunks = chunks_of(cols(o.logits), kRankChunk);
  const Place keys = work(n_outputs * n_chunks * 8);
  const VocabularyParams p{.stride = cols(o.logits), .n_chunks = n_chunks, .n_out = n_chunks};
  begin("greedy_part", {fixed(n_chunks), per(Count::outputs), fixed(1)}, kThreads);
  read(0, o.logits);
  arg(1, keys, Kind::write);
  params(p);
  header();
  next_phase();
  begin("greedy_token", {per(Count::outputs), fixed(1), fixed(1)}, kThreads);
  arg(1, keys);
  write(2, o.token);
  endings(p);
}

// Arguments of a kernel that stores tokens.
void Lowering::endings(VocabularyParams p) {
  arg(3, {.kind = Place::Kind::token_slots}, Kind::write);
  params(p);
  step(kOutputRowsIndex, Place::Part::output_rows);
  segments();
  rows();
  header();
}

// Levels until what is left fits one threadgroup: keys [O, n_chunks, n_kept].
Place Lowering::ranked(plan::ValueId logits, uint32_t n_kept, Place& sums, uint32_t& n_chunks) {
  const int64_t n_outputs = rows_bound(plan_, plan_.value(logits));
  n_chunks = chunks_of(cols(logits), kRankChunk);
  Place keys = work(n_outputs * n_chunks * n_kept * 8);
  sums = work(n_outputs * n_chunks * 8);
  begin("rank_logits", {fixed(n_chunks), per(Count::outputs), fixed(1)}, kThreads);
  read(0, logits);
  arg(1, keys, Kind::write);
  arg(2, sums, Kind::write);
  params(VocabularyParams{.stride = cols(logits), .n_kept = n_kept, .n_out = n_chunks});
  header();
  next_phase();
  const uint32_t chunks_a_group = kRankChunk / n_kept;
  while (n_chunks > chunks_a_group) {
    const uint32_t n_out = chunks_of(n_chunks, chunks_a_group);
    const Place next = work(n_outputs * n_out * n_kept * 8);
    begin("rank_keys", {fixed(n_out), per(Count::outputs), fixed(1)}, kThreads);
    arg(0, keys);
    arg(1, next, Kind::write);
    params(VocabularyParams{.n_chunks = n_chunks, .n_kept = n_kept, .n_out = n_out});
    header();
    next_phase();
    keys = next;
    n_chunks = n_out;
  }
  return keys;
}

void Lowering::lower(const plan::SampleToken& o) {
  Place sums;
  uint32_t n_chunks = 0;
  const Place keys = ranked(o.logits, kSampleRanked, sums, n_chunks);
  const VocabularyParams p{.stride = cols(o.logits), .n_chunks = n_chunks, .n_kept = kSampleRanked};
  begin("rank_sample", {per(Count::outputs), fixed(1), fixed(1)}, kThreads);
  arg(0, keys);
  write(2, o.token);
  step(kSamplingIndex, Place::Part::sampling);
  endings(p);
  // Beside it: the rows that it leaves.
  begin("sample_whole", {per(Count::outputs), fixed(1), fixed(1)}, kThreads).whole_vocabulary = true;
  read(0, o.logits);
  write(2, o.token);
  step(kSamplingIndex, Place::Part::sampling);
  endings(p);
}

void Lowering::lower(const plan::TopCandidates& o) {
  if (o.n_candidates > static_cast<int>(kMaxRanked))
    fail(Fault::user, "{} candidates: the Metal backend ranks at most {}", o.n_candidates, kMaxRanked);
  const uint32_t n_kept = o.n_candidates <= 64 ? 64 : kMaxRanked;
  Place sums;
  uint32_t n_chunks = 0;
  const Place keys = ranked(o.logits, n_kept, sums, n_chunks);
  begin("rank_candidates", {per(Count::outputs), fixed(1), fixed(1)}, kThreads);
  arg(0, keys);
  arg(1, sums);
  write(2, o.ids);
  write(3, o.values);
  write(4, o.logsumexp);
  params(VocabularyParams{.n_chunks = n_chunks,
                          .n_kept = n_kept,
                          .chunk = chunks_of(cols(o.logits), kRankChunk),
                          .n_wanted = static_cast<uint32_t>(o.n_candidates)});
  header();
}

}  // namespace lily::metal
