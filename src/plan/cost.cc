#include "plan/cost.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "base/error.h"
#include "plan/uses.h"

namespace lily::plan {
namespace {

using model::kConvTaps;
using model::kDeltaHeadDim;
using model::kExpertsPerToken;
using model::kHeadDim;

bool is_routed_expert(Weight weight) {
  return weight == Weight::expert_gate || weight == Weight::expert_up || weight == Weight::expert_down;
}

int64_t weight_bytes(const Plan& plan, WeightId id, const Workload& w) {
  const model::WeightSpec spec = model::weight_spec(plan.dims, id);
  const model::Storage storage = w.storage ? w.storage(id) : model::published_storage(id.weight);
  const int64_t n = spec.n_elements();
  if (id.weight == Weight::embed)
    return model::storage_bytes(std::min<int64_t>(w.rows * spec.shape[1], n), storage);
  if (!is_routed_expert(id.weight)) return model::storage_bytes(n, storage);
  const double share = expected_experts(plan.dims.n_experts, w.rows) / plan.dims.n_experts;
  return static_cast<int64_t>(std::llround(share * static_cast<double>(model::storage_bytes(n, storage))));
}

// Multiplications and additions of y = x W^T for the rows that meet the weight.
int64_t linear_flops(const Plan& plan, WeightId id, int64_t rows) {
  const model::WeightSpec spec = model::weight_spec(plan.dims, id);
  return is_routed_expert(id.weight) ? 2 * rows * kExpertsPerToken * spec.shape[1] * spec.shape[2]
                                     : 2 * rows * spec.n_elements();
}

// Scores and weighted values of `rows` queries at positions position ... : 4 operations a key and dimension.
int64_t attention_flops(const Plan& plan, const Workload& w) {
  const int64_t keys = w.rows * w.position + w.rows * (w.rows + 1) / 2;
  return 4 * kHeadDim * plan.dims.n_q_heads * keys;
}

// Decay, read, update and output of the state: 7 operations an element and token.
int64_t delta_flops(const Plan& plan, int64_t rows) {
  return 7 * rows * plan.dims.n_value_heads * kDeltaHeadDim * kDeltaHeadDim;
}

int64_t conv_flops(const Plan& plan, int64_t rows) {
  return 2 * rows * kConvTaps * plan.dims.conv_channels();
}

int64_t value_rows(const Plan& plan, const Value& value, const Workload& w) {
  if (value.rows == RowSpace::matrix) return value.n_matrix_rows;
  return rows_in_step(plan, value.rows, static_cast<int>(w.rows), static_cast<int>(w.outputs));
}

void add_use(Cost& c, const Plan& plan, const Use& use, const Workload& w) {
  switch (use.resource) {
    case Resource::value: {
      const Value& v = plan.value(use.value);
      const int64_t bytes = value_rows(plan, v, w) * v.cols * type_bytes(v.type);
      c.scratch_bytes += bytes * (use.access == Access::update ? 2 : 1);
      break;
    }
    case Resource::weight:
      c.weight_bytes += weight_bytes(plan, use.weight, w);
      break;
    case Resource::delta_state:
      // The zero state before the first token is not read.
      if (w.position > 0) c.state_read_bytes += plan.dims.delta_state_bytes_per_layer();
      c.state_write_bytes += plan.dims.delta_state_bytes_per_layer();
      break;
    case Resource::conv_state: {
      const int64_t element = plan.policy.activation == FloatType::bf16 ? 2 : 4;
      c.conv_state_bytes += (w.position > 0 ? 2 : 1) * (kConvTaps - 1) * plan.dims.conv_channels() * element;
      break;
    }
    case Resource::kv: {
      const int64_t token = 2 * kv_bytes(plan.policy.kv, plan.dims.kv_width());
      if (use.writes()) c.kv_write_bytes += token * w.rows;
      if (use.reads())
        c.kv_read_bytes += token * w.position;  // this step's own rows are still on chip or in cache
      break;
    }
    case Resource::token_slot:
    case Resource::step:
      break;
  }
}

int64_t flops(const Plan& plan, const Op& op, const Workload& w) {
  const auto rows_of = [&](ValueId id) { return value_rows(plan, plan.value(id), w); };
  const auto linear = [&](const std::vector<WeightId>& weights, int64_t rows) {
    int64_t sum = 0;
    for (const WeightId id : weights) sum += linear_flops(plan, id, rows);
    return sum;
  };
  return std::visit(
      overloaded{
          [&](const Linear& o) { return linear(o.weights, rows_of(o.y)); },
          [&](const NormLinear& o) { return linear(o.weights, rows_of(o.y)); },
          [&](const LinearAdd& o) { return linear_flops(plan, o.weight, w.rows); },
          [&](const NormRouter& o) {
            return linear({{Weight::router, o.layer}, {Weight::shared_gate, o.layer}}, w.rows);
          },
          [&](const ShortConv&) { return conv_flops(plan, w.rows); },
          [&](const DeltaRule&) { return delta_flops(plan, w.rows); },
          [&](const DeltaRuleNorm&) { return delta_flops(plan, w.rows); },
          [&](const DeltaMixer&) { return conv_flops(plan, w.rows) + delta_flops(plan, w.rows); },
          [&](const Attention&) { return attention_flops(plan, w); },
          [&](const GatedAttention&) { return attention_flops(plan, w); },
          [&](const ExpertsLinear& o) { return linear_flops(plan, o.weight, w.rows); },
          [&](const ExpertsGateUp& o) {
            int64_t sum = linear({{Weight::expert_gate, o.layer}, {Weight::expert_up, o.layer}}, w.rows);
            if (o.shared != kNoValue)
              sum += linear({{Weight::shared_gate_proj, o.layer}, {Weight::shared_up_proj, o.layer}}, w.rows);
            return sum;
          },
          [&](const ExpertsDownCombine& o) {
            int64_t sum = linear_flops(plan, {Weight::expert_down, o.layer}, w.rows);
            if (o.shared_down) sum += linear_flops(plan, {Weight::shared_down_proj, o.layer}, w.rows);
            return sum;
          },
          // Norms, gates, softmax and moves: a few operations a value, left out as the roofline's sources do.
          [](const auto&) { return int64_t{0}; },
      },
      op);
}

constexpr std::array kDevices = {
    DeviceRates{"h200", 4550, 790, true, "cuda"},     DeviceRates{"m1", 68, 2.6, false, "metal"},
    DeviceRates{"m1-pro", 200, 5.3, false, "metal"},  DeviceRates{"m1-max", 400, 10.6, false, "metal"},
    DeviceRates{"m1-ultra", 800, 21, false, "metal"}, DeviceRates{"m2", 102, 3.6, false, "metal"},
    DeviceRates{"m2-pro", 205, 6.8, false, "metal"},  DeviceRates{"m2-max", 400, 13.5, false, "metal"},
    DeviceRates{"m2-ultra", 800, 27, false, "metal"}, DeviceRates{"m3", 102, 4.1, false, "metal"},
    DeviceRates{"m3-pro", 154, 7.4, false, "metal"},  DeviceRates{"m3-max", 400, 14, false, "metal"},
    DeviceRates{"m3-ultra", 819, 28, false, "metal"}, DeviceRates{"m4", 120, 4.6, false, "metal"},
    DeviceRates{"m4-pro", 273, 9.2, false, "metal"},  DeviceRates{"m4-max", 546, 18.4, false, "metal"},
    DeviceRates{"m5", 153, 15, false, "metal"},       DeviceRates{"m5-pro", 307, 27, false, "metal"},
    DeviceRates{"m5-max", 614, 56, false, "metal"},
};

}  // namespace

Cost& Cost::operator+=(const Cost& other) {
  weight_bytes += other.weight_bytes;
  state_read_bytes += other.state_read_bytes;
  state_write_bytes += other.state_write_bytes;
  conv_state_bytes += other.conv_state_bytes;
  kv_read_bytes += other.kv_read_bytes;
  kv_write_bytes += other.kv_write_bytes;
  scratch_bytes += other.scratch_bytes;
  flops += other.flops;
  return *this;
}

double expected_experts(int n_experts, int64_t rows) {
  const double miss = 1.0 - static_cast<double>(kExpertsPerToken) / n_experts;
  return n_experts * (1.0 - std::pow(miss, static_cast<double>(rows)));
}

Cost cost(const Plan& plan, const Op& op, const Workload& workload) {
  Cost c;
  for (const Use& use : uses(op)) add_use(c, plan, use, workload);
  c.flops = flops(plan, op, workload);
  return c;
}

Cost cost(const Plan& plan, const Workload& workload) {
  Cost sum;
  for (const Op& op : plan.ops) sum += cost(plan, op, workload);
  return sum;
}

DeviceRates device_rates(const std::string& name) {
  std::string names;
  for (const DeviceRates& device : kDevices) {
    if (name == device.name) return device;
    names += names.empty() ? device.name : std::string(", ") + device.name;
  }
  fail(Fault::user, "no device '{}' is known; choose one of {}", name, names);
}

Roofline roofline(const Cost& cost, int64_t rows, const DeviceRates& device) {
  const double memory_s = static_cast<double>(cost.total_bytes()) / (device.read_gb_s * 1e9);
  const double compute_s = static_cast<double>(cost.flops) / (device.matrix_tflops * 1e12);
  return {static_cast<double>(rows) / std::max(memory_s, compute_s),
          memory_s >= compute_s ? "memory" : "compute"};
}

}  // namespace lily::plan
