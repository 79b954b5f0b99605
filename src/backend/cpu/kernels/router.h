// (22) (23) softmax over all experts, the 8 largest (larger p, then lower index), renormalised.
#pragma once

#include <cstdint>

namespace lily::backend::cpu {

// ids and weights: [8] by falling weight. `p` is room for n_experts floats (rounded up to 16). At least 8
// experts.
void router_top(const float* logits, int n_experts, float* p, int32_t* ids, float* weights);

}  // namespace lily::backend::cpu
