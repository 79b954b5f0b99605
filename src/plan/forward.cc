// The model as a list of ops: the file to read first. Equation numbers are those of docs/numerics.md.
#include "plan/builder.h"
#include "plan/plan.h"

namespace lily::plan {
namespace {

using model::kExpertsPerToken;
using model::kHeadDim;
using model::kNoLayer;
using model::Mixer;

// y = norm(x) * W^T, fused or as two ops.
ValueId norm_linear(Builder& b, int layer, Weight norm, std::vector<WeightId> weights, ValueId x,
                    int64_t n_out, const std::string& name, RowSpace rows, Type type) {
  if (b.fusions().norm_linear) {
    const ValueId y = b.value(layer, name, rows, n_out, type);
    b.push(NormLinear{{norm, layer}, std::move(weights), x, y});
    return y;
  }
  const ValueId normed =
      b.activation(layer, norm == Weight::final_norm ? "final_norm" : "input_norm", b.dims().hidden, rows);
  b.push(RmsNorm{{norm, layer}, x, normed});
  const ValueId y = b.value(layer, name, rows, n_out, type);
  b.push(Linear{std::move(weights), b.whole(normed), y});
  return y;
}

// residual + x * W^T.
ValueId linear_residual(Builder& b, int layer, Weight weight, ValueId x, ValueId residual) {
  const ValueId out = b.next_residual(layer, "mixer_residual", residual);
  if (b.fusions().linear_add) {
    b.push(LinearAdd{{weight, layer}, x, residual, out});
    return out;
  }
  const ValueId y = b.activation(layer, "mixer_out", b.dims().hidden);
  b.push(Linear{{{weight, layer}}, b.whole(x), y});
  b.push(Add{y, residual, out});
  return out;
}

// Gated DeltaNet (13)-(21).
ValueId delta_mixer(Builder& b, int layer, ValueId residual) {
  const model::Dims& d = b.dims();
  const int64_t channels = d.conv_channels(), width = d.value_width(), heads = d.n_value_heads;
  const Fusions& fuse = b.fusions();
  const DeltaScan scan = b.plan().shape.rows >= b.policy().delta_blocks_from_rows ? DeltaScan::in_blocks
                                                                                  : DeltaScan::in_registers;

  const ValueId in = norm_linear(b, layer, Weight::input_norm,
                                 {{Weight::delta_qkv, layer},
                                  {Weight::delta_z, layer},
                                  {Weight::delta_b, layer},
                                  {Weight::delta_a, layer}},
                                 residual, channels + width + 2 * heads, "delta_in", RowSpace::tokens,
                                 Builder::type_of(b.policy().activation));
  const View qkv = b.columns(in, 0, channels);
  const View z = b.columns(in, channels, width);
  const View beta_in = b.columns(in, channels + width, heads);
  const View decay_in = b.columns(in, channels + width + heads, heads);

  if (fuse.delta_mixer) {
    const ValueId y = b.activation(layer, "gated_norm", width);
    b.push(DeltaMixer{layer, scan, qkv, z, beta_in, decay_in, y});
    return linear_residual(b, layer, Weight::delta_out, y, residual);
  }
  const ValueId mixed = b.activation(layer, "conv", channels);
  b.push(ShortConv{layer, qkv, mixed});
  const int64_t keys = d.key_width();
  const ValueId q = b.value(layer, "delta_q", RowSpace::tokens, keys, Type::f32);
  const ValueId k = b.value(layer, "delta_k", RowSpace::tokens, keys, Type::f32);
  const ValueId g = b.value(layer, "delta_g", RowSpace::tokens, heads, Type::f32);
  const ValueId beta = b.value(layer, "delta_beta", RowSpace::tokens, heads, Type::f32);
  b.push(DeltaPrepare{layer, b.columns(mixed, 0, keys), b.columns(mixed, keys, keys), beta_in, decay_in, q, k,
                      g, beta});
  const View v = b.columns(mixed, 2 * keys, width);
  ValueId y = kNoValue;
  if (fuse.delta_norm) {
    y = b.activation(layer, "gated_norm", width);
    b.push(DeltaRuleNorm{layer, scan, q, k, v, g, beta, z, y});
  } else {
    const ValueId o = b.value(layer, "delta_o", RowSpace::tokens, width, Type::f32);
    b.push(DeltaRule{layer, scan, q, k, v, g, beta, o});
    y = b.activation(layer, "gated_norm", width);
    b.push(GatedNorm{layer, o, z, y});
  }
  return linear_residual(b, layer, Weight::delta_out, y, residual);
}

// Gated full attention (4)-(12).
ValueId attention_mixer(Builder& b, int layer, ValueId residual) {
  const model::Dims& d = b.dims();
  const Fusions& fuse = b.fusions();
  const bool fixed_blocks = b.plan().shape.context >= b.policy().fixed_blocks_from_context;
  const AttentionPath path = fixed_blocks ? AttentionPath::fixed_blocks : AttentionPath::general;

  const ValueId in = norm_linear(b, layer, Weight::input_norm,
                                 {{Weight::q_proj, layer}, {Weight::k_proj, layer}, {Weight::v_proj, layer}},
                                 residual, d.q_gate_width() + 2 * d.kv_width(), "attention_in",
                                 RowSpace::tokens, Builder::type_of(b.policy().activation));
  const View q_gate = b.columns(in, 0, d.q_gate_width());
  const View k_in = b.columns(in, d.q_gate_width(), d.kv_width());
  const View v = b.columns(in, d.q_gate_width() + d.kv_width(), d.kv_width());

  if (fuse.qk_in_attention && fuse.qk_prepare && fuse.attention_gate &&
      b.plan().shape.phase == Phase::decode) {
    const ValueId y = b.activation(layer, "attention_gated", d.q_width());
    b.push(GatedAttention{layer, path, kNoValue, q_gate, y, k_in, v});
    return linear_residual(b, layer, Weight::o_proj, y, residual);
  }
  const ValueId q = b.activation(layer, "attention_q", d.q_width());
  if (fuse.qk_prepare) {
    b.push(QkPrepare{layer, q_gate, k_in, v, q});
  } else {
    const ValueId k = b.activation(layer, "attention_k", d.kv_width());
    b.push(HeadNormRope{{Weight::q_norm, layer}, q_gate, 2 * kHeadDim, q});
    b.push(HeadNormRope{{Weight::k_norm, layer}, k_in, kHeadDim, k});
    b.push(KvAppend{layer, k, v});
  }
  const ValueId gated = b.activation(layer, "attention_gated", d.q_width());
  if (fuse.attention_gate) {
    b.push(GatedAttention{layer, path, q, q_gate, gated});
  } else {
    const ValueId o = b.activation(layer, "attention_o", d.q_width());
    b.push(Attention{layer, path, q, o});
    b.push(AttentionGate{o, q_gate, gated});
  }
  return linear_residual(b, layer, Weight::o_proj, gated, residual);
}

Routing group_experts(Builder& b, int layer, ValueId ids) {
  if (b.plan().shape.rows < b.policy().group_experts_from_rows) return {.ids = ids};
  const auto indices = [&](const char* name, RowSpace rows, int64_t cols) {
    return b.value(layer, name, rows, cols, Type::i32);
  };
  const Routing r{.ids = ids,
                  .offsets = indices("expert_offsets", RowSpace::experts, 1),
                  .order = indices("expert_order", RowSpace::routed, 1),
                  .position = indices("expert_position", RowSpace::routed, 1),
                  .blocks = indices("expert_blocks", RowSpace::blocks, 4),
                  .n_blocks = indices("expert_n_blocks", RowSpace::one, 4)};
  b.push(ExpertGroups{b.policy().tile, !b.policy().route_on_device, ids, r.offsets, r.order, r.position,
                      r.blocks, r.n_blocks});
  return r;
}

// The routed experts and the shared one (22)-(26).
ValueId moe(Builder& b, int layer, ValueId residual) {
  const model::Dims& d = b.dims();
  const Fusions& fuse = b.fusions();
  const bool shared_inside = fuse.shared_in_experts && fuse.gate_up && fuse.down_combine;
  const bool router_inside = fuse.router_in_experts && fuse.norm_router && fuse.gate_up &&
                             b.plan().shape.rows < b.policy().group_experts_from_rows;

  const ValueId x = b.activation(layer, "post_norm", d.hidden);
  const ValueId logits = b.value(layer, "router_logits", RowSpace::tokens, d.n_experts + 1, Type::f32);
  const ValueId ids = b.value(layer, "router_ids", RowSpace::tokens, kExpertsPerToken, Type::i32);
  const ValueId weights = b.value(layer, "router_weights", RowSpace::tokens, kExpertsPerToken, Type::f32);
  if (fuse.norm_router) {
    b.push(NormRouter{layer, residual, x, logits, router_inside ? kNoValue : ids,
                      router_inside ? kNoValue : weights});
  } else {
    b.push(RmsNorm{{Weight::post_norm, layer}, residual, x});
    b.push(Linear{{{Weight::router, layer}, {Weight::shared_gate, layer}}, b.whole(x), logits});
    b.push(RouterTop{b.columns(logits, 0, d.n_experts), ids, weights});
  }
  const View shared_gate = b.columns(logits, d.n_experts, 1);

  ValueId shared =
      kNoValue;  // [T, H], or [T, shared_width] where its down projection is inside ExpertsDownCombine
  if (!shared_inside) {
    const ValueId gate_up = b.activation(layer, "shared_gate_up", 2 * d.shared_width);
    b.push(Linear{{{Weight::shared_gate_proj, layer}, {Weight::shared_up_proj, layer}}, b.whole(x), gate_up});
    const ValueId mid = b.activation(layer, "shared_mid", d.shared_width);
    b.push(SwiGlu{b.columns(gate_up, 0, d.shared_width), b.columns(gate_up, d.shared_width, d.shared_width),
                  mid});
    shared = b.activation(layer, "shared_out", d.hidden);
    b.push(Linear{{{Weight::shared_down_proj, layer}}, b.whole(mid), shared});
  }

  const Routing routing = group_experts(b, layer, ids);
  // P1's ablation: the weight as bf16 in memory, read back by the GEMM.
  const auto expand = [&](Weight weight, int64_t out, int64_t in) {
    if (b.policy().dequantise_in_gemm || !routing.grouped()) return kNoValue;
    const ValueId y =
        b.value(layer, "expanded_" + to_string(WeightId{weight, kNoLayer}), RowSpace::matrix, in, Type::bf16);
    b.set_matrix_rows(y, d.n_experts * out);
    b.push(ExpandWeight{{weight, layer}, y});
    return y;
  };

  ValueId mid = kNoValue;
  if (fuse.gate_up) {
    const ValueId expanded_gate = expand(Weight::expert_gate, d.expert_width, d.hidden);
    const ValueId expanded_up = expand(Weight::expert_up, d.expert_width, d.hidden);
    mid = b.activation(layer, "experts_mid", d.expert_width, RowSpace::routed);
    if (shared_inside) shared = b.activation(layer, "shared_mid", d.shared_width);
    ExpertsGateUp op{layer, routing, x, mid, shared_inside ? shared : kNoValue, expanded_gate, expanded_up};
    if (router_inside) {
      op.router = b.columns(logits, 0, d.n_experts);
      op.weights = weights;
    }
    b.push(op);
  } else {
    const auto project = [&](Weight weight, const char* name) {
      const ValueId expanded_weight = expand(weight, d.expert_width, d.hidden);
      const ValueId y = b.activation(layer, name, d.expert_width, RowSpace::routed);
      b.push(ExpertsLinear{{weight, layer}, routing, x, y, expanded_weight});
      return y;
    };
    const ValueId gate = project(Weight::expert_gate, "experts_gate");
    const ValueId up = project(Weight::expert_up, "experts_up");
    mid = b.activation(layer, "experts_mid", d.expert_width, RowSpace::routed);
    b.push(SwiGlu{b.whole(gate), b.whole(up), mid});
  }

  const ValueId expanded_down = expand(Weight::expert_down, d.hidden, d.expert_width);
  const ValueId out = b.next_residual(layer, "out", residual);
  if (fuse.down_combine) {
    b.push(ExpertsDownCombine{layer, routing, mid, weights, shared, shared_inside, shared_gate, residual, out,
                              expanded_down});
    return out;
  }
  const ValueId experts = b.activation(layer, "experts_out", d.hidden, RowSpace::routed);
  b.push(ExpertsLinear{{Weight::expert_down, layer}, routing, mid, experts, expanded_down});
  b.push(ExpertsCombine{routing, weights, experts, shared, shared_gate, residual, out});
  return out;
}

// Final norm and logits of the wanted rows, and what becomes of them (27) (28).
void head(Builder& b, ValueId residual) {
  const Shape& shape = b.plan().shape;
  if (shape.ending == Ending::none) return;
  const ValueId rows = b.value(kNoLayer, "output_rows", RowSpace::outputs, b.dims().hidden,
                               Builder::type_of(b.policy().residual));
  b.push(GatherRows{residual, rows});
  const ValueId logits = norm_linear(b, kNoLayer, Weight::final_norm, {{Weight::lm_head, kNoLayer}}, rows,
                                     b.dims().vocab, "logits", RowSpace::outputs, Type::f32);
  if (shape.ending == Ending::greedy) {
    b.push(GreedyToken{logits, b.value(kNoLayer, "token", RowSpace::outputs, 1, Type::i32)});
  } else if (shape.ending == Ending::sampled) {
    b.push(SampleToken{logits, b.value(kNoLayer, "token", RowSpace::outputs, 1, Type::i32)});
  } else if (shape.ending == Ending::candidates) {
    const int n = b.plan().options.n_candidates;
    b.push(TopCandidates{n, logits, b.value(kNoLayer, "candidate_ids", RowSpace::outputs, n, Type::i32),
                         b.value(kNoLayer, "candidate_logits", RowSpace::outputs, n, Type::f32),
                         b.value(kNoLayer, "logsumexp", RowSpace::outputs, 1, Type::f32)});
  }
}

}  // namespace

Plan forward(const model::Dims& dims, const Shape& shape, const Policy& policy, const Options& options) {
  Plan plan{.dims = dims, .shape = shape, .policy = policy, .options = options};
  Builder b(plan);
  ValueId residual =
      b.value(kNoLayer, "embed", RowSpace::tokens, dims.hidden, Builder::type_of(policy.residual));
  b.push(Embed{residual});
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    residual = dims.mixer(layer) == Mixer::attention ? attention_mixer(b, layer, residual)
                                                     : delta_mixer(b, layer, residual);
    residual = moe(b, layer, residual);
  }
  head(b, residual);
  schedule(plan);
  return plan;
}

}  // namespace lily::plan
