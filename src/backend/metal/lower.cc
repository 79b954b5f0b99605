#include "backend/metal/lower.h"

#include <algorithm>

#include "backend/metal/lowering.h"
#include "base/error.h"

namespace lily::metal {
namespace {

using plan::FloatType;

void check_policy(const plan::Policy& p) {
  if (p.activation != FloatType::bf16)
    fail(Fault::user, "policy.activation: the Metal backend keeps activations in bf16, not fp32");
  if (p.residual != FloatType::f32)
    fail(Fault::user, "policy.residual: the Metal backend keeps the residual in fp32, not bf16");
  check_kv_type(p);
  if (p.tile.large > static_cast<int>(kernels::kMaxTileRows) || p.tile.small > p.tile.large ||
      p.tile.small < 1)
    fail(Fault::user, "policy.tile: {} and {} rows; the Metal backend has tiles of at most {}", p.tile.small,
         p.tile.large, kernels::kMaxTileRows);
}

// Values that the step leaves for the host: what the last op writes.
std::vector<Result> results_of(const plan::Plan& plan) {
  std::vector<plan::ValueId> ids;
  if (plan.ops.empty()) return {};
  const auto logits_of = [&](const auto& op) {
    if (plan.shape.ending == plan::Ending::logits) ids = {op.y};
  };
  std::visit(plan::overloaded{
                 [&](const plan::GreedyToken& op) { ids = {op.token}; },
                 [&](const plan::SampleToken& op) { ids = {op.token}; },
                 [&](const plan::TopCandidates& op) { ids = {op.ids, op.values, op.logsumexp}; },
                 [&](const plan::Linear& op) { logits_of(op); },
                 [&](const plan::NormLinear& op) { logits_of(op); },
                 [](const auto&) {},
             },
             plan.ops.back());
  std::vector<Result> results;
  int64_t offset = 0;
  for (const plan::ValueId id : ids) {
    const plan::Value& v = plan.value(id);
    const int64_t bytes = rows_bound(plan, v) * v.cols * plan::type_bytes(v.type);
    results.push_back({id, offset, bytes});
    offset += (bytes + 255) / 256 * 256;
  }
  return results;
}

}  // namespace

void check_kv_type(const plan::Policy& policy) {
  if (policy.kv != plan::KvType::bf16 && policy.kv != plan::KvType::int8)
    fail(Fault::user, "policy.kv: the Metal backend keeps keys and values in bf16 or int8, not {}",
         plan::name(policy.kv));
}

Place place_of(const plan::Plan& plan, const Lowered& lowered, plan::ValueId value) {
  const plan::Value& v = plan.value(value);
  const int64_t bytes = rows_bound(plan, v) * v.cols * plan::type_bytes(v.type);
  for (const Result& r : lowered.results)
    if (r.value == value) return {.kind = Place::Kind::result, .offset = r.offset, .bytes = bytes};
  return {.kind = Place::Kind::scratch,
          .offset = plan.placement[static_cast<size_t>(value)].offset,
          .bytes = bytes};
}

Lowered lower(const plan::Plan& plan, const StorageOf& storage) {
  check_policy(plan.policy);
  Lowered lowered;
  lowered.results = results_of(plan);
  for (const Result& r : lowered.results)
    lowered.result_bytes = std::max(lowered.result_bytes, (r.offset + r.bytes + 255) / 256 * 256);
  int stage = -1;
  Lowering lowering(
      plan, lowered,
      storage ? storage : [](model::WeightId id) { return model::published_storage(id.weight); });
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (plan.stage[i] != stage) {
      stage = plan.stage[i];
      lowering.begin_stage();  // work memory is free again: a barrier lies between
    }
    lowered.ops.push_back(lowering.op(plan.ops[i]));
  }
  lowered.work_bytes = lowering.work_bytes();
  return lowered;
}

std::vector<Group> groups(const plan::Plan& plan, const Lowered& lowered, int first, int last) {
  std::vector<Group> result;
  for (int begin = first; begin < last;) {
    int end = begin;
    int n_phases = 1;
    while (end < last && plan.stage[static_cast<size_t>(end)] == plan.stage[static_cast<size_t>(begin)]) {
      n_phases = std::max(n_phases, lowered.ops[static_cast<size_t>(end)].n_phases);
      ++end;
    }
    for (int phase = 0; phase < n_phases; ++phase) {
      Group group;
      for (int op = begin; op < end; ++op) {
        const LoweredOp& l = lowered.ops[static_cast<size_t>(op)];
        for (size_t d = 0; d < l.dispatches.size(); ++d)
          if (l.dispatches[d].phase == phase) group.items.push_back({op, static_cast<int>(d)});
      }
      if (!group.items.empty()) result.push_back(std::move(group));
    }
    // The CPU's part last: the rest of its stage is submitted by then.
    for (int op = begin; op < end; ++op)
      if (lowered.ops[static_cast<size_t>(op)].on_host) result.push_back({.items = {}, .on_host = op});
    begin = end;
  }
  return result;
}

Counts dispatches(const plan::Plan& plan, const StorageOf& storage) {
  const Lowered lowered = lower(plan, storage);
  Counts counts;
  bool after_encoder = true;
  for (const Group& group : groups(plan, lowered, 0, static_cast<int>(plan.ops.size()))) {
    ++counts.stages;
    if (group.on_host >= 0) {
      after_encoder = true;
      continue;
    }
    for (const Group::Item& item : group.items)
      if (!lowered.ops[static_cast<size_t>(item.op)]
               .dispatches[static_cast<size_t>(item.dispatch)]
               .whole_vocabulary)
        ++counts.launches;
    if (!after_encoder) ++counts.barriers;
    after_encoder = false;
  }
  return counts;
}

plan::Policy default_policy() {
  plan::Policy p;
  p.activation = FloatType::bf16;
  p.residual = FloatType::f32;
  p.kv = plan::KvType::bf16;
  p.kv_types.set(static_cast<size_t>(plan::KvType::int8));
  p.prefill = {.linear_add = true, .gate_up = true, .qk_prepare = true, .attention_gate = true};
  p.decode = {.norm_linear = true,
              .linear_add = true,
              .norm_router = true,
              .router_in_experts = true,
              .gate_up = true,
              .shared_in_experts = true,
              .down_combine = true,
              .qk_prepare = true,
              .delta_norm = true,
              .delta_mixer = true,
              .attention_gate = true,
              .qk_in_attention = true};
  p.matrix_unit = plan::MatrixUnit::simdgroup;
  p.tokens_stay_on_device = true;
  p.mechanisms.set();
  return p;
}

}  // namespace lily::metal
