// Ops that work row by row: embedding, norms and sums.
#include <algorithm>

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/embed.h"
#include "backend/cpu/kernels/norm.h"
#include "backend/cpu/lower_parts.h"
#include "base/error.h"

namespace lily::backend::cpu {
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

}  // namespace lily::backend::cpu
