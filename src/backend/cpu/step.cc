#include "backend/cpu/step.h"

#include <algorithm>

#include "base/error.h"

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
  const plan::Shape& shape = plan_.shape;
  LILY_CHECK(n_rows() > 0 && n_rows() <= shape.rows, "{} rows, planned for {}", n_rows(), shape.rows);
  LILY_CHECK(n_outputs() <= shape.outputs, "{} outputs, planned for {}", n_outputs(), shape.outputs);
  const int tile_rows = std::max(1, kMaxQueries / (plan_.dims.n_q_heads / plan_.dims.n_kv_heads));
  tiles_.clear();
  longest_ = 0;
  int32_t row = 0;
  for (int32_t s = 0; s < n_segments(); ++s) {
    const Segment& seg = segment(s);
    LILY_CHECK(seg.first_row == row && seg.n_rows > 0 && row + seg.n_rows <= n_rows(),
               "segment {} has rows {} + {}", s, seg.first_row, seg.n_rows);
    const int64_t n_keys = int64_t{seg.position} + seg.n_rows;
    LILY_CHECK(n_keys <= shape.context, "{} tokens, planned for {}", n_keys, shape.context);
    const int64_t n_blocks = (n_keys + kKvKeys - 1) / kKvKeys;
    LILY_CHECK(seg.first_block >= 0 && seg.first_block + n_blocks <= std::ssize(inputs.block_table),
               "segment {} needs blocks {} + {} of a table of {}", s, seg.first_block, n_blocks,
               inputs.block_table.size());
    for (int64_t i = 0; i < n_blocks; ++i) {
      const int32_t block = inputs.block_table[static_cast<size_t>(seg.first_block + i)];
      LILY_CHECK(block >= 0 && block < memory_.n_kv_blocks(), "KV block {} of {}", block,
                 memory_.n_kv_blocks());
    }
    longest_ = std::max(longest_, n_keys);
    for (int32_t first = 0; first < seg.n_rows; first += tile_rows)
      tiles_.push_back({s, row + first, std::min(tile_rows, seg.n_rows - first)});
    for (int32_t i = 0; i < seg.n_rows; ++i, ++row) {
      segment_[static_cast<size_t>(row)] = s;
      rope_[static_cast<size_t>(row)] = rope_row(frequencies_, seg.position + i);
    }
  }
  LILY_CHECK(row == n_rows(), "segments cover {} of {} rows", row, n_rows());
  for (const int32_t out : inputs.output_rows) LILY_CHECK(out >= 0 && out < n_rows(), "output row {}", out);
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
