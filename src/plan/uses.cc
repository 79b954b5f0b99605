#include "plan/uses.h"

namespace lily::plan {
namespace {

// Collects uses in the order: inputs, weights, state, outputs.
class Collector {
 public:
  void read(ValueId id) { add_value(id, Access::read); }
  void read(const View& view) { add_value(view.value, Access::read); }
  void write(ValueId id) { add_value(id, Access::write); }
  void weight(WeightId id) { uses_.push_back({.resource = Resource::weight, .weight = id}); }
  void weight(Weight kind, int layer) { weight(WeightId{kind, layer}); }
  void weights(const std::vector<WeightId>& ids) {
    for (const WeightId id : ids) weight(id);
  }
  void state(Resource resource, int layer) {
    uses_.push_back({.resource = resource, .access = Access::update, .layer = layer});
  }
  void kv(int layer, Access access) {
    uses_.push_back({.resource = Resource::kv, .access = access, .layer = layer});
  }
  void step() { uses_.push_back({.resource = Resource::step}); }
  void token_slot(Access access) { uses_.push_back({.resource = Resource::token_slot, .access = access}); }
  // In place where both are one value.
  void residual(ValueId in, ValueId out) {
    if (in == out) {
      add_value(in, Access::update);
    } else {
      read(in);
      write(out);
    }
  }
  void routing(const Routing& r) {
    for (const ValueId id : {r.ids, r.offsets, r.order, r.position, r.blocks, r.n_blocks}) read(id);
  }
  void delta_gates(int layer) {
    weight(Weight::a_log, layer);
    weight(Weight::dt_bias, layer);
  }
  std::vector<Use> take() { return std::move(uses_); }

 private:
  void add_value(ValueId id, Access access) {
    if (id != kNoValue) uses_.push_back({.resource = Resource::value, .access = access, .value = id});
  }
  std::vector<Use> uses_;
};

}  // namespace

std::vector<Use> uses(const Op& op) {
  Collector c;
  std::visit(overloaded{
                 [&](const Embed& o) {
                   c.step();
                   c.token_slot(Access::read);
                   c.weight(Weight::embed, model::kNoLayer);
                   c.write(o.y);
                 },
                 [&](const RmsNorm& o) {
                   c.read(o.x);
                   c.weight(o.weight);
                   c.write(o.y);
                 },
                 [&](const Linear& o) {
                   c.read(o.x);
                   c.weights(o.weights);
                   c.write(o.y);
                 },
                 [&](const Add& o) {
                   c.read(o.x);
                   c.residual(o.residual_in, o.residual_out);
                 },
                 [&](const ShortConv& o) {
                   c.step();
                   c.read(o.x);
                   c.weight(Weight::conv, o.layer);
                   c.state(Resource::conv_state, o.layer);
                   c.write(o.y);
                 },
                 [&](const DeltaPrepare& o) {
                   for (const View& view : {o.q_in, o.k_in, o.b, o.a}) c.read(view);
                   c.delta_gates(o.layer);
                   for (const ValueId id : {o.q, o.k, o.g, o.beta}) c.write(id);
                 },
                 [&](const DeltaRule& o) {
                   c.step();
                   for (const ValueId id : {o.q, o.k, o.g, o.beta}) c.read(id);
                   c.read(o.v);
                   c.state(Resource::delta_state, o.layer);
                   c.write(o.o);
                 },
                 [&](const GatedNorm& o) {
                   c.read(o.o);
                   c.read(o.z);
                   c.weight(Weight::delta_norm, o.layer);
                   c.write(o.y);
                 },
                 [&](const HeadNormRope& o) {
                   c.step();
                   c.read(o.x);
                   c.weight(o.weight);
                   c.write(o.y);
                 },
                 [&](const KvAppend& o) {
                   c.step();
                   c.read(o.k);
                   c.read(o.v);
                   c.kv(o.layer, Access::write);
                 },
                 [&](const Attention& o) {
                   c.step();
                   c.read(o.q);
                   c.kv(o.layer, Access::read);
                   c.write(o.o);
                 },
                 [&](const AttentionGate& o) {
                   c.read(o.o);
                   c.read(o.gate);
                   c.write(o.y);
                 },
                 [&](const RouterTop& o) {
                   c.read(o.logits);
                   c.write(o.ids);
                   c.write(o.weights);
                 },
                 [&](const ExpertGroups& o) {
                   c.step();
                   c.read(o.ids);
                   for (const ValueId id : {o.offsets, o.order, o.position, o.blocks, o.n_blocks})
                     c.write(id);
                 },
                 [&](const ExpandWeight& o) {
                   c.weight(o.weight);
                   c.write(o.y);
                 },
                 [&](const ExpertsLinear& o) {
                   c.routing(o.routing);
                   c.read(o.x);
                   if (o.expanded == kNoValue) c.weight(o.weight);
                   c.read(o.expanded);
                   c.write(o.y);
                 },
                 [&](const SwiGlu& o) {
                   c.read(o.gate);
                   c.read(o.up);
                   c.write(o.y);
                 },
                 [&](const ExpertsCombine& o) {
                   c.routing(o.routing);
                   for (const ValueId id : {o.weights, o.experts, o.shared}) c.read(id);
                   c.read(o.shared_gate);
                   c.residual(o.residual_in, o.residual_out);
                 },
                 [&](const GatherRows& o) {
                   c.step();
                   c.read(o.x);
                   c.write(o.y);
                 },
                 [&](const GreedyToken& o) {
                   c.step();
                   c.read(o.logits);
                   c.write(o.token);
                   c.token_slot(Access::write);
                 },
                 [&](const SampleToken& o) {
                   c.step();
                   c.read(o.logits);
                   c.write(o.token);
                   c.token_slot(Access::write);
                 },
                 [&](const TopCandidates& o) {
                   c.step();
                   c.read(o.logits);
                   for (const ValueId id : {o.ids, o.values, o.logsumexp}) c.write(id);
                 },
                 [&](const NormLinear& o) {
                   c.read(o.x);
                   c.weight(o.norm);
                   c.weights(o.weights);
                   c.write(o.y);
                 },
                 [&](const LinearAdd& o) {
                   c.read(o.x);
                   c.weight(o.weight);
                   c.residual(o.residual_in, o.residual_out);
                 },
                 [&](const DeltaRuleNorm& o) {
                   c.step();
                   for (const ValueId id : {o.q, o.k, o.g, o.beta}) c.read(id);
                   c.read(o.v);
                   c.read(o.z);
                   c.weight(Weight::delta_norm, o.layer);
                   c.state(Resource::delta_state, o.layer);
                   c.write(o.y);
                 },
                 [&](const DeltaMixer& o) {
                   c.step();
                   for (const View& view : {o.qkv, o.z, o.b, o.a}) c.read(view);
                   c.weight(Weight::conv, o.layer);
                   c.delta_gates(o.layer);
                   c.weight(Weight::delta_norm, o.layer);
                   c.state(Resource::conv_state, o.layer);
                   c.state(Resource::delta_state, o.layer);
                   c.write(o.y);
                 },
                 [&](const QkPrepare& o) {
                   c.step();
                   for (const View& view : {o.q_gate, o.k, o.v}) c.read(view);
                   c.weight(Weight::q_norm, o.layer);
                   c.weight(Weight::k_norm, o.layer);
                   c.kv(o.layer, Access::write);
                   c.write(o.q);
                 },
                 [&](const GatedAttention& o) {
                   c.step();
                   c.read(o.q);
                   c.read(o.gate);
                   if (o.prepares()) {
                     c.read(o.k);
                     c.read(o.v);
                     c.weight(Weight::q_norm, o.layer);
                     c.weight(Weight::k_norm, o.layer);
                   }
                   c.kv(o.layer, o.prepares() ? Access::update : Access::read);
                   c.write(o.y);
                 },
                 [&](const NormRouter& o) {
                   c.read(o.x);
                   for (const Weight w : {Weight::post_norm, Weight::router, Weight::shared_gate})
                     c.weight(w, o.layer);
                   for (const ValueId id : {o.normed, o.logits, o.ids, o.weights}) c.write(id);
                 },
                 [&](const ExpertsGateUp& o) {
                   if (o.routes()) {
                     c.read(o.router);
                     c.write(o.routing.ids);
                     c.write(o.weights);
                   } else {
                     c.routing(o.routing);
                   }
                   c.read(o.x);
                   if (o.expanded_gate == kNoValue) {
                     c.weight(Weight::expert_gate, o.layer);
                     c.weight(Weight::expert_up, o.layer);
                   }
                   c.read(o.expanded_gate);
                   c.read(o.expanded_up);
                   if (o.shared != kNoValue) {
                     c.weight(Weight::shared_gate_proj, o.layer);
                     c.weight(Weight::shared_up_proj, o.layer);
                   }
                   c.write(o.y);
                   c.write(o.shared);
                 },
                 [&](const ExpertsDownCombine& o) {
                   c.routing(o.routing);
                   for (const ValueId id : {o.x, o.weights, o.shared}) c.read(id);
                   c.read(o.shared_gate);
                   if (o.expanded == kNoValue) c.weight(Weight::expert_down, o.layer);
                   c.read(o.expanded);
                   if (o.shared_down) c.weight(Weight::shared_down_proj, o.layer);
                   c.residual(o.residual_in, o.residual_out);
                 },
             },
             op);
  return c.take();
}

}  // namespace lily::plan
