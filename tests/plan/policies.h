// Policies for tests of the plan: from no fusion at all to every one.
#pragma once

#include <vector>

#include "plan/policy.h"

namespace lily::plan {

inline Policy plain_policy() {
  Policy p;
  p.mechanisms.set();
  return p;
}

inline Policy fused_policy() {
  Policy p = plain_policy();
  p.prefill = p.decode = {.norm_linear = true,
                          .linear_add = true,
                          .norm_router = true,
                          .gate_up = true,
                          .shared_in_experts = true,
                          .down_combine = true,
                          .qk_prepare = true,
                          .delta_norm = true,
                          .delta_mixer = true,
                          .attention_gate = true};
  return p;
}

inline std::vector<Policy> test_policies() {
  std::vector<Policy> all = {plain_policy(), fused_policy()};
  for (int i = 0; i < kMechanisms; ++i) all.push_back(*without(fused_policy(), static_cast<Mechanism>(i)));
  return all;
}

}  // namespace lily::plan
