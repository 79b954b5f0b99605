// The fused ops on the prefill kernels: chunks of prompts, segment by segment where state or cache is
// touched.
#include <algorithm>

#include "backend/cuda/kernels/linear_decode.h"
#include "backend/cuda/kernels/prefill_expand.h"
#include "backend/cuda/lower.h"
#include "backend/cuda/prefill_attention.h"
#include "backend/cuda/prefill_delta.h"
#include "backend/cuda/prefill_linear.h"
#include "backend/cuda/prefill_routing.h"
#include "pack/mma_q4.h"

namespace lily::cuda {
namespace {

using model::Weight;

// From this many rows of a sequence on the delta rule runs in blocks.
constexpr int kDeltaBlocksFrom = 32;

// A weight with fewer outputs than the matrix tiles take (the gates of a small model), on the decode kernel.
void narrow_linear(const Run& run, const DeviceWeight& w, const uint16_t* x, uint16_t* y, int64_t y_stride) {
  LinearDecode p;
  p.pieces[0] = {reinterpret_cast<const unsigned char*>(w.records), static_cast<int>(w.out), 0};
  p.n_pieces = 1;
  p.in = static_cast<int>(w.in);
  p.x_stride = w.in;
  p.y_stride = y_stride;
  for (int first = 0; first < run.step.n_rows(); first += p.rows) {
    p.rows = std::min(8, run.step.n_rows() - first);
    p.x = x + first * w.in;
    p.y = y + first * y_stride;
    launch_linear_decode(p, run.n_sms, run.stream);
  }
}

ProductUnit product_unit(const Run& run) {
  const plan::MatrixUnit unit = run.plan.policy.matrix_unit;
  if (unit == plan::MatrixUnit::vector) return ProductUnit::fma;
  return unit == plan::MatrixUnit::tensor && run.has_wgmma ? ProductUnit::wgmma : ProductUnit::mma;
}

// An expert weight and its shared companion as the GEMM reads them: in place, or (P1 off) expanded behind
// what `used` counts.
struct ExpertWeights {
  const std::byte *routed, *shared;
};
ExpertWeights expert_weights(const Run& run, model::WeightId routed, model::WeightId shared, size_t* used) {
  const DeviceWeight &w = run.weights.get(routed), &s = run.weights.get(shared);
  if (run.plan.policy.dequantise_in_gemm) return {w.records, s.records};
  const auto expand = [&](const DeviceWeight& weight) {
    const int64_t n =
        weight.n_matrices * static_cast<int64_t>(pack::mma_q4::packed_bytes(static_cast<int>(weight.out),
                                                                            static_cast<int>(weight.in)) /
                                                 pack::mma_q4::kRecordBytes);
    std::byte* to = run.extra.expanded.get(*used);
    expand_q4_prefill({weight.records, n, to}, run.stream);
    *used += static_cast<size_t>(n) * kExpandedRecordBytes;
    return to;
  };
  const std::byte* expanded = expand(w);
  return {expanded, expand(s)};
}

Q8Matrix q8(const DeviceWeight& w) { return {reinterpret_cast<const uint8_t*>(w.codes), w.scales, w.biases}; }

}  // namespace

void norm_linear_chunk(const Run& run, const plan::NormLinear& op) {
  const int rows = run.step.n_rows();
  auto* normed = run.extra.normed.get<uint16_t>();
  rms_norm_prefill(run.data<float>(op.x), run.weights.get(op.norm).vector, normed, rows, run.plan.dims.hidden,
                   run.stream);
  LinearArgs a{};
  a.x = normed;
  a.n_tokens = rows;
  a.n_cols = run.plan.dims.hidden;
  a.output = LinearOutput::bf16;
  a.unit = product_unit(run);
  int64_t col = 0;
  for (const model::WeightId id : op.weights) {
    const DeviceWeight& w = run.weights.get(id);
    uint16_t* y = run.data<uint16_t>(op.y) + col;
    if (w.out % 8 == 0)
      a.segments[a.n_segments++] = {w.records, static_cast<int>(w.out), y, run.stride(op.y)};
    else narrow_linear(run, w, normed, y, run.stride(op.y));
    col += w.out;
  }
  linear_q4_prefill(a, run.n_sms, run.stream);
}

void linear_add_chunk(const Run& run, const plan::LinearAdd& op) {
  const DeviceWeight& w = run.weights.get(op.weight);
  LinearArgs a{};
  a.x = run.data<uint16_t>(op.x);
  a.n_tokens = run.step.n_rows();
  a.n_cols = static_cast<int>(w.in);
  a.n_segments = 1;
  a.segments[0] = {w.records, static_cast<int>(w.out), run.data<float>(op.residual_out), w.out};
  a.output = LinearOutput::residual;
  a.residual = run.data<float>(op.residual_in);
  a.unit = product_unit(run);
  linear_q4_prefill(a, run.n_sms, run.stream);
}

void delta_chunk(const Run& run, const plan::DeltaMixer& op) {
  const model::Dims& d = run.plan.dims;
  for (const backend::Segment& seg : run.step.segments()) {
    const int64_t stride = run.stride(op.qkv.value), first = seg.first_row;
    const int src = static_cast<int>(seg.src), dst = static_cast<int>(seg.dst);
    const Memory& m = run.memory;
    DeltaArgs a{};
    a.n_tokens = seg.n_rows;
    a.n_key_heads = d.n_key_heads;
    a.n_value_heads = d.n_value_heads;
    a.qkv = run.bf16(op.qkv) + first * stride;
    a.z = run.bf16(op.z) + first * stride;
    a.b = run.bf16(op.b) + first * stride;
    a.a = run.bf16(op.a) + first * stride;
    a.qkv_stride = a.z_stride = a.ab_stride = stride;
    a.conv_weight = run.weights.get({Weight::conv, op.layer}).bf16;
    a.a_log = run.weights.get({Weight::a_log, op.layer}).vector;
    a.dt_bias = run.weights.get({Weight::dt_bias, op.layer}).vector;
    a.norm = run.weights.get({Weight::delta_norm, op.layer}).vector;
    a.conv_in = src < 0 ? nullptr : m.conv_state(op.layer) + src * m.conv_slot_stride();
    a.conv_out = m.conv_state(op.layer) + dst * m.conv_slot_stride();
    a.state_in = src < 0 ? nullptr : m.delta_state(op.layer) + src * m.delta_slot_stride();
    a.state_out = m.delta_state(op.layer) + dst * m.delta_slot_stride();
    a.y = run.data<uint16_t>(op.y) + first * run.stride(op.y);
    a.scratch = run.extra.delta.get();
    const bool blocks = op.scan == plan::DeltaScan::in_blocks && seg.n_rows >= kDeltaBlocksFrom;
    (blocks ? delta_blocks_prefill : delta_scan_prefill)(a, run.stream);
  }
}

namespace {

AttentionArgs attention_args(const Run& run, int layer, const backend::Segment& seg) {
  AttentionArgs a{};
  a.n_tokens = seg.n_rows;
  a.position = seg.position;
  a.n_q_heads = run.plan.dims.n_q_heads;
  a.q_norm = run.weights.get({Weight::q_norm, layer}).vector;
  a.k_norm = run.weights.get({Weight::k_norm, layer}).vector;
  a.rope = run.step.view().rope + seg.first_row * 32;
  a.cache = run.memory.kv(layer);
  a.block_table = run.step.view().block_table + seg.first_block;
  return a;
}

}  // namespace

void qk_prepare_chunk(const Run& run, const plan::QkPrepare& op) {
  for (const backend::Segment& seg : run.step.segments()) {
    AttentionArgs a = attention_args(run, op.layer, seg);
    const int64_t stride = run.stride(op.q_gate.value);
    a.q_gate = run.bf16(op.q_gate) + seg.first_row * stride;
    a.k = run.bf16(op.k) + seg.first_row * stride;
    a.v = run.bf16(op.v) + seg.first_row * stride;
    a.q_gate_stride = a.kv_stride = stride;
    a.q = run.data<uint16_t>(op.q) + seg.first_row * run.stride(op.q);
    qk_prepare_prefill(a, run.stream);
  }
}

void attention_chunk(const Run& run, const plan::GatedAttention& op) {
  for (const backend::Segment& seg : run.step.segments()) {
    AttentionArgs a = attention_args(run, op.layer, seg);
    const int64_t stride = run.stride(op.gate.value);
    a.q_gate = run.bf16(op.gate) + seg.first_row * stride;
    a.q_gate_stride = a.kv_stride = stride;
    a.q = run.data<uint16_t>(op.q) + seg.first_row * run.stride(op.q);
    a.y = run.data<uint16_t>(op.y) + seg.first_row * run.stride(op.y);
    const bool warpgroups = run.has_wgmma && run.plan.policy.matrix_unit != plan::MatrixUnit::simdgroup;
    (warpgroups ? attention_prefill : attention_mma_prefill)(a, run.stream);
  }
}

void router_chunk(const Run& run, const plan::NormRouter& op) {
  const model::Dims& d = run.plan.dims;
  rms_norm_prefill(run.data<float>(op.x), run.weights.get({Weight::post_norm, op.layer}).vector,
                   run.data<uint16_t>(op.normed), run.step.n_rows(), d.hidden, run.stream);
  RouterArgs a{};
  a.u = run.data<uint16_t>(op.normed);
  a.n_tokens = run.step.n_rows();
  a.hidden = d.hidden;
  a.n_experts = d.n_experts;
  a.router = q8(run.weights.get({Weight::router, op.layer}));
  a.shared_gate = q8(run.weights.get({Weight::shared_gate, op.layer}));
  a.chosen = run.data<int32_t>(op.ids);
  a.chosen_weight = run.data<float>(op.weights);
  a.shared_weight = run.extra.shared_weight.get<float>();
  router_q8_prefill(a, run.stream);
  GroupArgs g{};
  g.chosen = a.chosen;
  g.chosen_weight = a.chosen_weight;
  g.shared_weight = a.shared_weight;
  g.n_tokens = a.n_tokens;
  g.n_experts = d.n_experts;
  g.with_shared = true;
  g.expert_rows = run.extra.expert_rows.get<int32_t>();
  g.token_of_row = run.extra.token_of_row.get<int32_t>();
  g.row_weight = run.extra.row_weight.get<float>();
  g.row_of_choice = run.extra.row_of_choice.get<int32_t>();
  g.tiles = run.extra.tiles.get<ExpertTile>();
  g.n_tiles = run.extra.n_tiles.get<int32_t>();
  g.tile_rows = tile_rows(run.plan.policy, d, g.n_tokens);
  // A decode step is a graph, in which nothing waits for the host.
  if (run.plan.policy.route_on_device || !run.chunk()) group_by_expert_prefill(g, run.stream);
  else group_on_host(run, g);
}

void gate_up_chunk(const Run& run, const plan::ExpertsGateUp& op) {
  const model::Dims& d = run.plan.dims;
  ExpertArgs a{};
  a.tiles = run.extra.tiles.get<ExpertTile>();
  a.n_tiles = run.extra.n_tiles.get<int32_t>();
  a.n_experts = d.n_experts;
  a.x = run.data<uint16_t>(op.x);
  a.token_of_row = run.extra.token_of_row.get<int32_t>();
  a.row_weight = run.extra.row_weight.get<float>();
  size_t used = 0;
  const auto [gate, shared_gate] =
      expert_weights(run, {Weight::expert_gate, op.layer}, {Weight::shared_gate_proj, op.layer}, &used);
  const auto [up, shared_up] =
      expert_weights(run, {Weight::expert_up, op.layer}, {Weight::shared_up_proj, op.layer}, &used);
  a.weights = gate;
  a.weights_up = up;
  a.shared = shared_gate;
  a.shared_up = shared_up;
  a.unit = product_unit(run);
  a.expanded = !run.plan.policy.dequantise_in_gemm;
  a.n_rows = d.expert_width;
  a.n_cols = d.hidden;
  a.out = run.extra.expert_act.get<uint16_t>();
  a.tile_rows = tile_rows(run.plan.policy, d, run.step.n_rows());
  experts_gate_up_q4_prefill(a, run.n_sms, run.stream);
}

void down_chunk(const Run& run, const plan::ExpertsDownCombine& op) {
  const model::Dims& d = run.plan.dims;
  ExpertArgs a{};
  a.tiles = run.extra.tiles.get<ExpertTile>();
  a.n_tiles = run.extra.n_tiles.get<int32_t>();
  a.n_experts = d.n_experts;
  a.x = run.extra.expert_act.get<uint16_t>();
  size_t used = 0;
  const auto [down, shared_down] =
      expert_weights(run, {Weight::expert_down, op.layer}, {Weight::shared_down_proj, op.layer}, &used);
  a.weights = down;
  a.shared = shared_down;
  a.unit = product_unit(run);
  a.expanded = !run.plan.policy.dequantise_in_gemm;
  a.n_rows = d.hidden;
  a.n_cols = d.expert_width;
  a.out = run.extra.expert_y.get<uint16_t>();
  a.tile_rows = tile_rows(run.plan.policy, d, run.step.n_rows());
  experts_down_q4_prefill(a, run.n_sms, run.stream);
  CombineArgs c{};
  c.y = a.out;
  c.y_shared = a.out + int64_t{8} * run.step.n_rows() * d.hidden;
  c.row_of_choice = run.extra.row_of_choice.get<int32_t>();
  c.residual = run.data<float>(op.residual_in);
  c.n_tokens = run.step.n_rows();
  c.hidden = d.hidden;
  c.out = run.data<float>(op.residual_out);
  combine_experts_prefill(c, run.stream);
}

}  // namespace lily::cuda
