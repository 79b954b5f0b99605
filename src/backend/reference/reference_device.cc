// Device and Program of the reference backend: everything happens inside submit().
#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

#include "backend/reference/machine.h"
#include "backend/step_checks.h"
#include "base/error.h"
#include "base/trace.h"
#include "model/checkpoint.h"
#include "plan/print.h"

namespace lily::backend {
namespace reference {

void run_op(const Machine& m, const plan::Op& op) {
  std::visit(
      [&](const auto& o) {
        if constexpr (requires { run(m, o); }) run(m, o);
        else LILY_CHECK(false, "fused op {} in an expanded plan", plan::kind_name(op));
      },
      op);
}

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Step make_step(const plan::Plan& plan, const MemorySpec& memory, const StepInputs& in) {
  check_step(in, plan, memory);
  Step step{.tokens = {in.tokens.begin(), in.tokens.end()},
            .segments = {in.segments.begin(), in.segments.end()},
            .block_table = {in.block_table.begin(), in.block_table.end()},
            .output_rows = {in.output_rows.begin(), in.output_rows.end()},
            .sampling = {in.sampling.begin(), in.sampling.end()},
            .n_tokens = in.n_tokens};
  for (size_t i = 0; i < step.segments.size(); ++i) {
    const Segment& s = step.segments[i];
    for (int r = 0; r < s.n_rows; ++r) {
      step.segment_of_row.push_back(static_cast<int>(i));
      step.position_of_row.push_back(s.position + r);
    }
  }
  return step;
}

class ReferenceProgram final : public Program {
 public:
  ReferenceProgram(plan::Plan plan, const model::WeightStore& weights, Memory& memory, ThreadPool& pool,
                   Trace* trace)
      : plan_(std::move(plan)),
        simple_(plan::expanded(plan_)),
        weights_(weights),
        memory_(memory),
        pool_(pool),
        trace_(trace) {
    for (const plan::Value& value : simple_.values) {
      Tensor tensor{.n_rows = plan::rows_bound(simple_, value), .n_cols = value.cols};
      if (value.rows == plan::RowSpace::matrix) tensor.n_rows = 0;  // see ExpandWeight
      const auto size = static_cast<size_t>(tensor.n_rows * tensor.n_cols);
      if (value.type == plan::Type::i32) tensor.i.assign(size, -1);
      else tensor.f.assign(size, kNan);
      values_.push_back(std::move(tensor));
    }
  }

  const plan::Plan& plan() const override { return plan_; }

  void submit(const StepInputs& inputs) override {
    LILY_CHECK(done_.size() < 2, "two steps are in flight already");
    step_ = make_step(plan_, memory_.spec(), inputs);
    for (Tensor& tensor : values_) {  // what a step does not write, it must not read
      std::fill(tensor.f.begin(), tensor.f.end(), kNan);
      std::fill(tensor.i.begin(), tensor.i.end(), -1);
    }
    run_simple(simple_.ops);
    done_.push_back(collect());
  }

  StepOutputs wait() override {
    LILY_CHECK(!done_.empty(), "no step in flight");
    current_ = std::exchange(current_index_, 1 - current_index_) == 0 ? &first_ : &second_;
    *current_ = std::move(done_.front());
    done_.pop_front();
    return {.logits = current_->logits,
            .tokens = current_->tokens,
            .candidate_ids = current_->candidate_ids,
            .candidate_logits = current_->candidate_logits,
            .logsumexp = current_->logsumexp};
  }

  std::vector<float> read(plan::ValueId id) override {
    const Tensor& tensor = values_.at(static_cast<size_t>(id));
    const plan::Value& value = plan_.value(id);
    const auto n = static_cast<size_t>(
        plan::rows_in_step(plan_, value.rows, step_.n_rows(), step_.n_outputs()) * value.cols);
    if (value.type == plan::Type::i32)
      return {tensor.i.begin(), tensor.i.begin() + static_cast<std::ptrdiff_t>(n)};
    return {tensor.f.begin(), tensor.f.begin() + static_cast<std::ptrdiff_t>(n)};
  }

  void write(plan::ValueId id, std::span<const float> data) override {
    Tensor& tensor = values_.at(static_cast<size_t>(id));
    if (plan_.value(id).type == plan::Type::i32) {
      LILY_CHECK(data.size() <= tensor.i.size());
      for (size_t j = 0; j < data.size(); ++j) tensor.i[j] = static_cast<int32_t>(data[j]);
    } else {
      LILY_CHECK(data.size() <= tensor.f.size());
      std::copy(data.begin(), data.end(), tensor.f.begin());
    }
  }

  void run_ops(const StepInputs& inputs, int first, int last) override {
    step_ = make_step(plan_, memory_.spec(), inputs);
    plan::Plan part = plan_;
    part.ops.assign(plan_.ops.begin() + first, plan_.ops.begin() + last);
    // Temporaries of an expansion are numbered from the end of the plan's values, as in simple_.
    part = plan::expanded(part);
    const std::vector<Tensor> whole = values_;
    values_.resize(plan_.values.size());
    for (size_t v = values_.size(); v < part.values.size(); ++v) {
      const plan::Value& value = part.values[v];
      const int64_t rows = plan::rows_bound(part, value);
      values_.push_back({.n_rows = rows,
                         .n_cols = value.cols,
                         .f = std::vector<float>(static_cast<size_t>(rows * value.cols), kNan)});
    }
    const Machine machine{part, weights_, memory_, values_, step_, pool_};
    for (const plan::Op& op : part.ops) run_op(machine, op);
    values_.resize(plan_.values.size());
    values_.insert(values_.end(), whole.begin() + static_cast<std::ptrdiff_t>(plan_.values.size()),
                   whole.end());
  }

 private:
  struct Outputs {
    std::vector<float> logits, candidate_logits, logsumexp;
    std::vector<int32_t> tokens, candidate_ids;
  };

  void run_simple(const std::vector<plan::Op>& ops) {
    const Machine machine{simple_, weights_, memory_, values_, step_, pool_};
    for (const plan::Op& op : ops) {
      const auto begin = Trace::Clock::now();
      run_op(machine, op);
      if (trace_ != nullptr) trace_->add(Trace::Track::ops, plan::label(op), begin, Trace::Clock::now());
    }
  }

  Outputs collect() {
    Outputs out;
    const auto n_outputs = static_cast<size_t>(step_.n_outputs());
    const auto take = [&](const auto& from) {
      using Vector = std::decay_t<decltype(from)>;
      return Vector(from.begin(),
                    from.begin() + static_cast<std::ptrdiff_t>(
                                       from.size() / static_cast<size_t>(plan_.shape.outputs) * n_outputs));
    };
    if (plan_.ops.empty()) return out;
    std::visit(plan::overloaded{
                   [&](const plan::GreedyToken& op) { out.tokens = take(tensor(op.token).i); },
                   [&](const plan::SampleToken& op) { out.tokens = take(tensor(op.token).i); },
                   [&](const plan::TopCandidates& op) {
                     out.candidate_ids = take(tensor(op.ids).i);
                     out.candidate_logits = take(tensor(op.values).f);
                     out.logsumexp = take(tensor(op.logsumexp).f);
                   },
                   [&](const plan::Linear& op) { out.logits = masked(op.y); },
                   [&](const plan::NormLinear& op) { out.logits = masked(op.y); },
                   [](const auto&) {},
               },
               plan_.ops.back());
    return out;
  }

  std::vector<float> masked(plan::ValueId logits) {
    if (plan_.shape.ending != plan::Ending::logits) return {};
    std::vector<float> rows;
    for (int o = 0; o < step_.n_outputs(); ++o) {
      const auto row = values_[static_cast<size_t>(logits)].row(o);
      rows.insert(rows.end(), row.begin(), row.end());
      std::fill(rows.end() - (plan_.dims.vocab - step_.n_tokens), rows.end(),
                -std::numeric_limits<float>::infinity());
    }
    return rows;
  }

  const Tensor& tensor(plan::ValueId id) const { return values_[static_cast<size_t>(id)]; }

  const plan::Plan plan_, simple_;
  const model::WeightStore& weights_;
  Memory& memory_;
  ThreadPool& pool_;
  Trace* const trace_;
  std::vector<Tensor> values_;
  Step step_;
  std::deque<Outputs> done_;
  Outputs first_, second_;
  Outputs* current_ = nullptr;
  int current_index_ = 0;
};

class ReferenceDevice final : public Device {
 public:
  explicit ReferenceDevice(const DeviceOptions& options)
      : pool_(options.threads > 0 ? options.threads : physical_cores()),
        trace_(options.trace),
        info_{.backend = "reference", .name = fmt::format("scalar, {} threads", pool_.n_threads())} {}

  const DeviceInfo& info() const override { return info_; }

  plan::Policy policy(const model::Dims&) const override {
    plan::Policy p;
    p.kv = plan::KvType::f32;
    p.kv_types.reset();
    for (const plan::KvType type : {plan::KvType::f32, plan::KvType::int8})
      p.kv_types.set(static_cast<size_t>(type));
    p.max_chunk_rows = 512;
    return p;
  }

  void load(const model::Checkpoint& checkpoint, const Progress& progress) override {
    dims_ = checkpoint.dims();
    std::vector<model::WeightId> all;
    for (const model::WeightSpec& spec : model::catalogue(checkpoint.dims())) all.push_back(spec.id);
    weights_ = model::WeightStore::load(checkpoint, all, pool_, progress);
  }

  void reserve(const MemorySpec& spec, const plan::Policy& policy) override {
    memory_.reserve(dims_, spec, policy.kv);
  }

  std::unique_ptr<Program> compile(plan::Plan plan) override {
    LILY_CHECK(weights_.has_value(), "compile before load");
    return std::make_unique<ReferenceProgram>(std::move(plan), *weights_, memory_, pool_, trace_);
  }

  SharedPlaces shared_places(const model::Dims& dims, const plan::Policy& policy) const override {
    const size_t block = Memory::block_bytes(dims, policy.kv), state = Memory::state_bytes(dims);
    if (block == 0) return {};
    return {.blocks_per_state = static_cast<int>((state + block - 1) / block)};
  }

  void copy_state(StateSlot src, StateSlot dst) override { memory_.copy_state(src, dst); }
  std::vector<float> read_delta_state(StateSlot slot, int layer) override {
    return memory_.delta(slot, layer);
  }
  void write_delta_state(StateSlot slot, int layer, std::span<const float> data) override {
    memory_.write_delta(slot, layer, data);
  }
  std::vector<float> read_conv_state(StateSlot slot, int layer) override { return memory_.conv(slot, layer); }
  void write_conv_state(StateSlot slot, int layer, std::span<const float> data) override {
    memory_.write_conv(slot, layer, data);
  }
  std::vector<float> read_kv(Kv which, int layer, int block, int n_tokens) override {
    std::vector<float> data(static_cast<size_t>(n_tokens * dims_.kv_width()));
    kv(which, layer, block).read(0, data);
    return data;
  }
  void write_kv(Kv which, int layer, int block, int n_tokens, std::span<const float> data) override {
    LILY_CHECK(data.size() == static_cast<size_t>(n_tokens * dims_.kv_width()));
    KvRows rows = kv(which, layer, block);
    rows.clear();
    rows.write(0, data);
  }

 private:
  KvRows kv(Kv which, int layer, int block) {
    return which == Kv::k ? memory_.k_rows(block, layer) : memory_.v_rows(block, layer);
  }

  ThreadPool pool_;
  Trace* const trace_;
  DeviceInfo info_;
  model::Dims dims_;
  std::optional<model::WeightStore> weights_;
  Memory memory_;
};

}  // namespace
}  // namespace reference

std::unique_ptr<Device> make_reference_device(const DeviceOptions& options) {
  return std::make_unique<reference::ReferenceDevice>(options);
}

bool reference_device_present() { return true; }

}  // namespace lily::backend
