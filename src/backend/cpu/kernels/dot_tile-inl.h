// Products of one weight tile (16 output rows, pack/cpu_tiles.h) with 1 to 8 activation rows: the inner loop
// of every linear layer, in decode and in prefill.
//
// q4, q8: y = sum over groups of scale_x * (scale_w * D + bias_w * Q), D = sum of code * (256 p0 + p1) as an
// exact int32 (for q8 at most 64 * 255 * 32639 < 2^29.9), Q the exact sum of the group's activations. q4 also
// takes rows of one plane, D = sum of code * p0: half the products. Groups
// are folded in rising order with one chain of fp32 FMAs per output, so a row's result does not depend on how
// many rows run beside it, and is the same in decode and prefill. bf16: y = sum of w * x in fp32, four
// partial sums by column mod 4.
//
// Bound by memory for one row (11 instructions a 64-byte line), by the int8 dot product for eight. The loops
// over a single quantised tile ask for what they will read kGroupsAhead groups later: the processor's own
// prefetchers stop at every page of 4 KiB, and a core that waits for each alone reads a third less.
#if defined(LILY_CPU_DOT_TILE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LILY_CPU_DOT_TILE_INL
#undef LILY_CPU_DOT_TILE_INL
#else
#define LILY_CPU_DOT_TILE_INL
#endif

#include <hwy/highway.h>

#include <cstring>

#include "backend/cpu/kernels/linear.h"

// Highway 1.0.3 checks for AVX512-VNNI before it chooses AVX3_DL, but does not tell the compiler. Functions
// that call the inner loop must be compiled so too.
#undef LILY_BEFORE_DOT_NAMESPACE
#if HWY_TARGET == HWY_AVX3_DL
#define LILY_BEFORE_DOT_NAMESPACE() \
  HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni") static_assert(true, "for the semicolon")
#else
#define LILY_BEFORE_DOT_NAMESPACE() HWY_BEFORE_NAMESPACE()
#endif

LILY_BEFORE_DOT_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using TileF32 = hn::CappedTag<float, 16>;
using TileI32 = hn::CappedTag<int32_t, 16>;
using TileU32 = hn::CappedTag<uint32_t, 16>;
using VecI32 = hn::Vec<TileI32>;
using VecU32 = hn::Vec<TileU32>;
using VecF32 = hn::Vec<TileF32>;

// ---- acc[lane] += the four bytes of codes[lane] times those of activations[lane].
//
// A partial sum takes four lines of codes below 16 (or of half-codes) before it is folded into an
// accumulator. kWideCodes: codes may use all 8 bits.

#if HWY_TARGET == HWY_AVX3_DL
inline constexpr bool kWideCodes = true;
inline constexpr int kRowsPerPass = 8;
using Partial = VecI32;
HWY_INLINE Partial begin_partial(VecI32 acc) { return acc; }
HWY_INLINE Partial add_dot4(Partial p, VecI32 codes, VecI32 x) {
  return VecI32{_mm512_dpbusd_epi32(p.raw, codes.raw, x.raw)};
}
HWY_INLINE VecI32 end_partial(VecI32, Partial p) { return p; }
#elif HWY_TARGET == HWY_AVX2
inline constexpr bool kWideCodes = false;
inline constexpr int kRowsPerPass = 4;
using Partial = VecI32;  // 16 x int16: 8 products of at most 2 * 15 * 128 do not overflow
HWY_INLINE Partial begin_partial(VecI32) { return hn::Zero(TileI32()); }
HWY_INLINE Partial add_dot4(Partial p, VecI32 codes, VecI32 x) {
  return VecI32{_mm256_add_epi16(p.raw, _mm256_maddubs_epi16(codes.raw, x.raw))};
}
HWY_INLINE VecI32 end_partial(VecI32 acc, Partial p) {
  return VecI32{_mm256_add_epi32(acc.raw, _mm256_madd_epi16(p.raw, _mm256_set1_epi16(1)))};
}
#elif HWY_TARGET == HWY_SSSE3
inline constexpr bool kWideCodes = false;
inline constexpr int kRowsPerPass = 4;
using Partial = VecI32;
HWY_INLINE Partial begin_partial(VecI32) { return hn::Zero(TileI32()); }
HWY_INLINE Partial add_dot4(Partial p, VecI32 codes, VecI32 x) {
  return VecI32{_mm_add_epi16(p.raw, _mm_maddubs_epi16(codes.raw, x.raw))};
}
HWY_INLINE VecI32 end_partial(VecI32 acc, Partial p) {
  return VecI32{_mm_add_epi32(acc.raw, _mm_madd_epi16(p.raw, _mm_set1_epi16(1)))};
}
#elif HWY_TARGET == HWY_NEON && defined(__ARM_FEATURE_DOTPROD)
inline constexpr bool kWideCodes = false;
inline constexpr int kRowsPerPass = 8;
using Partial = VecI32;
HWY_INLINE Partial begin_partial(VecI32 acc) { return acc; }
HWY_INLINE Partial add_dot4(Partial p, VecI32 codes, VecI32 x) {
  return VecI32{vdotq_s32(p.raw, vreinterpretq_s8_s32(codes.raw), vreinterpretq_s8_s32(x.raw))};
}
HWY_INLINE VecI32 end_partial(VecI32, Partial p) { return p; }
#elif HWY_TARGET == HWY_NEON
inline constexpr bool kWideCodes = false;
inline constexpr int kRowsPerPass = 4;
using Partial = VecI32;
HWY_INLINE Partial begin_partial(VecI32 acc) { return acc; }
HWY_INLINE Partial add_dot4(Partial p, VecI32 codes, VecI32 x) {
  const int8x16_t c = vreinterpretq_s8_s32(codes.raw), a = vreinterpretq_s8_s32(x.raw);
  const int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(a));
  const int16x8_t high = vmull_s8(vget_high_s8(c), vget_high_s8(a));
  return VecI32{vpadalq_s16(p.raw, vpaddq_s16(low, high))};
}
HWY_INLINE VecI32 end_partial(VecI32, Partial p) { return p; }
#else
#error "no 8-bit dot product for this target"
#endif

inline constexpr int64_t kGroupsAhead = 8, kGroupsFarAhead = 16;

// The lines that stand kGroupsAhead groups behind those of a tile, if `next` is read after it, and those
// kGroupsFarAhead behind. (A tile of fewer groups asks for what lies behind `next`.)
class LinesAhead {
 public:
  HWY_INLINE LinesAhead(const uint8_t* tile, const uint8_t* next, int64_t n_groups, int64_t group_bytes)
      : near_(tile, next, n_groups, group_bytes, kGroupsAhead),
        far_(tile, next, n_groups, group_bytes, kGroupsFarAhead),
        group_bytes_(group_bytes) {}
  // Into L2: L1 has too few places for what is under way.
  HWY_INLINE void fetch(int64_t group, int64_t line) const {
    const int64_t offset = group * group_bytes_ + 64 * line;
    __builtin_prefetch(reinterpret_cast<const void*>(near_.base(group) + offset), 0, 2);
    __builtin_prefetch(reinterpret_cast<const void*>(far_.base(group) + offset), 0, 1);
  }

 private:
  struct Distance {
    HWY_INLINE Distance(const uint8_t* tile, const uint8_t* next, int64_t n_groups, int64_t group_bytes,
                        int64_t ahead)
        : in_tile(reinterpret_cast<intptr_t>(tile) + ahead * group_bytes),
          in_next(reinterpret_cast<intptr_t>(next) + (ahead - n_groups) * group_bytes),
          n_in_tile(n_groups - ahead) {}
    HWY_INLINE intptr_t base(int64_t group) const { return group < n_in_tile ? in_tile : in_next; }

    intptr_t in_tile, in_next;  // numbers: between them and the lines lies what belongs to nobody
    int64_t n_in_tile;
  };
  Distance near_, far_;
  int64_t group_bytes_;
};

HWY_INLINE VecI32 broadcast4(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return hn::Set(TileI32(), word);
}

// y += scale_x * (scale_w * (256 high + low) + bias_w * sum_x), for the 16 rows' lanes of one part; of one
// plane the sum is `high`.
template <int kPlanes>
HWY_INLINE VecF32 fold_group(VecF32 y, VecI32 high, VecI32 low, VecU32 scale_line, GroupScale x) {
  const TileF32 d;
  const auto total = hn::ConvertTo(d, kPlanes == 1 ? high : hn::Add(hn::ShiftLeft<8>(high), low));
  const auto scale = hn::BitCast(d, hn::ShiftLeft<16>(scale_line));
  const auto bias = hn::BitCast(d, hn::And(scale_line, hn::Set(TileU32(), 0xffff0000u)));
  const auto group = hn::MulAdd(scale, total, hn::Mul(bias, hn::Set(d, x.sum)));
  return hn::MulAdd(group, hn::Set(d, x.scale), y);
}

template <int kRows, int kPlanes>
HWY_NOINLINE void dot_tile_q4(const uint8_t* HWY_RESTRICT tile, const uint8_t* next, int64_t n_groups,
                              const RowRef* rows, float (*HWY_RESTRICT out)[16]) {
  const TileF32 df;
  const TileI32 di;
  const TileU32 du;
  constexpr int kLanes = HWY_MAX_BYTES / 4;
  constexpr int kParts = 16 / kLanes;
  const auto nibble = hn::Set(di, 0x0f0f0f0f);
  VecF32 y[kParts][kRows];
  for (auto& part : y)
    for (auto& row : part) row = hn::Zero(df);
  const LinesAhead ahead(tile, next, n_groups, 9 * 64);
  for (int64_t group = 0; group < n_groups; ++group, tile += 9 * 64) {
    for (int part = 0; part < kParts; ++part) {
      const uint8_t* lines = tile + part * kLanes * 4;
      VecI32 high[kRows], low[kRows];
      for (int r = 0; r < kRows; ++r) high[r] = low[r] = hn::Zero(di);
      for (int first = 0; first < 8; first += 4) {
        Partial p_high[kRows], p_low[kRows];
        for (int r = 0; r < kRows; ++r) {
          p_high[r] = begin_partial(high[r]);
          p_low[r] = begin_partial(low[r]);
        }
        HWY_UNROLL(4)
        for (int line = first; line < first + 4; ++line) {
          if (part == 0) ahead.fetch(group, line);
          const auto words = hn::Load(di, reinterpret_cast<const int32_t*>(lines + 64 * line));
          const auto even = hn::And(words, nibble);
          const auto odd = hn::And(hn::ShiftRight<4>(words), nibble);
          for (int r = 0; r < kRows; ++r) {
            const int8_t* x = rows[r].planes + group * (64 * kPlanes) + 8 * line;
            p_high[r] = add_dot4(p_high[r], even, broadcast4(x));
            if constexpr (kPlanes == 2) p_low[r] = add_dot4(p_low[r], even, broadcast4(x + 64));
            p_high[r] = add_dot4(p_high[r], odd, broadcast4(x + 4));
            if constexpr (kPlanes == 2) p_low[r] = add_dot4(p_low[r], odd, broadcast4(x + 68));
          }
        }
        for (int r = 0; r < kRows; ++r) {
          high[r] = end_partial(high[r], p_high[r]);
          low[r] = end_partial(low[r], p_low[r]);
        }
      }
      if (part == 0) ahead.fetch(group, 8);
      const auto scale_line = hn::Load(du, reinterpret_cast<const uint32_t*>(lines + 8 * 64));
      for (int r = 0; r < kRows; ++r)
        y[part][r] = fold_group<kPlanes>(y[part][r], high[r], low[r], scale_line, rows[r].scales[group]);
    }
  }
  for (int part = 0; part < kParts; ++part)
    for (int r = 0; r < kRows; ++r) hn::Store(y[part][r], df, out[r] + part * kLanes);
}

#if HWY_TARGET == HWY_AVX3_DL
// Two tiles at a time share the loads of the activations, which bound the loop above for many rows. Same
// sums.
template <int kRows, int kPlanes>
HWY_NOINLINE void dot_two_tiles_q4(const uint8_t* HWY_RESTRICT a, const uint8_t* HWY_RESTRICT b,
                                   int64_t n_groups, const RowRef* rows, float (*HWY_RESTRICT out_a)[16],
                                   float (*HWY_RESTRICT out_b)[16]) {
  const TileF32 df;
  const TileI32 di;
  const TileU32 du;
  const auto nibble = hn::Set(di, 0x0f0f0f0f);
  VecF32 y_a[kRows], y_b[kRows];
  for (int r = 0; r < kRows; ++r) y_a[r] = y_b[r] = hn::Zero(df);
  for (int64_t group = 0; group < n_groups; ++group, a += 9 * 64, b += 9 * 64) {
    VecI32 high_a[kRows], low_a[kRows], high_b[kRows], low_b[kRows];
    for (int r = 0; r < kRows; ++r) high_a[r] = low_a[r] = high_b[r] = low_b[r] = hn::Zero(di);
    for (int line = 0; line < 8; ++line) {
      const auto words_a = hn::Load(di, reinterpret_cast<const int32_t*>(a + 64 * line));
      const auto words_b = hn::Load(di, reinterpret_cast<const int32_t*>(b + 64 * line));
      const auto even_a = hn::And(words_a, nibble), odd_a = hn::And(hn::ShiftRight<4>(words_a), nibble);
      const auto even_b = hn::And(words_b, nibble), odd_b = hn::And(hn::ShiftRight<4>(words_b), nibble);
      for (int r = 0; r < kRows; ++r) {
        const int8_t* x = rows[r].planes + group * (64 * kPlanes) + 8 * line;
        auto plane = broadcast4(x);
        high_a[r] = add_dot4(high_a[r], even_a, plane);
        high_b[r] = add_dot4(high_b[r], even_b, plane);
        if constexpr (kPlanes == 2) {
          plane = broadcast4(x + 64);
          low_a[r] = add_dot4(low_a[r], even_a, plane);
          low_b[r] = add_dot4(low_b[r], even_b, plane);
        }
        plane = broadcast4(x + 4);
        high_a[r] = add_dot4(high_a[r], odd_a, plane);
        high_b[r] = add_dot4(high_b[r], odd_b, plane);
        if constexpr (kPlanes == 2) {
          plane = broadcast4(x + 68);
          low_a[r] = add_dot4(low_a[r], odd_a, plane);
          low_b[r] = add_dot4(low_b[r], odd_b, plane);
        }
      }
    }
    const auto scales_a = hn::Load(du, reinterpret_cast<const uint32_t*>(a + 8 * 64));
    const auto scales_b = hn::Load(du, reinterpret_cast<const uint32_t*>(b + 8 * 64));
    for (int r = 0; r < kRows; ++r) {
      y_a[r] = fold_group<kPlanes>(y_a[r], high_a[r], low_a[r], scales_a, rows[r].scales[group]);
      y_b[r] = fold_group<kPlanes>(y_b[r], high_b[r], low_b[r], scales_b, rows[r].scales[group]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    hn::Store(y_a[r], df, out_a[r]);
    hn::Store(y_b[r], df, out_b[r]);
  }
}
#endif

// Where codes of 8 bits do not fit the dot product, their two halves are summed apart: code = 16 * upper +
// lower.
template <int kRows>
HWY_NOINLINE void dot_tile_q8(const uint8_t* HWY_RESTRICT tile, const uint8_t* next, int64_t n_groups,
                              const RowRef* rows, float (*HWY_RESTRICT out)[16]) {
  const TileF32 df;
  const TileI32 di;
  const TileU32 du;
  constexpr int kLanes = HWY_MAX_BYTES / 4;
  constexpr int kParts = 16 / kLanes;
  constexpr int kHalves = kWideCodes ? 1 : 2;
  const auto nibble = hn::Set(di, 0x0f0f0f0f);
  VecF32 y[kParts][kRows];
  for (auto& part : y)
    for (auto& row : part) row = hn::Zero(df);
  const LinesAhead ahead(tile, next, n_groups, 17 * 64);
  for (int64_t group = 0; group < n_groups; ++group, tile += 17 * 64) {
    for (int part = 0; part < kParts; ++part) {
      const uint8_t* lines = tile + part * kLanes * 4;
      VecI32 high[kRows], low[kRows];
      for (int r = 0; r < kRows; ++r) high[r] = low[r] = hn::Zero(di);
      for (int half = kHalves - 1; half >= 0; --half) {
        for (int first = 0; first < 16; first += 4) {
          Partial p_high[kRows], p_low[kRows];
          for (int r = 0; r < kRows; ++r) {
            p_high[r] = begin_partial(high[r]);
            p_low[r] = begin_partial(low[r]);
          }
          for (int line = first; line < first + 4; ++line) {
            if (part == 0 && half == 0) ahead.fetch(group, line);
            auto codes = hn::Load(di, reinterpret_cast<const int32_t*>(lines + 64 * line));
            if (half == 1) codes = hn::ShiftRight<4>(codes);
            if (kHalves == 2) codes = hn::And(codes, nibble);
            for (int r = 0; r < kRows; ++r) {
              const int8_t* x = rows[r].planes + group * 128 + 4 * line;
              p_high[r] = add_dot4(p_high[r], codes, broadcast4(x));
              p_low[r] = add_dot4(p_low[r], codes, broadcast4(x + 64));
            }
          }
          for (int r = 0; r < kRows; ++r) {
            high[r] = end_partial(high[r], p_high[r]);
            low[r] = end_partial(low[r], p_low[r]);
          }
        }
        if (half == 1) {
          for (int r = 0; r < kRows; ++r) {
            high[r] = hn::ShiftLeft<4>(high[r]);
            low[r] = hn::ShiftLeft<4>(low[r]);
          }
        }
      }
      if (part == 0) ahead.fetch(group, 16);
      const auto scale_line = hn::Load(du, reinterpret_cast<const uint32_t*>(lines + 16 * 64));
      for (int r = 0; r < kRows; ++r)
        y[part][r] = fold_group<2>(y[part][r], high[r], low[r], scale_line, rows[r].scales[group]);
    }
  }
  for (int part = 0; part < kParts; ++part)
    for (int r = 0; r < kRows; ++r) hn::Store(y[part][r], df, out[r] + part * kLanes);
}

template <int kRows>
HWY_NOINLINE void dot_tile_bf16(const uint8_t* HWY_RESTRICT tile, int64_t cols, const RowRef* rows,
                                float (*HWY_RESTRICT out)[16]) {
  const TileF32 d;
  const TileU32 du;
  constexpr int kLanes = HWY_MAX_BYTES / 4;
  for (int part = 0; part < 16 / kLanes; ++part) {
    VecF32 sum[kRows][4];
    for (auto& row : sum)
      for (auto& s : row) s = hn::Zero(d);
    const auto* words = reinterpret_cast<const uint32_t*>(tile) + part * kLanes;
    for (int64_t pair = 0; pair < cols / 2; pair += 2) {
      for (int k = 0; k < 2 && pair + k < cols / 2; ++k) {
        const auto word = hn::Load(du, words + (pair + k) * 16);
        const auto even = hn::BitCast(d, hn::ShiftLeft<16>(word));
        const auto odd = hn::BitCast(d, hn::And(word, hn::Set(du, 0xffff0000u)));
        for (int r = 0; r < kRows; ++r) {
          const float* x = rows[r].x + 2 * (pair + k);
          sum[r][2 * k] = hn::MulAdd(even, hn::Set(d, x[0]), sum[r][2 * k]);
          sum[r][2 * k + 1] = hn::MulAdd(odd, hn::Set(d, x[1]), sum[r][2 * k + 1]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      hn::Store(hn::Add(hn::Add(sum[r][0], sum[r][1]), hn::Add(sum[r][2], sum[r][3])), d,
                out[r] + part * kLanes);
  }
}

template <int kRows>
HWY_INLINE void dot_tile(const TileMatrix& w, const uint8_t* tile, const uint8_t* next, const RowRef* rows,
                         float (*out)[16]) {
  const int64_t n_groups = w.cols / model::kQuantGroup;
  switch (w.storage) {
    case model::Storage::q4:
      if (rows[0].n_planes == 1) return dot_tile_q4<kRows, 1>(tile, next, n_groups, rows, out);
      return dot_tile_q4<kRows, 2>(tile, next, n_groups, rows, out);
    case model::Storage::q8:
      return dot_tile_q8<kRows>(tile, next, n_groups, rows, out);
    default:
      break;
  }
  // Four partial sums a row: more rows would not fit the registers.
  constexpr int kPass = kRows < 4 ? kRows : 4;
  dot_tile_bf16<kPass>(tile, w.cols, rows, out);
  if constexpr (kRows > kPass) dot_tile<kRows - kPass>(w, tile, next, rows + kPass, out + kPass);
}

// out[r][i] = row `16 * tile_index + i` of w times activation row r; 1 <= n_rows <= kMaxTileRows. `next` is
// where the caller will read then.
HWY_INLINE void dot_tile_rows(const TileMatrix& w, int64_t tile_index, const uint8_t* next,
                              const RowRef* rows, int n_rows, float (*out)[16]) {
  const uint8_t* tile = w.tile(tile_index);
  for (; n_rows > kRowsPerPass; n_rows -= kRowsPerPass, rows += kRowsPerPass, out += kRowsPerPass)
    dot_tile<kRowsPerPass>(w, tile, next, rows, out);
  if constexpr (kRowsPerPass > 4) {
    switch (n_rows) {
      case 8:
        return dot_tile<8>(w, tile, next, rows, out);
      case 7:
        return dot_tile<7>(w, tile, next, rows, out);
      case 6:
        return dot_tile<6>(w, tile, next, rows, out);
      case 5:
        return dot_tile<5>(w, tile, next, rows, out);
      default:
        break;
    }
  }
  switch (n_rows) {
    case 4:
      return dot_tile<4>(w, tile, next, rows, out);
    case 3:
      return dot_tile<3>(w, tile, next, rows, out);
    case 2:
      return dot_tile<2>(w, tile, next, rows, out);
    default:
      return dot_tile<1>(w, tile, next, rows, out);
  }
}

#if HWY_TARGET == HWY_AVX3_DL
// As many of the rows as make passes of two or more; returns how many.
template <int kPlanes>
HWY_INLINE int dot_two_tiles_passes(const uint8_t* a, const uint8_t* b, int64_t n_groups, const RowRef* rows,
                                    int n_rows, float (*out_a)[16], float (*out_b)[16]) {
  // One plane leaves the registers for twice the rows.
  constexpr int kPass = kPlanes == 1 ? 8 : 4;
  int r = 0;
  for (; n_rows - r >= kPass; r += kPass)
    dot_two_tiles_q4<kPass, kPlanes>(a, b, n_groups, rows + r, out_a + r, out_b + r);
  for (; n_rows - r >= 4; r += 4)
    dot_two_tiles_q4<4, kPlanes>(a, b, n_groups, rows + r, out_a + r, out_b + r);
  if (n_rows - r == 3) dot_two_tiles_q4<3, kPlanes>(a, b, n_groups, rows + r, out_a + r, out_b + r);
  if (n_rows - r == 2) dot_two_tiles_q4<2, kPlanes>(a, b, n_groups, rows + r, out_a + r, out_b + r);
  return n_rows - r == 1 ? r : n_rows;
}
#endif

// The same for two tiles, of one weight or of two of equal shape.
HWY_INLINE void dot_two_tiles_rows(const TileMatrix& w_a, int64_t tile_a, const TileMatrix& w_b,
                                   int64_t tile_b, const uint8_t* next, const RowRef* rows, int n_rows,
                                   float (*out_a)[16], float (*out_b)[16]) {
#if HWY_TARGET == HWY_AVX3_DL
  if (w_a.storage == model::Storage::q4 && w_b.storage == model::Storage::q4) {
    const int64_t n_groups = w_a.cols / model::kQuantGroup;
    const uint8_t *a = w_a.tile(tile_a), *b = w_b.tile(tile_b);
    const int n_done = rows[0].n_planes == 1
                           ? dot_two_tiles_passes<1>(a, b, n_groups, rows, n_rows, out_a, out_b)
                           : dot_two_tiles_passes<2>(a, b, n_groups, rows, n_rows, out_a, out_b);
    if (n_done == n_rows) return;
    rows += n_done, out_a += n_done, out_b += n_done, n_rows -= n_done;
  }
#endif
  dot_tile_rows(w_a, tile_a, w_b.tile(tile_b), rows, n_rows, out_a);
  dot_tile_rows(w_b, tile_b, next, rows, n_rows, out_b);
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#endif
