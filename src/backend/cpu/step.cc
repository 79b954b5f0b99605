#include "backend/cpu/step.h"

#include <algorithm>

#include "backend/step_checks.h"

namespace lily::backend::cpu {

using backend::Segment;

Step::Step(const plan::Plan& plan, Memory& memory)
    : plan_(plan), memory_(memory), frequencies_(rope_frequencies(plan.dims.rope_theta)) {
  const auto rows = static_cast<size_t>(plan.shape.rows);
  segment_.resize(rows);
  rope_.resize(rows);
  tiles_.reserve(rows);
}

void Step::begin(const backend::StepInputs& inputs, std::byte* scratch) {
  inputs_ = inputs;
  scratch_ = scratch;
  backend::check_step(inputs, plan_, memory_.spec());
  const int tile_rows = std::max(1, kMaxQueries / (plan_.dims.n_q_heads / plan_.dims.n_kv_heads));
  tiles_.clear();
  longest_ = 0;
  int32_t row = 0;
  for (int32_t s = 0; s < n_segments(); ++s) {
    const Segment& seg = segment(s);
    const int64_t n_keys = int64_t{seg.position} + seg.n_rows;
    longest_ = std::max(longest_, n_keys);
    for (int32_t first = 0; first < seg.n_rows; first += tile_rows)
      tiles_.push_back({s, row + first, std::min(tile_rows, seg.n_rows - first)});
    for (int32_t i = 0; i < seg.n_rows; ++i, ++row) {
      segment_[static_cast<size_t>(row)] = s;
      rope_[static_cast<size_t>(row)] = rope_row(frequencies_, seg.position + i);
    }
  }
}

int64_t Step::rows(plan::ValueId value) const {
  const plan::Value& v = plan_.value(value);
  if (v.rows == plan::RowSpace::matrix) return v.n_matrix_rows;
  return plan::rows_in_step(plan_, v.rows, static_cast<int>(n_rows()), static_cast<int>(n_outputs()));
}

int64_t Step::position(int64_t row) const {
  const Segment& seg = segment_of(row);
  return seg.position + (row - seg.first_row);
}

std::span<const int32_t> Step::blocks_of(const Segment& segment) const {
  return inputs_.block_table.subspan(static_cast<size_t>(segment.first_block));
}

}  // namespace lily::backend::cpu
