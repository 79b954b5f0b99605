#include "backend/cpu/kernels/logits.h"

#include <algorithm>
#include <limits>

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/logits.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

using LogitTag = hn::CappedTag<float, 16>;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The logits from i on, of n in all; minus infinity for NaN and for what is behind the end.
HWY_INLINE hn::Vec<LogitTag> logits_at(LogitTag d, const float* HWY_RESTRICT logits, int64_t i, int64_t n) {
  const auto nothing = hn::Set(d, kNothing);
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  if (i + step > n) {
    HWY_ALIGN float rest[16];
    for (int64_t lane = 0; lane < step; ++lane) rest[lane] = i + lane < n ? logits[i + lane] : kNothing;
    const auto x = hn::Load(d, rest);
    return hn::IfThenElse(hn::Eq(x, x), x, nothing);
  }
  const auto x = hn::LoadU(d, logits + i);
  return hn::IfThenElse(hn::Eq(x, x), x, nothing);
}

void maxima_of(const float* HWY_RESTRICT logits, int64_t n, float* HWY_RESTRICT maxima) {
  const LogitTag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t first = 0; first < n; first += kLogitChunk) {
    const int64_t last = std::min(first + kLogitChunk, n);
    auto largest = hn::Set(d, kNothing);
    for (int64_t i = first; i < last; i += step) largest = hn::Max(largest, logits_at(d, logits, i, last));
    maxima[first / kLogitChunk] = hn::GetLane(hn::MaxOfLanes(d, largest));
  }
}

double exponentials_of(const float* HWY_RESTRICT logits, int64_t n, float largest) {
  const LogitTag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  const auto subtract = hn::Set(d, largest);
  double total = 0;
  for (int64_t first = 0; first < n; first += kLogitChunk) {
    const int64_t last = std::min(first + kLogitChunk, n);
    auto sum = hn::Zero(d);
    for (int64_t i = first; i < last; i += step)
      sum = hn::Add(sum, exp_of(d, hn::Sub(logits_at(d, logits, i, last), subtract)));
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(maxima_of);
HWY_EXPORT(exponentials_of);

void chunk_maxima(const float* logits, int64_t n, float* maxima) {
  HWY_DYNAMIC_DISPATCH(maxima_of)(logits, n, maxima);
}

double sum_of_exponentials(const float* logits, int64_t n, float largest) {
  if (largest == -std::numeric_limits<float>::infinity()) return 0;
  return HWY_DYNAMIC_DISPATCH(exponentials_of)(logits, n, largest);
}

}  // namespace lily::backend::cpu
#endif
