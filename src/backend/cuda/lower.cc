#include "backend/cuda/lower.h"

#include <algorithm>
#include <variant>

#include "backend/cuda/kernels/attention_ablation.h"
#include "backend/cuda/kernels/tokens.h"
#include "backend/cuda/prefill_delta.h"
#include "backend/cuda/prefill_routing.h"
#include "base/error.h"

namespace lily::cuda {
namespace {

template <typename T>
const T* op_at(const plan::Plan& plan, int i) {
  if (i < 0 || i >= static_cast<int>(plan.ops.size())) return nullptr;
  return std::get_if<T>(&plan.ops[static_cast<size_t>(i)]);
}

// The router in front of an expert op, whose logits let the kernels choose the experts themselves.
const plan::NormRouter* router_before(const Run& run, int i, int distance, plan::ValueId ids) {
  if (run.exact_values() || run.gemm()) return nullptr;
  const auto* router = op_at<plan::NormRouter>(run.plan, i - distance);
  return router != nullptr && router->ids == ids ? router : nullptr;
}

// The one row of a step needs no gathering: the head reads it where it is.
const plan::GatherRows* gather_of_one_row(const Run& run, int i) {
  if (run.exact_values() || !run.plan.policy.row_parallel_gemv || run.step.n_rows() != 1 ||
      run.step.n_outputs() != 1)
    return nullptr;
  const auto* gather = op_at<plan::GatherRows>(run.plan, i);
  const auto* head = op_at<plan::NormLinear>(run.plan, i + 1);
  return gather != nullptr && head != nullptr && head->x == gather->y ? gather : nullptr;
}

void embed(const Run& run, const plan::Embed& op) {
  const DeviceWeight& w = run.weights.get({model::Weight::embed, model::kNoLayer});
  EmbedRows p;
  p.codes = reinterpret_cast<const uint32_t*>(w.codes);
  p.scales = w.scales;
  p.biases = w.biases;
  p.rope_frequency = run.weights.rope_frequency();
  p.hidden = run.plan.dims.hidden;
  p.vocab = run.plan.dims.vocab;
  p.rows = run.step.n_rows();
  p.step = run.step.view();
  p.y = run.data<void>(op.y);
  p.y_f32 = run.is_f32(op.y);
  launch_embed_rows(p, run.stream);
}

void gather(const Run& run, const plan::GatherRows& op) {
  if (run.step.n_outputs() == 0) return;
  GatherRows p;
  p.x = run.data<void>(op.x);
  p.y = run.data<void>(op.y);
  p.row_bytes = static_cast<int>(run.stride(op.x)) * type_bytes(run.plan.value(op.x).type);
  p.outputs = run.step.n_outputs();
  p.step = run.step.view();
  launch_gather_rows(p, run.stream);
}

// Launches op i; returns how many ops that did.
int launch_op(const Run& run, int i) {
  const bool chunk = run.chunk(), gemm = run.gemm();
  const auto refused = [](const char* kind) {
    fail(Fault::user,
         "the cuda backend has no kernel for '{}' on its own; use its default policy, or --backend cpu",
         kind);
  };
  return std::visit(
      plan::overloaded{
          [&](const plan::Embed& op) { return embed(run, op), 1; },
          [&](const plan::GatherRows& op) {
            if (gather_of_one_row(run, i) == nullptr) gather(run, op);
            return 1;
          },
          [&](const plan::NormLinear& op) {
            const int rows = run.rows_of(op.x);
            if (rows == 0) return 1;
            const bool head = op.weights.front().weight == model::Weight::lm_head;
            if (gemm && !head) return norm_linear_chunk(run, op), 1;
            if (head && !run.plan.policy.row_parallel_gemv && !run.exact_values())
              return head_chunk(run, op), 1;
            const auto* gather = gather_of_one_row(run, i - 1);
            const plan::ValueId from = gather != nullptr ? gather->x : op.x;
            const LinearSource x{run.data<void>(from), run.stride(from), run.is_f32(from),
                                 run.weights.get(op.norm).vector};
            return linear_rows(run, x, op.weights, op.y, rows), 1;
          },
          [&](const plan::LinearAdd& op) {
            return gemm ? linear_add_chunk(run, op) : linear_add_rows(run, op), 1;
          },
          [&](const plan::DeltaMixer& op) {
            if (chunk) return delta_chunk(run, op), 1;
            return run.step.one_row_each() ? delta_rows(run, op) : unfused_delta_mixer(run, op), 1;
          },
          [&](const plan::QkPrepare& op) {
            if (chunk) return qk_prepare_chunk(run, op), 1;
            const auto* attention = op_at<plan::GatedAttention>(run.plan, i + 1);
            if (attention != nullptr && attention->q == op.q && !run.exact_values())
              return (attention_is_ablated(run, *attention) ? attention_ablation_rows : attention_rows)(
                         run, *attention, &op),
                     2;
            return qk_prepare_rows(run, op), 1;
          },
          [&](const plan::GatedAttention& op) {
            if (chunk) return attention_chunk(run, op), 1;
            return (attention_is_ablated(run, op) ? attention_ablation_rows : attention_rows)(run, op,
                                                                                              nullptr),
                   1;
          },
          [&](const plan::NormRouter& op) {
            if (gemm) return router_chunk(run, op), 1;
            const auto* next = op_at<plan::ExpertsGateUp>(run.plan, i + 1);
            return router_rows(run, op,
                               next == nullptr || router_before(run, i + 1, 1, next->routing.ids) == nullptr),
                   1;
          },
          [&](const plan::ExpertsGateUp& op) {
            return gemm ? gate_up_chunk(run, op)
                        : gate_up_rows(run, op, router_before(run, i, 1, op.routing.ids)),
                   1;
          },
          [&](const plan::ExpertsDownCombine& op) {
            return gemm ? down_chunk(run, op) : down_rows(run, op, router_before(run, i, 2, op.routing.ids)),
                   1;
          },
          [&](const plan::GreedyToken& op) { return choose_token(run, op.logits, op.token, false), 1; },
          [&](const plan::SampleToken& op) { return choose_token(run, op.logits, op.token, true), 1; },
          [&](const plan::TopCandidates& op) { return choose_candidates(run, op), 1; },
          [&](const plan::Linear& op) { return unfused(run, op), 1; },
          [&](const plan::SwiGlu& op) { return unfused(run, op), 1; },
          [&](const plan::ExpertsLinear& op) { return unfused(run, op), 1; },
          [&](const plan::ExpertsCombine& op) { return unfused(run, op), 1; },
          [&](const plan::ShortConv& op) { return unfused(run, op), 1; },
          [&](const plan::DeltaPrepare& op) { return unfused(run, op), 1; },
          [&](const plan::DeltaRule& op) { return unfused(run, op), 1; },
          [&](const plan::GatedNorm& op) { return unfused(run, op), 1; },
          [&](const plan::HeadNormRope& op) { return unfused(run, op), 1; },
          [&](const plan::KvAppend& op) { return unfused(run, op), 1; },
          [&](const auto&) { return refused(plan::kind_name(run.plan.ops[static_cast<size_t>(i)])), 1; },
      },
      run.plan.ops[static_cast<size_t>(i)]);
}

}  // namespace

Extra::Extra(const plan::Plan& plan) {
  const model::Dims& d = plan.dims;
  const auto rows = static_cast<size_t>(plan.shape.rows),
             outputs = static_cast<size_t>(std::max(plan.shape.outputs, 1));
  const int attention_rows = std::min(plan.shape.rows, kAttentionRows);
  attention_partial =
      DeviceMemory(std::max(attention_partial_floats(attention_rows, d.n_q_heads),
                            attention_ablation_partial_floats(std::min(plan.shape.rows, 8), d.n_q_heads)) *
                   4);
  attention_counters = DeviceMemory(static_cast<size_t>(attention_rows * d.n_q_heads) * 4);
  check(cudaMemset(attention_counters.get(), 0, attention_counters.n_bytes()), "clearing counters");
  if (plan.shape.ending != plan::Ending::none && plan.shape.ending != plan::Ending::logits) {
    chunk_max = DeviceMemory(outputs * kChunks * 4);
    chunk_id = DeviceMemory(outputs * kChunks * 4);
    chunk_sum = DeviceMemory(outputs * kChunks * 4);
    if (plan.shape.ending == plan::Ending::sampled)
      sample_weights = DeviceMemory(outputs * static_cast<size_t>(d.vocab) * 8);
  }
  if (plan.options.keep_values) {
    const auto keys = static_cast<size_t>(d.key_width()), heads = static_cast<size_t>(d.n_value_heads);
    mixed = DeviceMemory(rows * static_cast<size_t>(d.conv_channels()) * 2);
    delta_q = DeviceMemory(rows * keys * 4);
    delta_k = DeviceMemory(rows * keys * 4);
    delta_g = DeviceMemory(rows * heads * 4);
    delta_beta = DeviceMemory(rows * heads * 4);
    delta_o = DeviceMemory(rows * static_cast<size_t>(d.value_width()) * 4);
  }
  if (plan.shape.phase == plan::Phase::decode && plan.policy.row_parallel_gemv) return;
  const auto hidden = static_cast<size_t>(d.hidden), listed = 9 * rows;
  normed = DeviceMemory(rows * hidden * 2);
  expert_act = DeviceMemory(listed * static_cast<size_t>(d.expert_width) * 2);
  expert_y = DeviceMemory(listed * hidden * 2);
  expert_rows = DeviceMemory(static_cast<size_t>(d.n_experts) * 4);
  token_of_row = DeviceMemory(listed * 4);
  row_weight = DeviceMemory(listed * 4);
  row_of_choice = DeviceMemory(8 * rows * 4);
  n_tiles_bound = max_expert_tiles(plan.shape.rows, d.n_experts, plan.policy.tile.small);
  tiles = DeviceMemory(static_cast<size_t>(n_tiles_bound) * sizeof(ExpertTile));
  n_tiles = DeviceMemory(4);
  shared_weight = DeviceMemory(rows * 4);
  if (!plan.policy.dequantise_in_gemm)  // gate and up of one layer, the shared expert's included
    expanded = DeviceMemory(2 * static_cast<size_t>(d.n_experts + 1) * static_cast<size_t>(d.expert_width) *
                            hidden * 2);
  if (!plan.policy.route_on_device)
    host_groups = PinnedMemory(host_group_bytes(plan.shape.rows, n_tiles_bound));
  delta = DeviceMemory(delta_scratch_bytes(plan.shape.rows, d.n_key_heads, d.n_value_heads));
}

int tile_rows(const plan::Policy& policy, const model::Dims& dims, int n_rows) {
  const plan::TileRows& tile = policy.tile;  // by the mean load of an expert
  return n_rows * model::kExpertsPerToken < tile.large_from * dims.n_experts ? tile.small : tile.large;
}

void launch_ops(const Run& run, int first, int last) {
  for (int i = first; i < last;) i += launch_op(run, i);
}

}  // namespace lily::cuda
