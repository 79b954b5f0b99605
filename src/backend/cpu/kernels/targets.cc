#include "backend/cpu/kernels/targets.h"

#include <algorithm>

#include "base/error.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/targets.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

SimdTarget this_target() {
#if HWY_TARGET == HWY_AVX3_DL
  return SimdTarget::avx512_vnni;
#elif HWY_TARGET == HWY_AVX2
  return SimdTarget::avx2;
#elif HWY_TARGET == HWY_SSSE3
  return SimdTarget::ssse3;
#elif HWY_TARGET == HWY_NEON
  return SimdTarget::neon;
#else
  return SimdTarget::scalar;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(this_target);

namespace {

struct Known {
  SimdTarget target;
  int64_t bit;
};

// Best first.
constexpr Known kKnown[] = {{SimdTarget::avx512_vnni, HWY_AVX3_DL},
                            {SimdTarget::avx2, HWY_AVX2},
                            {SimdTarget::ssse3, HWY_SSSE3},
                            {SimdTarget::neon, HWY_NEON},
                            {SimdTarget::scalar, HWY_SCALAR | HWY_EMU128}};

}  // namespace

std::string_view to_string(SimdTarget target) {
  switch (target) {
    case SimdTarget::avx512_vnni:
      return "AVX-512 VNNI";
    case SimdTarget::avx2:
      return "AVX2";
    case SimdTarget::ssse3:
      return "SSSE3";
    case SimdTarget::neon:
      return "NEON";
    case SimdTarget::scalar:
      return "scalar";
  }
  return "?";
}

std::vector<SimdTarget> runnable_targets() {
  hwy::SetSupportedTargetsForTest(0);
  const int64_t runnable = hwy::SupportedTargets() & HWY_TARGETS;
  std::vector<SimdTarget> targets;
  for (const Known& known : kKnown)
    if ((runnable & known.bit) != 0) targets.push_back(known.target);
  return targets;
}

SimdTarget current_target() { return HWY_DYNAMIC_DISPATCH(this_target)(); }

void use_target(SimdTarget target) {
  if (current_target() == target) return;
  const auto runnable = runnable_targets();
  LILY_CHECK(std::ranges::find(runnable, target) != runnable.end(), "target {}", to_string(target));
  for (const Known& known : kKnown)
    if (known.target == target) hwy::SetSupportedTargetsForTest(known.bit);
}

}  // namespace lily::backend::cpu
#endif
