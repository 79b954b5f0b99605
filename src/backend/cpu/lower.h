// From ops to work for threads. A lowered op is a list of phases; a phase is a number of independent units.
// Between the phases of an op stands a barrier; the n-th phases of all ops of a stage run together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "backend/cpu/kernels/matrix_unit.h"
#include "backend/cpu/kernels/targets.h"
#include "backend/cpu/step.h"
#include "backend/cpu/weights.h"
#include "plan/plan.h"

namespace lily::backend::cpu {

// A thread at work, with memory of its own of at least Lowered::worker_bytes.
struct Worker {
  int thread = 0;
  std::byte* scratch = nullptr;
};

struct Phase {
  std::function<int64_t(const Step&)> n_units;
  std::function<void(const Step&, Worker&, int64_t unit)> run;
  // Called by a thread before the first unit of this phase that it runs, and again when it comes back from
  // another phase, if set: what is cheaper to do in every thread than to wait for. Fills the worker's scratch
  // memory, which belongs to the phase until the thread leaves it.
  std::function<void(const Step&, Worker&)> prepare;
};

struct Lowered {
  std::vector<Phase> phases;
  int64_t extra_bytes = 0;   // of Step::extra, beginning at the offset given to lower()
  int64_t worker_bytes = 0;  // of Worker::scratch
};

// What lowering knows: the plan's bounds, the weights, and where the op's extra memory begins.
struct LowerContext {
  const plan::Plan& plan;
  const Weights& weights;
  int64_t extra_offset = 0;

  bool is_small() const { return plan.shape.rows <= kMaxTileRows; }
  // P6: quantised products of many rows run on the processor's matrix unit.
  bool uses_matrix_unit() const {
    return !is_small() && plan.policy.matrix_unit == plan::MatrixUnit::tensor && matrix_unit_present() &&
           current_target() == SimdTarget::avx512_vnni;
  }
  const model::Dims& dims() const { return plan.dims; }
};

Lowered lower(const plan::Op& op, const LowerContext& context);

}  // namespace lily::backend::cpu
