// Ops that work row by row: embedding, norms, sums, and how a step ends.
#include <algorithm>
#include <limits>

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/embed.h"
#include "backend/cpu/kernels/norm.h"
#include "backend/cpu/lower_parts.h"
#include "base/error.h"
#include "plan/sample.h"

namespace lily::backend::cpu {
namespace {

// The logits of real tokens; the rows that pad the vocabulary take no part.
std::span<const float> real_logits(const Step& step, plan::ValueId logits, int64_t row) {
  const auto n = static_cast<size_t>(std::min<int64_t>(step.inputs().n_tokens, step.stride(logits)));
  return {step.data(logits) + row * step.stride(logits), n};
}

void write_token(const Step& step, plan::ValueId token, int64_t row, int32_t id) {
  step.data<int32_t>(token)[row] = id;
  const backend::Segment& segment = step.segment_of(step.inputs().output_rows[static_cast<size_t>(row)]);
  if (segment.token_out != backend::kNoToken) step.memory().token(segment.token_out) = id;
}

}  // namespace

Lowered lower_op(const plan::Embed& o, const LowerContext& c) {
  Lowered op;
  const TileMatrix w = c.weights.linear({model::Weight::embed, model::kNoLayer}).first;
  add_row_phase(op, o.y, [=](const Step& step, Worker&, int64_t row) {
    int32_t token = step.inputs().tokens[static_cast<size_t>(row)];
    if (token == backend::kTokenFromSlot) token = step.memory().token(step.segment_of(row).token_in);
    LILY_CHECK(token >= 0 && token < w.rows, "token {}", token);
    embed_row(w, token, step.data(o.y) + row * step.stride(o.y));
  });
  return op;
}

Lowered lower_op(const plan::RmsNorm& o, const LowerContext& c) {
  Lowered op;
  const float* w = c.weights.vector(o.weight).data();
  add_row_phase(op, o.x, [=](const Step& step, Worker&, int64_t row) {
    rms_norm(step.data(o.x) + row * step.stride(o.x), w, step.data(o.y) + row * step.stride(o.y),
             step.stride(o.x));
  });
  return op;
}

Lowered lower_op(const plan::Add& o, const LowerContext&) {
  Lowered op;
  add_row_phase(op, o.x, [=](const Step& step, Worker&, int64_t row) {
    const int64_t n = step.stride(o.x), at = row * n;
    add_rows(step.data(o.x) + at, step.data(o.residual_in) + at, step.data(o.residual_out) + at, n);
  });
  return op;
}

Lowered lower_op(const plan::SwiGlu& o, const LowerContext&) {
  Lowered op;
  add_row_phase(op, o.y, [=](const Step& step, Worker&, int64_t row) {
    swiglu(step.data(o.gate) + row * step.stride(o.gate), step.data(o.up) + row * step.stride(o.up),
           step.data(o.y) + row * step.stride(o.y), o.gate.n_cols);
  });
  return op;
}

Lowered lower_op(const plan::GatherRows& o, const LowerContext&) {
  Lowered op;
  add_row_phase(op, o.y, [=](const Step& step, Worker&, int64_t row) {
    const int64_t from = step.inputs().output_rows[static_cast<size_t>(row)];
    std::copy_n(step.data(o.x) + from * step.stride(o.x), step.stride(o.x),
                step.data(o.y) + row * step.stride(o.y));
  });
  return op;
}

Lowered lower_op(const plan::GreedyToken& o, const LowerContext&) {
  Lowered op;
  add_row_phase(op, o.logits, [=](const Step& step, Worker&, int64_t row) {
    write_token(step, o.token, row, plan::greedy_token(real_logits(step, o.logits, row)));
  });
  return op;
}

Lowered lower_op(const plan::SampleToken& o, const LowerContext&) {
  Lowered op;
  add_row_phase(op, o.logits, [=](const Step& step, Worker&, int64_t row) {
    const backend::Sampling& s = step.inputs().sampling[static_cast<size_t>(row)];
    const plan::SampleSettings settings{s.temperature, s.top_p, s.min_p, s.top_k};
    const float u = plan::uniform(s.seed, s.sequence, s.step);
    write_token(step, o.token, row, plan::sample_token(real_logits(step, o.logits, row), settings, u));
  });
  return op;
}

Lowered lower_op(const plan::TopCandidates& o, const LowerContext&) {
  Lowered op;
  add_row_phase(op, o.logits, [=](const Step& step, Worker&, int64_t row) {
    const auto logits = real_logits(step, o.logits, row);
    const auto top = plan::top_candidates(logits, o.n_candidates);
    int32_t* ids = step.data<int32_t>(o.ids) + row * o.n_candidates;
    float* values = step.data(o.values) + row * o.n_candidates;
    for (int i = 0; i < o.n_candidates; ++i) {
      const bool exists = i < std::ssize(top);
      ids[i] = exists ? top[static_cast<size_t>(i)].id : -1;
      values[i] = exists ? top[static_cast<size_t>(i)].logit : -std::numeric_limits<float>::infinity();
    }
    step.data(o.logsumexp)[row] = plan::logsumexp(logits);
  });
  return op;
}

}  // namespace lily::backend::cpu
