// One step as the lowered ops see it: inputs, what follows from them for each row, and where values lie. Made
// anew for every step in memory that a program keeps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels/attention.h"
#include "backend/cpu/kernels/rope.h"
#include "backend/cpu/memory.h"
#include "plan/plan.h"

namespace lily::backend::cpu {

// Consecutive rows of one segment that share the reading of keys and values.
struct RowTile {
  int32_t segment = 0, first_row = 0, n_rows = 0;
};

class Step {
 public:
  Step(const plan::Plan& plan, Memory& memory);

  // Checks the inputs against the plan's bounds and fills the rest. `scratch` is where values are placed.
  void begin(const backend::StepInputs& inputs, std::byte* scratch);

  const plan::Plan& plan() const { return plan_; }
  Memory& memory() const { return memory_; }
  const backend::StepInputs& inputs() const { return inputs_; }
  int64_t n_rows() const { return static_cast<int64_t>(inputs_.tokens.size()); }
  int64_t n_outputs() const { return static_cast<int64_t>(inputs_.output_rows.size()); }
  int64_t rows(plan::ValueId value) const;
  int64_t rows(plan::View view) const { return rows(view.value); }

  const backend::Segment& segment(int64_t i) const { return inputs_.segments[static_cast<size_t>(i)]; }
  int64_t n_segments() const { return static_cast<int64_t>(inputs_.segments.size()); }
  const backend::Segment& segment_of(int64_t row) const {
    return segment(segment_[static_cast<size_t>(row)]);
  }
  int64_t position(int64_t row) const;
  const RopeRow& rope(int64_t row) const { return rope_[static_cast<size_t>(row)]; }
  std::span<const int32_t> blocks_of(const backend::Segment& segment) const;
  std::span<const RowTile> tiles() const { return tiles_; }
  int64_t longest() const { return longest_; }  // keys that the row with the most of them sees

  // Row 0 of a value, and of a view's columns; with the distance between rows.
  template <typename T = float>
  T* data(plan::ValueId value) const {
    return reinterpret_cast<T*>(scratch_ + plan_.placement[static_cast<size_t>(value)].offset);
  }
  float* data(const plan::View& view) const { return data(view.value) + view.first_col; }
  int64_t stride(plan::ValueId value) const { return plan_.value(value).cols; }
  int64_t stride(const plan::View& view) const { return stride(view.value); }
  // Memory of an op beyond the values.
  std::byte* extra(int64_t offset) const { return scratch_ + plan_.scratch_bytes + offset; }

 private:
  const plan::Plan& plan_;
  Memory& memory_;
  std::array<double, kRotaryPairs> frequencies_;
  std::byte* scratch_ = nullptr;
  backend::StepInputs inputs_;
  std::vector<int32_t> segment_;  // [rows]
  std::vector<RopeRow> rope_;     // [rows]
  std::vector<RowTile> tiles_;
  int64_t longest_ = 0;
};

}  // namespace lily::backend::cpu
