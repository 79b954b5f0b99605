// exp, sigmoid and SiLU of fp32 vectors, for kernel files. Included once per target.
#if defined(LILY_CPU_MATH_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LILY_CPU_MATH_INL
#undef LILY_CPU_MATH_INL
#else
#define LILY_CPU_MATH_INL
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A few units in the last place. Beyond the range of a float the result saturates near the largest float and
// at 0. NaN stays NaN, which the library's minimum and exponential would lose.
template <class D, class V>
HWY_INLINE V exp_of(D d, V x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, hn::Min(x, hn::Set(d, 88.0f))));
}

template <class D, class V>
HWY_INLINE V sigmoid_of(D d, V x) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp_of(d, hn::Neg(x))));
}

template <class D, class V>
HWY_INLINE V silu_of(D d, V x) {
  return hn::Mul(x, sigmoid_of(d, x));
}

// Sum of a[i] * b[i] over n values, n a multiple of 16. One order of addition whatever the alignment.
HWY_INLINE float dot_of(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, int64_t n) {
  const hn::CappedTag<float, 16> d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 4 * step <= n; i += 4 * step) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, a + i + step), hn::LoadU(d, b + i + step), sum1);
    sum2 = hn::MulAdd(hn::LoadU(d, a + i + 2 * step), hn::LoadU(d, b + i + 2 * step), sum2);
    sum3 = hn::MulAdd(hn::LoadU(d, a + i + 3 * step), hn::LoadU(d, b + i + 3 * step), sum3);
  }
  for (; i < n; i += step) sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#endif
