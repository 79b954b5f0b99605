#include "backend/cuda/program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <variant>

#include "backend/cuda/graph_ablation.h"
#include "base/error.h"
#include "base/half.h"

namespace lily::cuda {
namespace {

// The value that holds whole logits when a plan ends in them.
plan::ValueId logits_value(const plan::Plan& plan) {
  plan::ValueId id = plan::kNoValue;
  if (!plan.ops.empty())
    std::visit(plan::overloaded{[&](const plan::Linear& op) { id = op.y; },
                                [&](const plan::NormLinear& op) { id = op.y; }, [](const auto&) {}},
               plan.ops.back());
  return id;
}

size_t output_bytes(const plan::Plan& plan) {
  const auto outputs = static_cast<size_t>(std::max(plan.shape.outputs, 1));
  if (plan.shape.ending == plan::Ending::logits) return outputs * static_cast<size_t>(plan.dims.vocab) * 4;
  if (plan.shape.ending == plan::Ending::candidates)
    return outputs * (2 * static_cast<size_t>(plan.options.n_candidates) + 1) * 4;
  return outputs * sizeof(TokenReport);
}

bool chooses_tokens(const plan::Plan& plan) {
  return !plan.ops.empty() && (std::holds_alternative<plan::GreedyToken>(plan.ops.back()) ||
                               std::holds_alternative<plan::SampleToken>(plan.ops.back()));
}

// How long the host polls between two questions whether the device still works.
constexpr std::chrono::milliseconds kPollTime{20};

}  // namespace

CudaProgram::CudaProgram(plan::Plan plan, const Weights& weights, const Memory& memory, const Stream& stream,
                         int n_sms, bool has_wgmma)
    : plan_(std::move(plan)),
      weights_(weights),
      memory_(memory),
      stream_(stream),
      n_sms_(n_sms),
      has_wgmma_(has_wgmma),
      extra_(plan_),
      arena_(static_cast<size_t>(plan_.scratch_bytes) + 256) {
  LILY_CHECK(plan_.policy.activation == plan::FloatType::bf16 &&
                 plan_.policy.residual == plan::FloatType::f32 && kv_form(plan_.policy.kv) == memory.form(),
             "the cuda backend computes with bf16 activations, an fp32 residual, and KV as it was reserved");
  for (auto& slot : slots_) {
    slot = std::make_unique<Slot>(plan_, memory_);
    slot->outputs = PinnedMemory(output_bytes(plan_));
    std::memset(slot->outputs.get(), 0, slot->outputs.n_bytes());  // the serial of no step
  }
}

CudaProgram::~CudaProgram() {
  cudaStreamSynchronize(stream_.get());
  for (const auto& slot : slots_)
    for (const auto& [key, graph] : slot->graphs) cudaGraphExecDestroy(graph);
}

Run CudaProgram::run_of(const Slot& slot, bool alone) const {
  return {plan_,
          weights_,
          memory_,
          slot.step,
          extra_,
          arena_.get(),
          stream_.get(),
          n_sms_,
          has_wgmma_,
          alone,
          slot.reports && !alone ? slot.outputs.get<TokenReport>() : nullptr};
}

void CudaProgram::launch(Slot& slot) {
  const Run run = run_of(slot, false);
  const int n_ops = static_cast<int>(plan_.ops.size());
  if (plan_.shape.phase != plan::Phase::decode || !run.decode_rows() || plan_.options.keep_values) {
    launch_ops(run, 0, n_ops);
    check(cudaGetLastError(), "launching a step");
    return;
  }
  cudaGraphExec_t& graph = slot.graphs[{slot.step.n_rows(), slot.step.n_outputs(), slot.step.n_tokens()}];
  if (graph == nullptr) {
    cudaGraph_t captured = nullptr;
    check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "capturing a step");
    try {
      launch_ops(run, 0, n_ops);
    } catch (...) {
      cudaStreamEndCapture(stream_.get(), &captured);
      if (captured != nullptr) cudaGraphDestroy(captured);
      throw;
    }
    check(cudaStreamEndCapture(stream_.get(), &captured), "capturing a step");
    if (!plan_.policy.concurrent) remove_overlap(captured);
    const cudaError_t status = cudaGraphInstantiate(&graph, captured, 0);
    cudaGraphDestroy(captured);
    check(status, "making a graph of a step");
  }
  check(cudaGraphLaunch(graph, stream_.get()), "launching a step");
}

void CudaProgram::submit(const backend::StepInputs& inputs) {
  LILY_CHECK(n_submitted_ - n_waited_ < 2, "two steps are in flight already");
  Slot& slot = *slots_[static_cast<size_t>(n_submitted_ % 2)];
  slot.serial = static_cast<uint32_t>(n_submitted_ + 1);
  // On a stream of its own: the copy happens beside the step before.
  slot.step.fill(inputs, copies_, slot.serial);
  rows_ = slot.step.n_rows();
  outputs_ = slot.step.n_outputs();
  slot.reports = chooses_tokens(plan_) && outputs_ > 0;
  if (plan_.options.keep_values)
    check(cudaMemsetAsync(arena_.get(), 0xff, arena_.n_bytes(), stream_.get()), "poisoning values");
  launch(slot);
  if (!slot.reports) {
    collect(slot);
    slot.done.record(stream_);
  }
  ++n_submitted_;
}

void CudaProgram::collect(Slot& slot) {
  slot.view = {};
  if (plan_.ops.empty() || plan_.shape.ending == plan::Ending::none || slot.step.n_outputs() == 0) return;
  size_t at = 0;
  const auto take = [&](plan::ValueId value, auto& span, int64_t per_output) {
    using T = std::remove_const_t<typename std::remove_reference_t<decltype(span)>::element_type>;
    const size_t n = static_cast<size_t>(slot.step.n_outputs() * per_output);
    T* to = slot.outputs.get<T>(at);
    check(cudaMemcpyAsync(to,
                          arena_.get(static_cast<size_t>(plan_.placement[static_cast<size_t>(value)].offset)),
                          n * sizeof(T), cudaMemcpyDeviceToHost, stream_.get()),
          "copying a step's outputs");
    span = std::span<const T>(to, n);
    at += n * sizeof(T);
  };
  std::visit(plan::overloaded{
                 [&](const plan::TopCandidates& op) {
                   take(op.ids, slot.view.candidate_ids, op.n_candidates);
                   take(op.values, slot.view.candidate_logits, op.n_candidates);
                   take(op.logsumexp, slot.view.logsumexp, 1);
                 },
                 [&](const auto&) {
                   const plan::ValueId logits = logits_value(plan_);
                   if (logits != plan::kNoValue) take(logits, slot.view.logits, plan_.dims.vocab);
                 },
             },
             plan_.ops.back());
}

backend::StepOutputs CudaProgram::wait() {
  LILY_CHECK(n_waited_ < n_submitted_, "no step in flight");
  Slot& slot = *slots_[static_cast<size_t>(n_waited_ % 2)];
  ++n_waited_;
  if (slot.reports) await_reports(slot);
  else slot.done.wait();
  return slot.view;
}

void CudaProgram::await_reports(Slot& slot) const {
  using Clock = std::chrono::steady_clock;
  const TokenReport* const reports = slot.outputs.get<TokenReport>();
  const auto n = static_cast<size_t>(slot.step.n_outputs());
  slot.tokens.clear();
  for (Clock::time_point asked = Clock::now(); slot.tokens.size() < n;) {
    const auto arrived = [&] {
      const TokenReport report = __atomic_load_n(reports + slot.tokens.size(), __ATOMIC_ACQUIRE);
      if (static_cast<uint32_t>(report >> 32) != slot.serial) return false;
      slot.tokens.push_back(static_cast<int32_t>(report & 0xffffffffu));
      return true;
    };
    if (arrived()) continue;
    std::this_thread::yield();
    if (const auto now = Clock::now(); now - asked >= kPollTime) {
      asked = now;
      const cudaError_t status = cudaStreamQuery(stream_.get());
      if (status == cudaErrorNotReady) continue;
      check(status, "waiting for a token");
      // The step has ended: what it reports is there by now.
      if (!arrived()) fail(Fault::device, "CUDA: a step ended without its token");
    }
  }
  slot.view = {.tokens = slot.tokens};
}

std::vector<float> CudaProgram::read(plan::ValueId id) {
  stream_.synchronize();
  const plan::Value& value = plan_.value(id);
  const int64_t rows = value.rows == plan::RowSpace::matrix
                           ? value.n_matrix_rows
                           : plan::rows_in_step(plan_, value.rows, rows_, outputs_);
  const auto n = static_cast<size_t>(rows * value.cols);
  const std::byte* from = arena_.get(static_cast<size_t>(plan_.placement[static_cast<size_t>(id)].offset));
  const auto fetch = [&](auto& to) {
    check(cudaMemcpy(to.data(), from, n * sizeof(to[0]), cudaMemcpyDeviceToHost), "reading a value");
  };
  std::vector<float> result(n);
  if (value.type == plan::Type::f32) {
    fetch(result);
  } else if (value.type == plan::Type::i32) {
    std::vector<int32_t> raw(n);
    fetch(raw);
    std::copy(raw.begin(), raw.end(), result.begin());
  } else {
    std::vector<Bf16> raw(n);
    fetch(raw);
    std::transform(raw.begin(), raw.end(), result.begin(), [](Bf16 x) { return to_float(x); });
  }
  return result;
}

void CudaProgram::write(plan::ValueId id, std::span<const float> data) {
  stream_.synchronize();
  const plan::Value& value = plan_.value(id);
  LILY_CHECK(std::ssize(data) <= plan::rows_bound(plan_, value) * value.cols, "{} values for {}", data.size(),
             value.name);
  std::byte* to = arena_.get(static_cast<size_t>(plan_.placement[static_cast<size_t>(id)].offset));
  const auto store = [&](const auto& from) {
    check(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
          "writing a value");
  };
  if (value.type == plan::Type::f32) store(data);
  else if (value.type == plan::Type::i32) store(std::vector<int32_t>(data.begin(), data.end()));
  else {
    std::vector<Bf16> raw(data.size());
    std::transform(data.begin(), data.end(), raw.begin(), [](float x) { return to_bf16(x); });
    store(raw);
  }
}

void CudaProgram::run_ops(const backend::StepInputs& inputs, int first, int last) {
  LILY_CHECK(n_submitted_ == n_waited_, "a step is in flight");
  Slot& slot = *slots_[static_cast<size_t>(n_submitted_ % 2)];
  slot.step.fill(inputs, stream_, 0);
  rows_ = slot.step.n_rows();
  outputs_ = slot.step.n_outputs();
  const Run run = run_of(slot, true);
  // The rotation's angles are made where a step begins.
  if (first > 0 && std::holds_alternative<plan::Embed>(plan_.ops.front())) {
    const auto& op = std::get<plan::Embed>(plan_.ops.front());
    const std::vector<float> kept = read(op.y);
    launch_ops(run, 0, 1);
    write(op.y, kept);
  }
  launch_ops(run, first, last);
  check(cudaGetLastError(), "launching ops");
  stream_.synchronize();
}

}  // namespace lily::cuda
