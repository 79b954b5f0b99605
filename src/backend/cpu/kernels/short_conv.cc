#include "backend/cpu/kernels/short_conv.h"

#include <algorithm>

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

constexpr int64_t kChannelBlock = 128;  // four rows of it stay in L1, and a row is read as one piece

// Row t of a segment's input, or of the state where t is negative; null: zeros.
const float* input_row(const ConvArgs& a, int64_t t) {
  if (t >= 0) return a.x + t * a.x_stride;
  return a.state_in == nullptr ? nullptr : a.state_in + (t + 3) * a.channels;
}

void conv(const ConvArgs& a, int64_t begin, int64_t end) {
  const hn::CappedTag<float, 16> d;
  const int64_t c = a.channels, step = static_cast<int64_t>(hn::Lanes(d));
  const auto load = [&](const float* row, int64_t i)
                        HWY_ATTR { return row == nullptr ? hn::Zero(d) : hn::LoadU(d, row + i); };
  for (int64_t first = begin; first < end; first += kChannelBlock) {
    const int64_t last = std::min(first + kChannelBlock, end);
    for (int64_t t = 0; t < a.n_rows; ++t) {
      const float* x0 = input_row(a, t - 3);
      const float* x1 = input_row(a, t - 2);
      const float* x2 = input_row(a, t - 1);
      const float* x3 = input_row(a, t);
      float* y = a.y + t * a.y_stride;
      for (int64_t i = first; i < last; i += step) {
        auto sum = hn::Mul(hn::LoadU(d, a.w + i), load(x0, i));
        sum = hn::MulAdd(hn::LoadU(d, a.w + c + i), load(x1, i), sum);
        sum = hn::MulAdd(hn::LoadU(d, a.w + 2 * c + i), load(x2, i), sum);
        sum = hn::MulAdd(hn::LoadU(d, a.w + 3 * c + i), hn::LoadU(d, x3 + i), sum);
        hn::StoreU(silu_of(d, sum), d, y + i);
      }
    }
    // Oldest first: a row of the new state may stand where a newer row of the old one stood.
    for (int64_t r = 0; r < 3; ++r) {
      const float* from = input_row(a, a.n_rows - 3 + r);
      for (int64_t i = first; i < last; i += step) hn::StoreU(load(from, i), d, a.state_out + r * c + i);
    }
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
