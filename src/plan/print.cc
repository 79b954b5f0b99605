#include "plan/print.h"

#include <fmt/format.h>

#include "plan/uses.h"

namespace lily::plan {
namespace {

void append(std::string& list, const std::string& item) {
  if (!list.empty()) list += ' ';
  list += item;
}

}  // namespace

std::string list(const Plan& plan, const Workload& workload) {
  std::string text;
  int stage = -1;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (plan.stage[i] != stage) {
      stage = plan.stage[i];
      text += fmt::format("-- stage {}\n", stage);
    }
    std::string inputs, outputs, weights;
    for (const Use& use : uses(plan.ops[i])) {
      switch (use.resource) {
        case Resource::value: {
          const std::string& name = plan.value(use.value).name;
          if (use.reads()) append(inputs, name);
          if (use.writes()) append(outputs, name);
          break;
        }
        case Resource::weight:
          append(weights, to_string(use.weight));
          break;
        case Resource::conv_state:
          append(outputs, fmt::format("conv_state.{}", use.layer));
          break;
        case Resource::delta_state:
          append(outputs, fmt::format("delta_state.{}", use.layer));
          break;
        case Resource::kv:
          append(use.writes() ? outputs : inputs, fmt::format("kv.{}", use.layer));
          break;
        case Resource::token_slot:
          append(use.writes() ? outputs : inputs, "token_slot");
          break;
        case Resource::step:
          break;
      }
    }
    const Cost c = cost(plan, plan.ops[i], workload);
    text += fmt::format("{:22} [{}] {} -> {} | {} bytes, {} flops\n", kind_name(plan.ops[i]), weights, inputs,
                        outputs, c.total_bytes(), c.flops);
  }
  return text;
}

std::string label(const Op& op) {
  for (const Use& use : uses(op)) {
    const int layer = use.resource == Resource::weight ? use.weight.layer : use.layer;
    if (layer != model::kNoLayer) return fmt::format("{}, layer {}", kind_name(op), layer);
  }
  return kind_name(op);
}

}  // namespace lily::plan
