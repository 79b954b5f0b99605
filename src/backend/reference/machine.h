// The reference backend: every op in scalar code with double sums, written to be obviously right and never
// optimised.
//
// Activations and conv state are fp32 whatever the plan's types say, and so is KV unless it is int8; fused
// ops run as the simple ops that plan::expanded gives. Loops over independent outputs are spread over
// threads; a value's bits do not depend on threads, on chunking or on the other rows of a step.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/reference/memory.h"
#include "base/thread_pool.h"
#include "model/weight_store.h"
#include "plan/plan.h"

namespace lily::backend::reference {

// A value in memory. Indices (Type::i32) stand in `i`, everything else in `f`.
struct Tensor {
  int64_t n_rows = 0, n_cols = 0;
  std::vector<float> f;
  std::vector<int32_t> i;

  std::span<float> row(int64_t r) {
    return std::span(f).subspan(static_cast<size_t>(r * n_cols), static_cast<size_t>(n_cols));
  }
  std::span<int32_t> index_row(int64_t r) {
    return std::span(i).subspan(static_cast<size_t>(r * n_cols), static_cast<size_t>(n_cols));
  }
};

// A step's inputs, owned, with what is derived from them for each row.
struct Step {
  std::vector<int32_t> tokens;
  std::vector<Segment> segments;
  std::vector<int32_t> block_table;
  std::vector<int32_t> output_rows;
  std::vector<Sampling> sampling;
  int32_t n_tokens = 0;
  std::vector<int> segment_of_row;
  std::vector<int> position_of_row;

  int n_rows() const { return static_cast<int>(tokens.size()); }
  int n_outputs() const { return static_cast<int>(output_rows.size()); }
  int block_of(const Segment& segment, int position) const {
    return block_table.at(static_cast<size_t>(segment.first_block + position / kKvBlockTokens));
  }
};

// Everything an op may touch.
struct Machine {
  const plan::Plan& plan;  // simple ops only
  const model::WeightStore& weights;
  Memory& memory;
  std::vector<Tensor>& values;  // by ValueId
  const Step& step;
  ThreadPool& pool;

  const model::Dims& dims() const { return plan.dims; }
  Tensor& value(plan::ValueId id) const { return values[static_cast<size_t>(id)]; }
  std::span<float> row(plan::ValueId id, int64_t r) const { return value(id).row(r); }
  std::span<float> row(const plan::View& view, int64_t r) const {
    return value(view.value)
        .row(r)
        .subspan(static_cast<size_t>(view.first_col), static_cast<size_t>(view.n_cols));
  }
  int64_t n_rows(plan::ValueId id) const {
    return plan::rows_in_step(plan, plan.value(id).rows, step.n_rows(), step.n_outputs());
  }
  void parallel(int64_t n, const std::function<void(int64_t)>& body) const {
    pool.parallel_for(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }
};

// Row `out` of matrix `matrix` of a linear weight, dequantised: w = scale * code + bias in fp32.
std::vector<float> weight_row(const model::LinearView& weight, int64_t matrix, int64_t out);

void run_op(const Machine& m, const plan::Op& op);  // any simple op

// One family a file; the fields say it all, the formulas stand beside the ops in plan/op.h.
void run(const Machine& m, const plan::Embed& op);
void run(const Machine& m, const plan::RmsNorm& op);
void run(const Machine& m, const plan::Linear& op);
void run(const Machine& m, const plan::Add& op);
void run(const Machine& m, const plan::SwiGlu& op);
void run(const Machine& m, const plan::GatherRows& op);
void run(const Machine& m, const plan::ShortConv& op);
void run(const Machine& m, const plan::DeltaPrepare& op);
void run(const Machine& m, const plan::DeltaRule& op);
void run(const Machine& m, const plan::GatedNorm& op);
void run(const Machine& m, const plan::HeadNormRope& op);
void run(const Machine& m, const plan::KvAppend& op);
void run(const Machine& m, const plan::Attention& op);
void run(const Machine& m, const plan::AttentionGate& op);
void run(const Machine& m, const plan::RouterTop& op);
void run(const Machine& m, const plan::ExpertGroups& op);
void run(const Machine& m, const plan::ExpandWeight& op);
void run(const Machine& m, const plan::ExpertsLinear& op);
void run(const Machine& m, const plan::ExpertsCombine& op);
void run(const Machine& m, const plan::GreedyToken& op);
void run(const Machine& m, const plan::SampleToken& op);
void run(const Machine& m, const plan::TopCandidates& op);

// y = x / sqrt(mean(x^2) + eps) * w.
void rms_norm(std::span<const float> x, std::span<const float> w, std::span<float> y);
float sigmoid(double x);
float silu(double x);

}  // namespace lily::backend::reference
