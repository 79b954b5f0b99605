#include "backend/cpu/kernels/dot_rate.h"

#include "base/error.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/dot_rate.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/dot_tile-inl.h"
// clang-format on

LILY_BEFORE_DOT_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

// The compiler may take nothing out of the loop and no product for another one.
HWY_INLINE void keep(VecI32& v) {
#if HWY_ARCH_X86
  asm volatile("" : "+v"(v.raw));
#else
  asm volatile("" : "+w"(v.raw));
#endif
}

int64_t dot_products(int64_t n) {
  // As many as hide the latency of a product and leave the registers room.
  constexpr int kSums = HWY_ARCH_X86 && !kWideCodes ? 6 : 12, kLines = 4;
  const TileI32 d;
  VecI32 codes = hn::Set(d, 0x01020304), x = hn::Set(d, 0x01010101);
  VecI32 sums[kSums];
  for (VecI32& sum : sums) sum = hn::Zero(d);
  const int64_t per_turn = int64_t{kSums} * kLines * 4 * static_cast<int64_t>(hn::Lanes(d));
  const int64_t n_turns = (n + per_turn - 1) / per_turn;
  for (int64_t turn = 0; turn < n_turns; ++turn) {
    Partial partials[kSums];
    for (int s = 0; s < kSums; ++s) partials[s] = begin_partial(sums[s]);
    HWY_UNROLL(4)
    for (int line = 0; line < kLines; ++line) {
      HWY_UNROLL(12)
      for (int s = 0; s < kSums; ++s) {
        keep(codes);
        partials[s] = add_dot4(partials[s], codes, x);
      }
    }
    for (int s = 0; s < kSums; ++s) {
      sums[s] = end_partial(sums[s], partials[s]);
      keep(sums[s]);
    }
  }
  VecI32 total = hn::Zero(d);
  for (const VecI32& sum : sums) total = hn::Add(total, sum);
  // 4 + 3 + 2 + 1 for four products.
  LILY_CHECK(hn::GetLane(total) == static_cast<int32_t>(static_cast<uint32_t>(n_turns * kSums * kLines * 10)),
             "{} turns sum to {}", n_turns, hn::GetLane(total));
  return n_turns * per_turn;
}

// kAsks: ahead, as the kernels do (LinesAhead).
template <bool kAsks>
uint64_t sum(const uint64_t* words, size_t n) {
  const hn::ScalableTag<uint64_t> d;
  constexpr size_t kSums = 8;  // independent, so that memory is what is waited for
  hn::Vec<decltype(d)> sums[kSums];
  for (auto& s : sums) s = hn::Zero(d);
  const size_t lanes = hn::Lanes(d);
  constexpr size_t kLine = 64 / sizeof(uint64_t), kGroup = 9 * kLine;  // of 4-bit weights
  constexpr size_t kAhead = kGroupsAhead * kGroup, kFarAhead = kGroupsFarAhead * kGroup;
  for (size_t i = 0; i + kSums * lanes <= n; i += kSums * lanes) {
    for (size_t at = i; kAsks && at < i + kSums * lanes && at + kFarAhead < n; at += kLine) {
      __builtin_prefetch(words + at + kAhead, 0, 2);
      __builtin_prefetch(words + at + kFarAhead, 0, 1);
    }
    for (size_t s = 0; s < kSums; ++s) sums[s] = hn::Add(sums[s], hn::LoadU(d, words + i + s * lanes));
  }
  for (size_t s = 1; s < kSums; ++s) sums[0] = hn::Add(sums[0], sums[s]);
  uint64_t total = hn::GetLane(hn::SumOfLanes(d, sums[0]));
  for (size_t i = n / (kSums * lanes) * (kSums * lanes); i < n; ++i) total += words[i];
  return total;
}

uint64_t sum_plain(const uint64_t* words, size_t n) { return sum<false>(words, n); }
uint64_t sum_ahead(const uint64_t* words, size_t n) { return sum<true>(words, n); }

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(dot_products);
HWY_EXPORT(sum_plain);
HWY_EXPORT(sum_ahead);

int64_t run_dot_products(int64_t n) { return HWY_DYNAMIC_DISPATCH(dot_products)(n); }

uint64_t sum_words(std::span<const uint64_t> words, bool asks_ahead) {
  if (asks_ahead) return HWY_DYNAMIC_DISPATCH(sum_ahead)(words.data(), words.size());
  return HWY_DYNAMIC_DISPATCH(sum_plain)(words.data(), words.size());
}

}  // namespace lily::backend::cpu
#endif
