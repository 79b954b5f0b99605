#include "backend/cpu/kernels/norm.h"

#include <cmath>

#include "model/dims.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/norm.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

void rms(const float* x, const float* w, float* y, int64_t n) {
  const hn::CappedTag<float, 16> d;
  const float mean = dot_of(x, x, n) / static_cast<float>(n);
  const auto factor = hn::Set(d, 1.0f / std::sqrt(mean + model::kNormEpsilon));
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), factor), hn::LoadU(d, w + i)), d, y + i);
}

void l2(const float* x, float scale, float* y, int64_t n) {
  const hn::CappedTag<float, 16> d;
  const auto factor = hn::Set(d, scale / std::sqrt(dot_of(x, x, n) + model::kNormEpsilon));
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), factor), d, y + i);
}

void gated(const float* o, const float* w, const float* z, float* y, int64_t n) {
  const hn::CappedTag<float, 16> d;
  const float mean = dot_of(o, o, n) / static_cast<float>(n);
  const auto factor = hn::Set(d, 1.0f / std::sqrt(mean + model::kNormEpsilon));
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto normed = hn::Mul(hn::Mul(hn::LoadU(d, o + i), factor), hn::LoadU(d, w + i));
    hn::StoreU(hn::Mul(normed, silu_of(d, hn::LoadU(d, z + i))), d, y + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(rms);
HWY_EXPORT(l2);
HWY_EXPORT(gated);

void rms_norm(const float* x, const float* w, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(rms)(x, w, y, n); }

void l2_norm(const float* x, float scale, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(l2)(x, scale, y, n); }

void gated_norm(const float* o, const float* w, const float* z, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(gated)(o, w, z, y, n);
}

}  // namespace lily::backend::cpu
#endif
