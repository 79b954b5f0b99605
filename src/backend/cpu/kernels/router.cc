#include "backend/cpu/kernels/router.h"

#include <algorithm>

#include "model/dims.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/router.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

// p[i] = exp(logits[i] - max): the softmax up to a factor that the renormalisation cancels.
void exponentials(const float* logits, int n, float* p) {
  const hn::CappedTag<float, 16> d;
  const float largest = *std::max_element(logits, logits + n);
  const int step = static_cast<int>(hn::Lanes(d));
  std::copy_n(logits, n, p);
  std::fill(p + n, p + (n + 15) / 16 * 16, largest);
  for (int i = 0; i < n; i += step)
    hn::StoreU(exp_of(d, hn::Sub(hn::LoadU(d, p + i), hn::Set(d, largest))), d, p + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(exponentials);

void router_top(const float* logits, int n_experts, float* p, int32_t* ids, float* weights) {
  constexpr int k = model::kExpertsPerToken;
  HWY_DYNAMIC_DISPATCH(exponentials)(logits, n_experts, p);
  // Insertion into a list of 8; a later expert enters only if strictly larger, so that ties keep the lower
  // index.
  int n = 0;
  for (int32_t e = 0; e < n_experts; ++e) {
    if (n == k && !(p[e] > weights[k - 1])) continue;
    int at = n < k ? n++ : k - 1;
    for (; at > 0 && p[e] > weights[at - 1]; --at) {
      weights[at] = weights[at - 1];
      ids[at] = ids[at - 1];
    }
    weights[at] = p[e];
    ids[at] = e;
  }
  float sum = 0;
  for (int j = 0; j < k; ++j) sum += weights[j];
  for (int j = 0; j < k; ++j) weights[j] /= sum;
}

}  // namespace lily::backend::cpu
#endif
