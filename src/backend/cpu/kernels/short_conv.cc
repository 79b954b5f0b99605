#include "backend/cpu/kernels/short_conv.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/short_conv.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

void conv(const ConvArgs& a, int64_t begin, int64_t end) {
  const hn::CappedTag<float, 16> d;
  const int64_t c = a.channels;
  for (int64_t i = begin; i < end; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto x0 = hn::Zero(d), x1 = hn::Zero(d), x2 = hn::Zero(d);
    if (a.state_in != nullptr) {
      x0 = hn::LoadU(d, a.state_in + i);
      x1 = hn::LoadU(d, a.state_in + c + i);
      x2 = hn::LoadU(d, a.state_in + 2 * c + i);
    }
    const auto w0 = hn::LoadU(d, a.w + i), w1 = hn::LoadU(d, a.w + c + i);
    const auto w2 = hn::LoadU(d, a.w + 2 * c + i), w3 = hn::LoadU(d, a.w + 3 * c + i);
    for (int64_t t = 0; t < a.n_rows; ++t) {
      const auto x3 = hn::LoadU(d, a.x + t * a.x_stride + i);
      auto sum = hn::Mul(w0, x0);
      sum = hn::MulAdd(w1, x1, sum);
      sum = hn::MulAdd(w2, x2, sum);
      sum = hn::MulAdd(w3, x3, sum);
      hn::StoreU(silu_of(d, sum), d, a.y + t * a.y_stride + i);
      x0 = x1;
      x1 = x2;
      x2 = x3;
    }
    hn::StoreU(x0, d, a.state_out + i);
    hn::StoreU(x1, d, a.state_out + c + i);
    hn::StoreU(x2, d, a.state_out + 2 * c + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(conv);

void short_conv(const ConvArgs& args, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(conv)(args, begin, end);
}

}  // namespace lily::backend::cpu
#endif
