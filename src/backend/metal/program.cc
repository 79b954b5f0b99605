#include "backend/metal/program.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "backend/step_checks.h"
#include "base/error.h"
#include "base/half.h"

namespace lily::metal {

using backend::StepInputs;
using backend::StepOutputs;

MetalProgram::MetalProgram(MetalDevice& device, plan::Plan plan)
    : device_(device),
      plan_(std::move(plan)),
      lowered_(lower(plan_, [&](model::WeightId id) { return device.weights().storage(id); })),
      layout_(plan_),
      writer_(plan_, layout_),
      groups_(groups(plan_, lowered_, 0, static_cast<int>(plan_.ops.size()))),
      event_(device.gpu().make_event()) {
  for (const LoweredOp& op : lowered_.ops) {
    std::vector<const Pipeline*>& to = pipelines_.emplace_back();
    for (const Dispatch& d : op.dispatches) {
      const Pipeline& p = device_.pipeline(d.kernel);
      if (p.max_threads_per_threadgroup() < d.threads.count())
        fail(Fault::device,
             "{} needs {} threads a threadgroup and this GPU allows {}; please report the machine", d.kernel,
             d.threads.count(), p.max_threads_per_threadgroup());
      to.push_back(&p);
    }
  }
  const auto scratch_bytes =
      static_cast<size_t>(std::max<int64_t>(256, plan_.scratch_bytes + lowered_.work_bytes));
  if (plan_.options.keep_values)
    own_scratch_ = device_.gpu().make_buffer(scratch_bytes, BufferUse::mutable_data, "values");
  else device_.need_scratch(scratch_bytes);
  for (Flight& f : flights_) {
    f.step = device_.gpu().make_buffer(layout_.bytes(), BufferUse::mutable_data, "step");
    if (lowered_.result_bytes == 0) continue;
    f.results = device_.gpu().make_buffer(static_cast<size_t>(lowered_.result_bytes), BufferUse::mutable_data,
                                          "results");
    f.result_bytes = f.results->contents();
  }
}

// Command buffers wait in their destructors, before the buffers that they use go.
MetalProgram::~MetalProgram() {
  for (Flight& f : flights_) f.command_buffer.reset();
  for (; n_waited_ < n_submitted_; ++n_waited_) device_.step_ends();
}

MetalProgram::Where MetalProgram::where(const Place& place, const Flight& flight) const {
  const auto range = [&](const Buffer& buffer, size_t offset, size_t length) {
    return Where{&buffer, offset, length};
  };
  const auto offset = static_cast<size_t>(place.offset), bytes = static_cast<size_t>(place.bytes);
  const auto part_of = [&](const MemoryPart& part) {
    return Where{part.buffer, part.offset, part.length, part.stride, part.count};
  };
  switch (place.kind) {
    case Place::Kind::scratch:
      return range(scratch(), offset, bytes);
    case Place::Kind::work:
      return range(scratch(), static_cast<size_t>(plan_.scratch_bytes) + offset, bytes);
    case Place::Kind::result:
      return range(*flight.results, offset, bytes);
    case Place::Kind::weight: {
      const Weights::Range& w = device_.weights().range(place.weight);
      return range(*w.buffer, w.offset, static_cast<size_t>(w.layout.bytes));
    }
    case Place::Kind::delta_state:
      return part_of(device_.memory().delta_state(place.layer));
    case Place::Kind::conv_state:
      return part_of(device_.memory().conv_state(place.layer));
    case Place::Kind::k_cache:
      return part_of(device_.memory().k_cache(place.layer));
    case Place::Kind::v_cache:
      return part_of(device_.memory().v_cache(place.layer));
    case Place::Kind::token_slots:
      return range(device_.memory().token_slots(), 0, device_.memory().token_slots().length());
    case Place::Kind::step:
      return range(*flight.step, layout_.offset(place.part), layout_.length(place.part));
  }
  LILY_CHECK(false, "place {}", static_cast<int>(place.kind));
  return {};
}

void MetalProgram::encode(Encoder& encoder, const Dispatch& d, const Pipeline& pipeline,
                          const Flight& flight) {
  encoder.set_pipeline(pipeline);
  accesses_.clear();
  for (const Argument& a : d.arguments) {
    const Where w = where(a.place, flight);
    encoder.set_buffer(a.index, *w.buffer, w.offset);
    accesses_.push_back({w.buffer, w.offset, w.length, a.access, w.stride, w.count});
  }
  if (!d.params.empty()) encoder.set_bytes(kParamsIndex, d.params);
  if (d.is_indirect) {
    const Where w = where(d.indirect, flight);
    accesses_.push_back({w.buffer, w.offset, w.length, Access::Kind::read});
    encoder.dispatch_indirect(*w.buffer, w.offset, d.threads, accesses_);
    return;
  }
  const Size3 grid = grid_of(d, flight.size);
  if (grid.count() > 0) encoder.dispatch_threadgroups(grid, d.threads, accesses_);
}

void MetalProgram::encode(Flight& flight, const std::vector<Group>& run, uint64_t signal) {
  std::unique_ptr<CommandBuffer> commands = device_.gpu().make_command_buffer("step");
  Encoder* encoder = nullptr;
  for (size_t g = 0; g < run.size(); ++g) {
    if (run[g].on_host >= 0) {  // P2's ablation
      if (encoder != nullptr) encoder->end();
      encoder = nullptr;
      commands->commit();
      commands->wait_until_completed(device_.timeout_ms());
      group_experts(std::get<plan::ExpertGroups>(plan_.ops[static_cast<size_t>(run[g].on_host)]), flight);
      commands = device_.gpu().make_command_buffer("step");
      continue;
    }
    if (encoder == nullptr) encoder = &commands->make_encoder();
    else if (!left_out_.contains(static_cast<int>(g))) encoder->memory_barrier();
    for (const Group::Item& item : run[g].items) {
      const auto op = static_cast<size_t>(item.op), i = static_cast<size_t>(item.dispatch);
      const Dispatch& d = lowered_.ops[op].dispatches[i];
      if (d.whole_vocabulary && !flight.size.whole_vocabulary) continue;
      encode(*encoder, d, *pipelines_[op][i], flight);
    }
  }
  if (encoder != nullptr) encoder->end();
  commands->signal(*event_, signal);
  commands->commit();
  flight.command_buffer = std::move(commands);
}

void MetalProgram::check(const StepInputs& inputs) const {
  backend::check_step(inputs, plan_, device_.memory().spec());
  LILY_CHECK(plan_.policy.kv == device_.memory().kv_type(), "the plan's KV type is not the one reserved");
}

void MetalProgram::submit(const StepInputs& inputs) {
  LILY_CHECK(n_submitted_ - n_waited_ < 2, "two steps are in flight already");
  current_ = static_cast<int>(n_submitted_ % 2);
  Flight& flight = flights_[static_cast<size_t>(current_)];
  check(inputs);
  flight.size = writer_.write(inputs, device_.memory(), *flight.step);
  flight.signal = ++n_signalled_;
  encode(flight, groups_, flight.signal);
  ++n_submitted_;
  device_.step_begins();
}

void MetalProgram::finish(Flight& flight, uint64_t signal) {
  const bool is_done = event_->wait(signal, device_.timeout_ms());
  if (!is_done)
    fail(Fault::device, "{}: a step of {} rows has not finished after {} ms; sequences of this step are lost",
         device_.info().name, flight.size.n_rows, device_.timeout_ms());
  if (const auto error = flight.command_buffer->error())
    fail(Fault::device, "{}: a step of {} rows failed: {}; sequences of this step are lost",
         device_.info().name, flight.size.n_rows, *error);
}

StepOutputs MetalProgram::wait() {
  LILY_CHECK(n_waited_ < n_submitted_, "no step in flight");
  Flight& flight = flights_[static_cast<size_t>(n_waited_ % 2)];
  ++n_waited_;
  device_.step_ends();
  finish(flight, flight.signal);
  return outputs(flight);
}

StepOutputs MetalProgram::outputs(const Flight& flight) const {
  StepOutputs out;
  const auto n_outputs = static_cast<size_t>(flight.size.n_outputs);
  const auto span_of = [&]<typename T>(size_t result, T*) {
    const Result& r = lowered_.results[result];
    const auto cols = static_cast<size_t>(plan_.value(r.value).cols);
    return std::span<T>(reinterpret_cast<T*>(flight.result_bytes.data() + r.offset), n_outputs * cols);
  };
  switch (plan_.shape.ending) {
    case plan::Ending::none:
      break;
    case plan::Ending::logits: {
      const std::span<float> logits = span_of(0, static_cast<float*>(nullptr));
      const auto vocab = static_cast<size_t>(plan_.dims.vocab);
      for (size_t o = 0; o < n_outputs; ++o)  // padding rows of the vocabulary
        std::fill(logits.begin() + static_cast<std::ptrdiff_t>(o * vocab + flight.size.n_tokens),
                  logits.begin() + static_cast<std::ptrdiff_t>((o + 1) * vocab),
                  -std::numeric_limits<float>::infinity());
      out.logits = logits;
      break;
    }
    case plan::Ending::greedy:
    case plan::Ending::sampled:
      out.tokens = span_of(0, static_cast<int32_t*>(nullptr));
      break;
    case plan::Ending::candidates:
      out.candidate_ids = span_of(0, static_cast<int32_t*>(nullptr));
      out.candidate_logits = span_of(1, static_cast<float*>(nullptr));
      out.logsumexp = span_of(2, static_cast<float*>(nullptr));
      break;
  }
  return out;
}

// ---- Values, for tests

std::vector<float> MetalProgram::read(plan::ValueId id) {
  LILY_CHECK(plan_.options.keep_values && n_waited_ == n_submitted_, "values are kept only on request");
  const Flight& flight = flights_[static_cast<size_t>(current_)];
  const plan::Value& v = plan_.value(id);
  const int64_t rows = v.rows == plan::RowSpace::matrix
                           ? v.n_matrix_rows
                           : plan::rows_in_step(plan_, v.rows, static_cast<int>(flight.size.n_rows),
                                                static_cast<int>(flight.size.n_outputs));
  const auto n = static_cast<size_t>(rows * v.cols);
  const Where w = where(place_of(plan_, lowered_, id), flight);
  std::vector<std::byte> bytes(n * static_cast<size_t>(plan::type_bytes(v.type)));
  w.buffer->read(w.offset, bytes);
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) {
    if (v.type == plan::Type::f32) values[i] = reinterpret_cast<const float*>(bytes.data())[i];
    else if (v.type == plan::Type::bf16) values[i] = to_float(reinterpret_cast<const Bf16*>(bytes.data())[i]);
    else values[i] = static_cast<float>(reinterpret_cast<const int32_t*>(bytes.data())[i]);
  }
  return values;
}

void MetalProgram::write(plan::ValueId id, std::span<const float> data) {
  LILY_CHECK(plan_.options.keep_values && n_waited_ == n_submitted_, "values are kept only on request");
  const plan::Value& v = plan_.value(id);
  std::vector<std::byte> bytes(data.size() * static_cast<size_t>(plan::type_bytes(v.type)));
  for (size_t i = 0; i < data.size(); ++i) {
    if (v.type == plan::Type::f32) reinterpret_cast<float*>(bytes.data())[i] = data[i];
    else if (v.type == plan::Type::bf16) reinterpret_cast<Bf16*>(bytes.data())[i] = to_bf16(data[i]);
    else reinterpret_cast<int32_t*>(bytes.data())[i] = static_cast<int32_t>(data[i]);
  }
  const Where w = where(place_of(plan_, lowered_, id), flights_[static_cast<size_t>(current_)]);
  LILY_CHECK(bytes.size() <= w.length, "{} values for {}", data.size(), v.name);
  const_cast<Buffer*>(w.buffer)->write(w.offset, bytes);
}

void MetalProgram::run_ops(const StepInputs& inputs, int first, int last) {
  LILY_CHECK(n_waited_ == n_submitted_, "a step is in flight");
  Flight& flight = flights_[static_cast<size_t>(current_)];
  check(inputs);
  flight.size = writer_.write(inputs, device_.memory(), *flight.step);
  encode(flight, groups(plan_, lowered_, first, last), ++n_signalled_);
  finish(flight, n_signalled_);
}

// The CPU's version of count_assignments and group_assignments (kernels/router.metal).
void MetalProgram::group_experts(const plan::ExpertGroups& op, const Flight& flight) {
  const auto read_value = [&](plan::ValueId id, size_t n) {
    std::vector<int32_t> values(n);
    const Where w = where(place_of(plan_, lowered_, id), flight);
    w.buffer->read(w.offset, std::as_writable_bytes(std::span(values)));
    return values;
  };
  const auto write_value = [&](plan::ValueId id, const std::vector<int32_t>& values) {
    const Where w = where(place_of(plan_, lowered_, id), flight);
    const_cast<Buffer*>(w.buffer)->write(w.offset, std::as_bytes(std::span(values)));
  };
  const auto n_experts = static_cast<size_t>(plan_.dims.n_experts);
  const size_t n = size_t{flight.size.n_rows} * model::kExpertsPerToken;
  const std::vector<int32_t> ids = read_value(op.ids, n);
  std::vector<int32_t> offsets(n_experts + 1, 0);
  for (const int32_t e : ids) ++offsets[static_cast<size_t>(e) + 1];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  std::vector<int32_t> next(offsets.begin(), offsets.end() - 1), order(n), position(n), blocks;
  for (size_t a = 0; a < n; ++a) {
    const int32_t at = next[static_cast<size_t>(ids[a])]++;
    order[static_cast<size_t>(at)] = static_cast<int32_t>(a);
    position[a] = at;
  }
  const auto load = [&](size_t e) { return offsets[e + 1] - offsets[e]; };
  std::vector<size_t> heavy_first(n_experts);
  std::iota(heavy_first.begin(), heavy_first.end(), size_t{0});
  std::stable_sort(heavy_first.begin(), heavy_first.end(),
                   [&](size_t a, size_t b) { return load(a) > load(b); });
  for (const size_t e : heavy_first) {
    const int32_t tile = load(e) >= op.tile.large_from ? op.tile.large : op.tile.small;
    for (int32_t first = 0; first < load(e); first += tile)
      for (const int32_t v :
           {static_cast<int32_t>(e), offsets[e] + first, std::min(tile, load(e) - first), 0})
        blocks.push_back(v);
  }
  write_value(op.offsets, offsets);
  write_value(op.order, order);
  write_value(op.position, position);
  write_value(op.blocks, blocks);
  write_value(op.n_blocks, {static_cast<int32_t>(blocks.size() / 4), 1, 1, 0});
}

}  // namespace lily::metal
