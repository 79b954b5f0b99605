// Lowering of routing and experts.
#include "backend/metal/lowering.h"
#include "base/error.h"

namespace lily::metal {

using kernels::ExpertsParams;
using kernels::RouterParams;
using model::Weight;

namespace {
constexpr uint32_t kRowsOfGroup = 8;  // output rows of a threadgroup in the decode kernels
}  // namespace

void Lowering::router_top(const plan::View& logits, plan::ValueId ids, plan::ValueId weights) {
  begin("router_top", {per(Count::rows), fixed(1), fixed(1)}, {32, 1, 1});
  read(0, logits.value);
  write(1, ids);
  write(2, weights);
  params(RouterParams{
      .n_experts = u(dims().n_experts), .stride = cols(logits.value), .first = u(logits.first_col)});
  header();
}

void Lowering::lower(const plan::RouterTop& o) { router_top(o.logits, o.ids, o.weights); }

// The logits need the norm's scale only, the experts need its result: both read the residual, side by side.
void Lowering::lower(const plan::NormRouter& o) {
  const std::vector<model::WeightId> weights = {{Weight::router, o.layer}, {Weight::shared_gate, o.layer}};
  rms_norm({Weight::post_norm, o.layer}, o.x, place_of(plan_, lowered_, o.normed));
  if (plan_.policy.row_parallel_gemv && is_few(o.logits)) {
    product({.weights = weights,
             .x = {o.x, 0, cols(o.x)},
             .y = o.logits,
             .norm = {Weight::post_norm, o.layer},
             .has_norm = true});
  } else {
    next_phase();
    product({.weights = weights, .x = {o.normed, 0, cols(o.normed)}, .y = o.logits});
  }
  if (o.ids == plan::kNoValue) return;  // ExpertsGateUp chooses
  next_phase();
  router_top({o.logits, 0, dims().n_experts}, o.ids, o.weights);
}

void Lowering::lower(const plan::ExpertGroups& o) {
  if (o.on_host) {
    op_.on_host = true;
    return;
  }
  const RouterParams p{.n_experts = u(dims().n_experts),
                       .tile_small = u(o.tile.small),
                       .tile_large = u(o.tile.large),
                       .large_from = u(o.tile.large_from)};
  const Place counts = work(int64_t{dims().n_experts} * 4);
  begin("count_assignments", {fixed(dims().n_experts), fixed(1), fixed(1)}, {256, 1, 1});
  read(0, o.ids);
  arg(1, counts, Kind::write);
  header();
  next_phase();
  begin("group_assignments", {fixed(dims().n_experts), fixed(1), fixed(1)}, {256, 1, 1});
  read(0, o.ids);
  arg(1, counts);
  write(2, o.offsets);
  write(3, o.order);
  write(4, o.position);
  write(5, o.blocks);
  write(6, o.n_blocks);
  params(p);
  header();
}

ExpertsParams Lowering::experts_params(model::WeightId id) const {
  const WeightLayout l = layout(id);
  ExpertsParams p{.in = u(l.in), .out = u(l.rows / dims().n_experts)};
  p.scales[0] = u(l.scales);
  p.biases[0] = u(l.biases);
  return p;
}

void Lowering::lower(const plan::ExpandWeight& o) {
  const WeightLayout l = layout(o.weight);
  begin(fmt::format("expand_weight_{}", storage_name(code_bits(l.storage))),
        {fixed((l.in / 16 + 31) / 32), fixed(l.rows), fixed(1)}, {32, 1, 1});
  weight(0, o.weight);
  write(1, o.y);
  params(experts_params(o.weight));
}

std::string Lowering::grouped_kernel(const std::string& name, int bits) const {
  return fmt::format("{}_prefill_{}{}", name, unit_name(plan_.policy.matrix_unit), storage_name(bits));
}

void Lowering::lower(const plan::ExpertsLinear& o) {
  ExpertsParams p = experts_params(o.weight);
  p.from_tokens = o.weight.weight != Weight::expert_down;
  p.x_stride = cols(o.x);
  p.y_stride = cols(o.y);
  if (!o.routing.grouped()) {
    begin(fmt::format("experts_linear_decode_{}", storage_name(bits(o.weight))),
          {fixed((p.out + kRowsOfGroup - 1) / kRowsOfGroup), fixed(kernels::kTopK), per(Count::rows)},
          {64, 1, 1});
    read(0, o.x);
    read(1, o.routing.ids);
    write(2, o.y);
    weight(4, o.weight);
    params(p);
    header();
    return;
  }
  const bool is_expanded = o.expanded != plan::kNoValue;
  Dispatch& d = begin(grouped_kernel("experts_linear", is_expanded ? 16 : bits(o.weight)), {}, {128, 1, 1});
  d.is_indirect = true;
  d.indirect = place_of(plan_, lowered_, o.routing.n_blocks);
  read(0, o.x);
  read(1, o.routing.order);
  write(2, o.y);
  read(3, o.routing.blocks);
  if (is_expanded) read(4, o.expanded);
  else weight(4, o.weight);
  params(p);
}

void Lowering::lower(const plan::ExpertsCombine& o) {
  begin("experts_combine", {fixed((dims().hidden + 255) / 256), per(Count::rows), fixed(1)}, {256, 1, 1});
  read(0, o.experts);
  read(1, o.routing.grouped() ? o.routing.position : o.routing.ids);
  read(2, o.weights);
  read(3, o.shared);
  read(4, o.shared_gate.value);
  read(5, o.residual_in);
  write(6, o.residual_out);
  params(ExpertsParams{.out = u(dims().hidden),
                       .x_stride = cols(o.experts),
                       .y_stride = cols(o.residual_out),
                       .from_tokens = o.routing.grouped() ? 0u : 1u,
                       .gate_stride = cols(o.shared_gate.value),
                       .gate_first = u(o.shared_gate.first_col)});
  header();
}

void Lowering::lower(const plan::ExpertsGateUp& o) {
  const model::WeightId gate{Weight::expert_gate, o.layer}, up{Weight::expert_up, o.layer};
  if (bits(gate) != bits(up))
    fail(Fault::model,
         "layers.{}: expert gate and up projections have {} and {} bits; the Metal backend fuses them only "
         "with the "
         "same (turn off policy.gate_up)",
         o.layer, bits(gate), bits(up));
  ExpertsParams p = experts_params(gate);
  p.scales[1] = u(layout(up).scales);
  p.biases[1] = u(layout(up).biases);
  p.x_stride = cols(o.x);
  p.y_stride = cols(o.y);
  if (o.routing.grouped()) {
    LILY_CHECK(!o.routes(), "a group needs its routing before");
    if (o.shared != plan::kNoValue)
      fail(Fault::user,
           "policy.prefill.shared_in_experts: the Metal backend computes the shared expert of {} rows apart",
           plan_.shape.rows);
    const bool is_expanded = o.expanded_gate != plan::kNoValue;
    Dispatch& d = begin(grouped_kernel("experts_gate_up", is_expanded ? 16 : bits(gate)), {}, {128, 1, 1});
    d.is_indirect = true;
    d.indirect = place_of(plan_, lowered_, o.routing.n_blocks);
    read(0, o.x);
    read(1, o.routing.order);
    write(2, o.y);
    read(3, o.routing.blocks);
    if (is_expanded) {
      read(4, o.expanded_gate);
      read(5, o.expanded_up);
    } else {
      weight(4, gate);
      weight(5, up);
    }
    params(p);
    return;
  }
  const bool has_shared = o.shared != plan::kNoValue;
  const model::WeightId shared_gate{Weight::shared_gate_proj, o.layer},
      shared_up{Weight::shared_up_proj, o.layer};
  int64_t widest = p.out;
  if (has_shared) {
    if (bits(shared_gate) != bits(shared_up))
      fail(Fault::model,
           "layers.{}: the shared expert's gate and up projections have {} and {} bits, not the same",
           o.layer, bits(shared_gate), bits(shared_up));
    p.shared_in = u(dims().shared_width);
    p.shared_bits = u(bits(shared_gate));
    p.shared_scales[0] = u(layout(shared_gate).scales);
    p.shared_biases[0] = u(layout(shared_gate).biases);
    p.shared_scales[1] = u(layout(shared_up).scales);
    p.shared_biases[1] = u(layout(shared_up).biases);
    widest = std::max<int64_t>(widest, p.shared_in);
  }
  begin(fmt::format("experts_gate_up_decode_{}", storage_name(bits(gate))),
        {fixed((widest + kRowsOfGroup - 1) / kRowsOfGroup), fixed(kernels::kTopK + (has_shared ? 1 : 0)),
         per(Count::rows)},
        {64, 1, 1});
  if (o.routes()) {
    p.n_experts = u(dims().n_experts);
    p.router_stride = cols(o.router.value);
    p.router_first = u(o.router.first_col);
  }
  read(0, o.x);
  if (o.routes()) write(1, o.routing.ids);
  else read(1, o.routing.ids);
  write(2, o.y);
  if (has_shared) write(3, o.shared);
  else write(3, o.y);
  weight(4, gate);
  weight(5, up);
  weight(6, has_shared ? shared_gate : gate);
  weight(7, has_shared ? shared_up : up);
  if (o.routes()) {
    read(8, o.router.value);
    write(9, o.weights);
  } else {  // bound, not used
    weight(8, gate);
    write(9, o.y);
  }
  params(p);
  header();
}

void Lowering::lower(const plan::ExpertsDownCombine& o) {
  if (o.routing.grouped())
    fail(Fault::user, "policy.prefill.down_combine: the Metal backend adds up the experts of {} rows apart",
         plan_.shape.rows);
  const model::WeightId down{Weight::expert_down, o.layer}, shared_down{Weight::shared_down_proj, o.layer};
  ExpertsParams p = experts_params(down);
  p.x_stride = cols(o.x);
  p.y_stride = cols(o.residual_out);
  p.gate_stride = cols(o.shared_gate.value);
  p.gate_first = u(o.shared_gate.first_col);
  p.shared_given = o.shared_down ? 0 : 1;
  if (o.shared_down) {
    p.shared_in = u(dims().shared_width);
    p.shared_bits = u(bits(shared_down));
    p.shared_scales[0] = u(layout(shared_down).scales);
    p.shared_biases[0] = u(layout(shared_down).biases);
  }
  begin(fmt::format("experts_down_combine_decode_{}", storage_name(bits(down))),
        {fixed((p.out + 3) / 4), per(Count::rows), fixed(1)}, {32 * (kernels::kTopK + 1), 1, 1});
  read(0, o.x);
  read(1, o.routing.ids);
  read(2, o.weights);
  read(3, o.shared);
  read(4, o.shared_gate.value);
  read(5, o.residual_in);
  write(6, o.residual_out);
  weight(7, down);
  weight(8, o.shared_down ? shared_down : down);
  params(p);
  header();
}

}  // namespace lily::metal
