// What each fused op stands for. The reference backend runs these lists, so they are also the ops'
// definition.
#include <fmt/format.h>

#include "base/error.h"
#include "plan/plan.h"

namespace lily::plan {
namespace {

using model::kExpertsPerToken;
using model::kHeadDim;
using model::kNoLayer;

class Expander {
 public:
  explicit Expander(const Plan& fused) : plan_(fused) {
    plan_.ops.clear();
    for (const Op& op : fused.ops) std::visit([&](const auto& o) { expand(o); }, op);
  }
  Plan take() { return std::move(plan_); }

 private:
  const model::Dims& dims() const { return plan_.dims; }
  View whole(ValueId id) const { return {id, 0, plan_.value(id).cols}; }
  Type activation() const { return plan_.policy.activation == FloatType::f32 ? Type::f32 : Type::bf16; }

  ValueId temporary(RowSpace rows, int64_t cols, Type type) {
    plan_.values.push_back(
        {.name = fmt::format("temporary.{}", plan_.values.size()), .rows = rows, .cols = cols, .type = type});
    return static_cast<ValueId>(plan_.values.size() - 1);
  }

  template <typename T>
  void expand(const T& simple) {
    plan_.ops.emplace_back(simple);
  }

  void expand(const NormLinear& o) {
    const ValueId normed = temporary(plan_.value(o.x).rows, dims().hidden, activation());
    expand(RmsNorm{o.norm, o.x, normed});
    expand(Linear{o.weights, whole(normed), o.y});
  }
  void expand(const LinearAdd& o) {
    const ValueId y = temporary(RowSpace::tokens, dims().hidden, activation());
    expand(Linear{{o.weight}, whole(o.x), y});
    expand(Add{y, o.residual_in, o.residual_out});
  }
  void expand(const DeltaRuleNorm& r) {
    const ValueId o = temporary(RowSpace::tokens, dims().value_width(), Type::f32);
    expand(DeltaRule{r.layer, r.scan, r.q, r.k, r.v, r.g, r.beta, o});
    expand(GatedNorm{r.layer, o, r.z, r.y});
  }
  void expand(const DeltaMixer& o) {
    const int64_t keys = dims().key_width(), heads = dims().n_value_heads;
    const ValueId mixed = temporary(RowSpace::tokens, dims().conv_channels(), activation());
    expand(ShortConv{o.layer, o.qkv, mixed});
    const ValueId q = temporary(RowSpace::tokens, keys, Type::f32);
    const ValueId k = temporary(RowSpace::tokens, keys, Type::f32);
    const ValueId g = temporary(RowSpace::tokens, heads, Type::f32);
    const ValueId beta = temporary(RowSpace::tokens, heads, Type::f32);
    expand(DeltaPrepare{o.layer, {mixed, 0, keys}, {mixed, keys, keys}, o.b, o.a, q, k, g, beta});
    expand(DeltaRuleNorm{o.layer, o.scan, q, k, {mixed, 2 * keys, dims().value_width()}, g, beta, o.z, o.y});
  }
  void expand(const QkPrepare& o) {
    expand(HeadNormRope{{Weight::q_norm, o.layer}, o.q_gate, 2 * kHeadDim, o.q});
    const ValueId k = temporary(RowSpace::tokens, dims().kv_width(), activation());
    expand(HeadNormRope{{Weight::k_norm, o.layer}, o.k, kHeadDim, k});
    expand(KvAppend{o.layer, k, o.v});
  }
  void expand(const GatedAttention& a) {
    ValueId q = a.q;
    if (a.prepares()) {
      q = temporary(RowSpace::tokens, dims().q_width(), activation());
      expand(QkPrepare{a.layer, a.gate, a.k, a.v, q});
    }
    const ValueId o = temporary(RowSpace::tokens, dims().q_width(), activation());
    expand(Attention{a.layer, a.path, q, o});
    expand(AttentionGate{o, a.gate, a.y});
  }
  void expand(const NormRouter& o) {
    expand(RmsNorm{{Weight::post_norm, o.layer}, o.x, o.normed});
    expand(Linear{{{Weight::router, o.layer}, {Weight::shared_gate, o.layer}}, whole(o.normed), o.logits});
    if (o.ids != kNoValue) expand(RouterTop{{o.logits, 0, dims().n_experts}, o.ids, o.weights});
  }
  void expand(const ExpertsGateUp& o) {
    if (o.routes()) expand(RouterTop{o.router, o.routing.ids, o.weights});
    const int64_t width = dims().expert_width;
    const ValueId gate = temporary(RowSpace::routed, width, activation());
    const ValueId up = temporary(RowSpace::routed, width, activation());
    expand(ExpertsLinear{{Weight::expert_gate, o.layer}, o.routing, o.x, gate, o.expanded_gate});
    expand(ExpertsLinear{{Weight::expert_up, o.layer}, o.routing, o.x, up, o.expanded_up});
    expand(SwiGlu{whole(gate), whole(up), o.y});
    if (o.shared == kNoValue) return;
    const int64_t shared = dims().shared_width;
    const ValueId gate_up = temporary(RowSpace::tokens, 2 * shared, activation());
    expand(Linear{
        {{Weight::shared_gate_proj, o.layer}, {Weight::shared_up_proj, o.layer}}, whole(o.x), gate_up});
    expand(SwiGlu{{gate_up, 0, shared}, {gate_up, shared, shared}, o.shared});
  }
  void expand(const ExpertsDownCombine& o) {
    const ValueId experts = temporary(RowSpace::routed, dims().hidden, activation());
    expand(ExpertsLinear{{Weight::expert_down, o.layer}, o.routing, o.x, experts, o.expanded});
    ValueId shared = o.shared;
    if (o.shared_down) {
      shared = temporary(RowSpace::tokens, dims().hidden, activation());
      expand(Linear{{{Weight::shared_down_proj, o.layer}}, whole(o.shared), shared});
    }
    expand(
        ExpertsCombine{o.routing, o.weights, experts, shared, o.shared_gate, o.residual_in, o.residual_out});
  }

  Plan plan_;
};

}  // namespace

Plan expanded(const Plan& plan) {
  Plan result = Expander(plan).take();
  schedule(result);
  return result;
}

}  // namespace lily::plan
