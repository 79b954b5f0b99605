// Appends ops and values to a plan; forward.cc is written in its words.
#pragma once

#include <string>
#include <utility>

#include "plan/plan.h"

namespace lily::plan {

class Builder {
 public:
  explicit Builder(Plan& plan) : plan_(plan) {}

  const Plan& plan() const { return plan_; }
  const model::Dims& dims() const { return plan_.dims; }
  const Policy& policy() const { return plan_.policy; }
  const Fusions& fusions() const { return plan_.policy.fusions(plan_.shape.phase == Phase::decode); }

  // "layers.3.name", or "name" for kNoLayer.
  ValueId value(int layer, const std::string& name, RowSpace rows, int64_t cols, Type type);
  ValueId activation(int layer, const std::string& name, int64_t cols, RowSpace rows = RowSpace::tokens) {
    return value(layer, name, rows, cols, type_of(policy().activation));
  }
  View whole(ValueId id) const { return {id, 0, plan_.value(id).cols}; }
  View columns(ValueId id, int64_t first_col, int64_t n_cols) const { return {id, first_col, n_cols}; }

  void set_matrix_rows(ValueId id, int64_t n_rows) {
    plan_.values[static_cast<size_t>(id)].n_matrix_rows = n_rows;
  }

  // Where the sum of `residual` and something goes: in place, or a new value when all are kept.
  ValueId next_residual(int layer, const std::string& name, ValueId residual);

  template <typename T>
  void push(T op) {
    plan_.ops.emplace_back(std::move(op));
  }

  static Type type_of(FloatType type) { return type == FloatType::f32 ? Type::f32 : Type::bf16; }

 private:
  Plan& plan_;
};

}  // namespace lily::plan
