// What a step ends in. The meaning of each ending is plan/sample.h.
#include "backend/reference/machine.h"
#include "plan/sample.h"

namespace lily::backend::reference {
namespace {

// Real tokens only: padding rows of the vocabulary are never chosen.
std::span<const float> real_logits(const Machine& m, plan::ValueId logits, int output) {
  return m.row(logits, output).first(static_cast<size_t>(m.step.n_tokens));
}

void store_token(const Machine& m, plan::ValueId token, int output, int32_t id) {
  m.value(token).i[static_cast<size_t>(output)] = id;
  const auto row = static_cast<size_t>(m.step.output_rows[static_cast<size_t>(output)]);
  const Segment& segment = m.step.segments[static_cast<size_t>(m.step.segment_of_row[row])];
  if (segment.token_out != kNoToken) m.memory.tokens.at(static_cast<size_t>(segment.token_out)) = id;
}

}  // namespace

void run(const Machine& m, const plan::GreedyToken& op) {
  for (int o = 0; o < m.step.n_outputs(); ++o)
    store_token(m, op.token, o, plan::greedy_token(real_logits(m, op.logits, o)));
}

void run(const Machine& m, const plan::SampleToken& op) {
  for (int o = 0; o < m.step.n_outputs(); ++o) {
    const Sampling& s = m.step.sampling.at(static_cast<size_t>(o));
    const plan::SampleSettings settings{
        .temperature = s.temperature, .top_p = s.top_p, .min_p = s.min_p, .top_k = s.top_k};
    const float u = plan::uniform(s.seed, s.sequence, s.step);
    store_token(m, op.token, o, plan::sample_token(real_logits(m, op.logits, o), settings, u));
  }
}

void run(const Machine& m, const plan::TopCandidates& op) {
  for (int o = 0; o < m.step.n_outputs(); ++o) {
    const auto logits = real_logits(m, op.logits, o);
    const auto top = plan::top_candidates(logits, op.n_candidates);
    for (size_t j = 0; j < static_cast<size_t>(op.n_candidates); ++j) {
      m.value(op.ids).index_row(o)[j] = j < top.size() ? top[j].id : -1;
      m.row(op.values, o)[j] = j < top.size() ? top[j].logit : -std::numeric_limits<float>::infinity();
    }
    m.row(op.logsumexp, o)[0] = plan::logsumexp(logits);
  }
}

}  // namespace lily::backend::reference
