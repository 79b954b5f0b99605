#include "plan/op.h"

#include "base/error.h"

namespace lily::plan {

int type_bytes(Type type) {
  switch (type) {
    case Type::f32:
    case Type::i32:
      return 4;
    case Type::bf16:
      return 2;
  }
  LILY_CHECK(false, "type {}", static_cast<int>(type));
  return 0;
}

const char* kind_name(const Op& op) {
  return std::visit(overloaded{
                        [](const Embed&) { return "embed"; },
                        [](const RmsNorm&) { return "rms_norm"; },
                        [](const Linear&) { return "linear"; },
                        [](const Add&) { return "add"; },
                        [](const ShortConv&) { return "short_conv"; },
                        [](const DeltaPrepare&) { return "delta_prepare"; },
                        [](const DeltaRule&) { return "delta_rule"; },
                        [](const GatedNorm&) { return "gated_norm"; },
                        [](const HeadNormRope&) { return "head_norm_rope"; },
                        [](const KvAppend&) { return "kv_append"; },
                        [](const Attention&) { return "attention"; },
                        [](const AttentionGate&) { return "attention_gate"; },
                        [](const RouterTop&) { return "router_top"; },
                        [](const ExpertGroups&) { return "expert_groups"; },
                        [](const ExpandWeight&) { return "expand_weight"; },
                        [](const ExpertsLinear&) { return "experts_linear"; },
                        [](const SwiGlu&) { return "swiglu"; },
                        [](const ExpertsCombine&) { return "experts_combine"; },
                        [](const GatherRows&) { return "gather_rows"; },
                        [](const GreedyToken&) { return "greedy_token"; },
                        [](const SampleToken&) { return "sample_token"; },
                        [](const TopCandidates&) { return "top_candidates"; },
                        [](const NormLinear&) { return "norm_linear"; },
                        [](const LinearAdd&) { return "linear_add"; },
                        [](const DeltaRuleNorm&) { return "delta_rule_norm"; },
                        [](const DeltaMixer&) { return "delta_mixer"; },
                        [](const QkPrepare&) { return "qk_prepare"; },
                        [](const GatedAttention&) { return "gated_attention"; },
                        [](const NormRouter&) { return "norm_router"; },
                        [](const ExpertsGateUp&) { return "experts_gate_up"; },
                        [](const ExpertsDownCombine&) { return "experts_down_combine"; },
                    },
                    op);
}

}  // namespace lily::plan
