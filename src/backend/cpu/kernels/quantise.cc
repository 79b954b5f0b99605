#include "backend/cpu/kernels/quantise.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/quantise.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Writes the 32 even or the 32 odd columns of a group as bytes in rising order.
template <int kPlanes, class D, class V>
void split_planes(D, V q, int8_t* p0, int8_t* p1) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<int8_t, D> d8;
  const auto integer = hn::NearestInt(q);
  if constexpr (kPlanes == 1) return hn::StoreU(hn::DemoteTo(d8, integer), d8, p0);
  const auto high = hn::ShiftRight<8>(hn::Add(integer, hn::Set(di, 128)));
  const auto low = hn::Sub(integer, hn::ShiftLeft<8>(high));
  hn::StoreU(hn::DemoteTo(d8, high), d8, p0);
  hn::StoreU(hn::DemoteTo(d8, low), d8, p1);
}

template <int kPlanes>
HWY_INLINE void quantise_to(const float* HWY_RESTRICT x, int8_t* HWY_RESTRICT planes,
                            GroupScale* HWY_RESTRICT scales, int64_t n_groups) {
  constexpr int kMax = kPlanes == 1 ? kOnePlaneMax : kPlaneMax;
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::CappedTag<int32_t, 8> d8words;
  const int n = static_cast<int>(hn::Lanes(d));
  for (int64_t group = 0; group < n_groups; ++group, x += 64, planes += 64 * kPlanes) {
    auto largest = hn::Zero(d);
    auto poison = hn::Zero(d);  // 0, or NaN if any value is not finite: max() may drop a NaN
    for (int i = 0; i < 64; i += n) {
      const auto v = hn::LoadU(d, x + i);
      largest = hn::Max(largest, hn::Abs(v));
      poison = hn::MulAdd(v, hn::Zero(d), poison);
    }
    const float peak = hn::GetLane(hn::MaxOfLanes(d, largest));
    const float bad = hn::GetLane(hn::SumOfLanes(d, poison));
    if (peak == 0 || bad != 0) {  // bad != 0 holds for NaN
      for (int i = 0; i < 64 * kPlanes; ++i) planes[i] = 0;
      // The sum of 1 makes a NaN scale count even where all codes are zero.
      scales[group] = bad != 0 ? GroupScale{bad, 1} : GroupScale{0, 0};
      continue;
    }
    // A subnormal peak would overflow the inverse; such a group is as good as zero.
    const float scale = peak * (1.0f / kMax);
    const float inverse = peak > 1e-30f ? static_cast<float>(kMax) / peak : 0.0f;
    const auto factor = hn::Set(d, inverse);
    const auto limit = hn::Set(d, static_cast<float>(kMax));
    alignas(64) int8_t halves[2][2][32];  // [plane][even, odd][column / 2]
    auto sum = hn::Zero(di);
    for (int i = 0; i < 64; i += 2 * n) {
      hn::Vec<decltype(d)> even, odd;
      hn::LoadInterleaved2(d, x + i, even, odd);
      even = hn::Max(hn::Min(hn::Mul(even, factor), limit), hn::Neg(limit));
      odd = hn::Max(hn::Min(hn::Mul(odd, factor), limit), hn::Neg(limit));
      split_planes<kPlanes>(d, even, halves[0][0] + i / 2, halves[1][0] + i / 2);
      split_planes<kPlanes>(d, odd, halves[0][1] + i / 2, halves[1][1] + i / 2);
      sum = hn::Add(sum, hn::Add(hn::NearestInt(even), hn::NearestInt(odd)));
    }
    for (int plane = 0; plane < kPlanes; ++plane) {
      const auto* evens = reinterpret_cast<const int32_t*>(halves[plane][0]);
      const auto* odds = reinterpret_cast<const int32_t*>(halves[plane][1]);
      auto* out = reinterpret_cast<int32_t*>(planes + 64 * plane);
      for (size_t i = 0; i < 8; i += hn::Lanes(d8words))
        hn::StoreInterleaved2(hn::LoadU(d8words, evens + i), hn::LoadU(d8words, odds + i), d8words,
                              out + 2 * i);
    }
    scales[group] = {scale, static_cast<float>(hn::GetLane(hn::SumOfLanes(di, sum)))};
  }
}

void quantise(const float* x, int8_t* planes, GroupScale* scales, int64_t n_groups, int n_planes) {
  if (n_planes == 1) quantise_to<1>(x, planes, scales, n_groups);
  else quantise_to<2>(x, planes, scales, n_groups);
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(quantise);

QuantisedRows quantised_rows(void* memory, int64_t rows, int64_t cols, int n_planes) {
  auto* planes = static_cast<int8_t*>(memory);
  return {planes, reinterpret_cast<GroupScale*>(planes + rows * cols * n_planes), cols / model::kQuantGroup,
          n_planes};
}

void quantise_groups(const float* x, const QuantisedRows& out, int64_t row, int64_t group_begin,
                     int64_t group_end) {
  HWY_DYNAMIC_DISPATCH(quantise)
  (x + group_begin * model::kQuantGroup, out.row_planes(row) + group_begin * out.group_bytes(),
   out.row_scales(row) + group_begin, group_end - group_begin, out.n_planes);
}

void quantise_rest(const float* x, const QuantisedRows& out, const QuantisedRows& rest, int64_t row) {
  constexpr int kColumnOf[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of the bytes of a plane
  const int8_t* planes = out.row_planes(row);
  const GroupScale* scales = out.row_scales(row);
  for (int64_t group = 0; group < out.n_groups; ++group, planes += 2 * model::kQuantGroup) {
    float left[model::kQuantGroup];
    for (int i = 0; i < model::kQuantGroup; ++i) {
      const int col = i / 8 * 8 + kColumnOf[i % 8];
      const double held =
          static_cast<double>(scales[group].scale) * (256 * planes[i] + planes[model::kQuantGroup + i]);
      left[col] = static_cast<float>(x[group * model::kQuantGroup + col] - held);
    }
    HWY_DYNAMIC_DISPATCH(quantise)
    (left, rest.row_planes(row) + group * rest.group_bytes(), rest.row_scales(row) + group, 1, rest.n_planes);
  }
}

}  // namespace lily::backend::cpu
#endif
