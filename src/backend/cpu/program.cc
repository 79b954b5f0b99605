#include "backend/cpu/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/half.h"
#include "base/trace.h"
#include "plan/print.h"

namespace lily::backend::cpu {
namespace {

// The n-th phases of a stage's ops run together.
void append_intervals(std::span<const Lowered> ops, std::vector<Interval>& intervals) {
  size_t most = 0;
  for (const Lowered& op : ops) most = std::max(most, op.phases.size());
  for (size_t phase = 0; phase < most; ++phase) {
    Interval interval;
    for (const Lowered& op : ops)
      if (phase < op.phases.size()) interval.phases.push_back(&op.phases[phase]);
    intervals.push_back(std::move(interval));
  }
}

// The ops [first, last) of a stage, for a trace: "layers.3: delta_update".
std::string names(const plan::Plan& plan, size_t first, size_t last) {
  std::string text;
  for (size_t i = first; i < last; ++i)
    text += fmt::format("{}{}", i == first ? "" : " + ", plan::label(plan.ops[i]));
  return text;
}

// Lowers all ops. The extra memory of a stage's ops lies side by side; stages use the same bytes.
std::vector<Lowered> lower_all(const plan::Plan& plan, const Weights& weights, ScratchSizes& sizes) {
  constexpr int64_t kMargin = 64;
  std::vector<Lowered> lowered;
  int64_t offset = 0, extra_bytes = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (i > 0 && plan.stage[i] != plan.stage[i - 1]) offset = 0;
    lowered.push_back(lower(plan.ops[i], {plan, weights, offset}));
    offset += lowered.back().extra_bytes;
    extra_bytes = std::max(extra_bytes, offset);
    sizes.worker_bytes = std::max(sizes.worker_bytes, lowered.back().worker_bytes);
  }
  sizes.value_bytes = plan.scratch_bytes + extra_bytes + kMargin;
  sizes.worker_bytes += kMargin;
  return lowered;
}

}  // namespace

ScratchSizes scratch_sizes(const plan::Plan& plan, const Weights& weights) {
  ScratchSizes sizes;
  lower_all(plan, weights, sizes);
  return sizes;
}

CpuProgram::CpuProgram(plan::Plan plan, const Weights& weights, Memory& memory, SimdTarget target,
                       ThreadPool& pool, Scratch& shared, Trace* trace)
    : plan_(std::move(plan)),
      target_(target),
      own_scratch_(plan_.options.keep_values ? std::make_unique<Scratch>(pool.n_threads()) : nullptr),
      scratch_(own_scratch_ ? *own_scratch_ : shared),
      step_(plan_, memory),
      executor_(pool),
      trace_(trace) {
  if (plan_.policy.activation != plan::FloatType::f32 || plan_.policy.residual != plan::FloatType::f32)
    fail(Fault::user, "the cpu backend computes with fp32 activations and cannot run a plan with bf16 ones");
  use_target(target_);  // lowering asks what it is
  ScratchSizes sizes;
  lowered_ = lower_all(plan_, weights, sizes);
  for (size_t first = 0; first < lowered_.size();) {
    size_t last = first;
    while (last < lowered_.size() && plan_.stage[last] == plan_.stage[first]) ++last;
    append_intervals(std::span(lowered_).subspan(first, last - first), intervals_);
    if (trace_ != nullptr) interval_names_.resize(intervals_.size(), names(plan_, first, last));
    first = last;
  }
  if (trace_ != nullptr) interval_ends_.resize(intervals_.size());
  scratch_.reserve(sizes.value_bytes, sizes.worker_bytes);
  const auto outputs = static_cast<size_t>(plan_.shape.outputs);
  for (Outputs& out : outputs_) {
    if (plan_.shape.ending == plan::Ending::logits)
      out.logits.resize(outputs * static_cast<size_t>(plan_.dims.vocab));
  }
}

void CpuProgram::submit(const StepInputs& inputs) {
  LILY_CHECK(n_submitted_ - n_waited_ < 2, "two steps are in flight already");
  // What a step does not write it must not read: tests that keep values would see the NaN.
  if (plan_.options.keep_values)
    std::memset(scratch_.values(), 0xff, static_cast<size_t>(plan_.scratch_bytes));
  use_target(target_);
  step_.begin(inputs, scratch_.values());
  run_traced();
  collect(outputs_[static_cast<size_t>(n_submitted_ % 2)]);
  ++n_submitted_;
}

void CpuProgram::run_traced() {
  auto begin = Executor::Clock::now();
  executor_.run(intervals_, step_, scratch_, interval_ends_);
  for (size_t i = 0; i < interval_ends_.size(); ++i) {
    trace_->add(Trace::Track::ops, interval_names_[i], begin, interval_ends_[i]);
    begin = interval_ends_[i];
  }
}

StepOutputs CpuProgram::wait() {
  LILY_CHECK(n_waited_ < n_submitted_, "no step in flight");
  return outputs_[static_cast<size_t>(n_waited_++ % 2)].view;
}

void CpuProgram::copy_masked_logits(plan::ValueId logits, Outputs& out) const {
  if (plan_.shape.ending != plan::Ending::logits) return;
  const auto vocab = static_cast<size_t>(plan_.dims.vocab);
  const auto n = static_cast<size_t>(step_.n_outputs()) * vocab;
  const float* from = step_.data(logits);
  std::copy_n(from, n, out.logits.begin());
  const size_t n_real = std::min(static_cast<size_t>(step_.inputs().n_tokens), vocab);
  for (size_t row = 0; row < n; row += vocab)
    std::fill(out.logits.begin() + static_cast<ptrdiff_t>(row + n_real),
              out.logits.begin() + static_cast<ptrdiff_t>(row + vocab),
              -std::numeric_limits<float>::infinity());
  out.view.logits = std::span(out.logits).first(n);
}

void CpuProgram::collect(Outputs& out) const {
  out.view = {};
  if (plan_.ops.empty() || plan_.shape.ending == plan::Ending::none) return;
  const auto take = [&](plan::ValueId value, auto& to) {
    using T = typename std::remove_reference_t<decltype(to)>::value_type;
    const T* from = step_.data<T>(value);
    to.assign(from, from + step_.n_outputs() * step_.stride(value));
    return std::span<const T>(to);
  };
  std::visit(plan::overloaded{
                 [&](const plan::GreedyToken& o) { out.view.tokens = take(o.token, out.tokens); },
                 [&](const plan::SampleToken& o) { out.view.tokens = take(o.token, out.tokens); },
                 [&](const plan::TopCandidates& o) {
                   out.view.candidate_ids = take(o.ids, out.candidate_ids);
                   out.view.candidate_logits = take(o.values, out.candidate_logits);
                   out.view.logsumexp = take(o.logsumexp, out.logsumexp);
                 },
                 [&](const plan::Linear& o) { copy_masked_logits(o.y, out); },
                 [&](const plan::NormLinear& o) { copy_masked_logits(o.y, out); },
                 [](const auto&) {},
             },
             plan_.ops.back());
}

std::vector<float> CpuProgram::read(plan::ValueId id) {
  const plan::Value& value = plan_.value(id);
  const int64_t n = step_.rows(id) * value.cols;
  if (value.type == plan::Type::f32) return {step_.data(id), step_.data(id) + n};
  if (value.type == plan::Type::i32) return {step_.data<int32_t>(id), step_.data<int32_t>(id) + n};
  std::vector<float> widened(static_cast<size_t>(n));
  std::transform(step_.data<Bf16>(id), step_.data<Bf16>(id) + n, widened.begin(),
                 [](Bf16 x) { return to_float(x); });
  return widened;
}

void CpuProgram::write(plan::ValueId id, std::span<const float> data) {
  const plan::Value& value = plan_.value(id);
  LILY_CHECK(std::ssize(data) <= plan::rows_bound(plan_, value) * value.cols, "{} values for {}", data.size(),
             value.name);
  // Before the first step nothing is placed yet.
  auto* to = scratch_.values() + plan_.placement[static_cast<size_t>(id)].offset;
  if (value.type == plan::Type::f32) std::copy(data.begin(), data.end(), reinterpret_cast<float*>(to));
  else if (value.type == plan::Type::i32) std::copy(data.begin(), data.end(), reinterpret_cast<int32_t*>(to));
  else
    std::transform(data.begin(), data.end(), reinterpret_cast<Bf16*>(to), [](float x) { return to_bf16(x); });
}

void CpuProgram::run_ops(const StepInputs& inputs, int first, int last) {
  use_target(target_);
  step_.begin(inputs, scratch_.values());
  for (int i = first; i < last; ++i) {
    std::vector<Interval> intervals;
    append_intervals(std::span(lowered_).subspan(static_cast<size_t>(i), 1), intervals);
    executor_.run(intervals, step_, scratch_);
  }
}

}  // namespace lily::backend::cpu
