#include "backend/cpu/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "model/int8_group.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/attention.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

constexpr int kDim = model::kHeadDim;
constexpr int kLanes = HWY_MAX_BYTES / 4;

using F32 = hn::CappedTag<float, 16>;
using U32 = hn::CappedTag<uint32_t, 16>;
using I32 = hn::CappedTag<int32_t, 16>;
using V = hn::Vec<F32>;

// Dims 2i and 2i + 1 of kLanes keys.
HWY_INLINE void load_pair(const uint16_t* line, V& even, V& odd) {
  const auto words = hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(line));
  even = hn::BitCast(F32(), hn::ShiftLeft<16>(words));
  odd = hn::BitCast(F32(), hn::And(words, hn::Set(U32(), 0xffff0000u)));
}

HWY_INLINE void load_pair(const float* line, V& even, V& odd) {
  hn::LoadInterleaved2(F32(), line, even, odd);
}

HWY_INLINE V load_values(const uint16_t* p) {
  const hn::Rebind<uint16_t, F32> d16;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(d16, p))));
}

HWY_INLINE V load_values(const float* p) { return hn::LoadU(F32(), p); }

HWY_INLINE V load_values(const int8_t* p) {
  const hn::Rebind<int8_t, F32> d8;
  return hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LoadU(d8, p)));
}

// fp16 scales of int8 groups. Their bits, moved to where a float has them, are the number times 2^-112,
// subnormal or not; only a NaN needs a hand.
HWY_INLINE V load_scales(const F16* p) {
  const F32 d;
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::PromoteTo(I32(), hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  const auto scale = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(bits)), hn::Set(d, 0x1p112f));
  const auto is_nan = hn::RebindMask(d, hn::Gt(bits, hn::Set(I32(), 0x7bff)));
  return hn::IfThenElse(is_nan, hn::Set(d, std::numeric_limits<float>::quiet_NaN()), scale);
}

// While one plane of a block is read, the next one comes into L2: an element of it for each that is read.
template <class T>
HWY_INLINE void fetch(const T* p) {
  __builtin_prefetch(p, 0, 2);
}

// scores[r][0 .. 16) of one key tile. q: [kRows][256], scores: [kRows][64]. `scales` are those of int8, of
// the tile's keys in the first group of dims. `ahead` is what is fetched meanwhile, as long as the tile.
template <int kRows, class T>
HWY_INLINE void score_tile(const T* tile, const T* ahead, const F16* /*scales*/, const float* q,
                           float* scores) {
  const F32 d;
  for (int part = 0; part < kKeyTile; part += kLanes) {
    V sum[kRows];
    for (V& s : sum) s = hn::Zero(d);
    for (int pair = 0; pair < kDim / 2; ++pair) {
      V even, odd;
      load_pair(tile + (pair * kKeyTile + part) * 2, even, odd);
      fetch(ahead + (pair * kKeyTile + part) * 2);
      for (int r = 0; r < kRows; ++r) {
        sum[r] = hn::MulAdd(even, hn::Set(d, q[r * kDim + 2 * pair]), sum[r]);
        sum[r] = hn::MulAdd(odd, hn::Set(d, q[r * kDim + 2 * pair + 1]), sum[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) hn::StoreU(sum[r], d, scores + r * kKvKeys + part);
  }
}

// Codes times q are summed over a group, and then scaled.
template <int kRows>
HWY_INLINE void score_tile(const int8_t* tile, const int8_t* ahead, const F16* scales, const float* q,
                           float* scores) {
  const F32 d;
  for (int part = 0; part < kKeyTile; part += kLanes) {
    for (int group = 0; group < kDim; group += model::kInt8Group) {
      V sum[kRows];
      for (V& s : sum) s = hn::Zero(d);
      for (int dim = group; dim < group + model::kInt8Group; ++dim) {
        const V codes = load_values(tile + dim * kKeyTile + part);
        if (dim % 4 == 0) fetch(ahead + dim * kKeyTile + part);
        for (int r = 0; r < kRows; ++r) sum[r] = hn::MulAdd(codes, hn::Set(d, q[r * kDim + dim]), sum[r]);
      }
      const V scale = load_scales(scales + group / model::kInt8Group * kKvKeys + part);
      for (int r = 0; r < kRows; ++r) {
        float* score = scores + r * kKvKeys + part;
        const V before = group == 0 ? hn::Zero(d) : hn::LoadU(d, score);
        hn::StoreU(hn::MulAdd(sum[r], scale, before), d, score);
      }
    }
  }
}

// o[r] += sum over keys of p[r][key] * value[key], after o[r] *= scale[r], for dims [first_dim, last_dim).
// p: [kRows][64]. `ahead` is fetched meanwhile, as for scores.
template <int kRows, class T>
HWY_INLINE void add_dims(const T* values, const T* ahead, int first_dim, int last_dim, int n_keys,
                         const float* p, const float* scale, Partial* const* o) {
  const F32 d;
  constexpr int kVecs = kLanes == 16 ? 2 : 1;
  for (int dim = first_dim; dim < last_dim; dim += kVecs * kLanes) {
    const T* at = values + value_index(0, dim);
    const T* next = ahead + value_index(0, dim);
    V sum[kRows][kVecs];
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVecs; ++c)
        sum[r][c] = hn::Mul(hn::LoadU(d, o[r]->o + dim + c * kLanes), hn::Set(d, scale[r]));
    for (int key = 0; key < n_keys; ++key, at += kValueChunk, next += kValueChunk) {
      V value[kVecs];
      fetch(next);
      for (int c = 0; c < kVecs; ++c) value[c] = load_values(at + c * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const V weight = hn::Set(d, p[r * kKvKeys + key]);
        for (int c = 0; c < kVecs; ++c) sum[r][c] = hn::MulAdd(weight, value[c], sum[r][c]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVecs; ++c) hn::StoreU(sum[r][c], d, o[r]->o + dim + c * kLanes);
  }
}

// The same for all dims. `scales` are those of int8.
template <int kRows, class T>
HWY_INLINE void add_values(const T* values, const T* ahead, const F16* /*scales*/, int n_keys, const float* p,
                           const float* scale, Partial* const* o) {
  add_dims<kRows>(values, ahead, 0, kDim, n_keys, p, scale, o);
}

// The scale of a key's group goes into its weight.
template <int kRows>
HWY_INLINE void add_values(const int8_t* values, const int8_t* ahead, const F16* scales, int n_keys,
                           const float* p, const float* scale, Partial* const* o) {
  const F32 d;
  alignas(64) float scaled[kRows * kKvKeys];
  for (int group = 0; group < kDim; group += model::kInt8Group, scales += kKvKeys) {
    for (int key = 0; key < kKvKeys; key += kLanes) {
      const V of_key = load_scales(scales + key);
      for (int r = 0; r < kRows; ++r)
        hn::Store(hn::Mul(hn::LoadU(d, p + r * kKvKeys + key), of_key), d, scaled + r * kKvKeys + key);
    }
    add_dims<kRows>(values, ahead, group, group + model::kInt8Group, n_keys, scaled, scale, o);
  }
}

// Weights of one row over n valid keys of a block; updates maximum and sum, returns the factor for earlier
// values.
float softmax_step(float* scores, int n, Partial& state) {
  const F32 d;
  // The rest of the row gets weight 0, exactly: its keys may be another row's.
  std::fill(scores + n, scores + kKvKeys, -std::numeric_limits<float>::infinity());
  auto largest = hn::LoadU(d, scores);
  for (int i = kLanes; i < kKvKeys; i += kLanes) largest = hn::Max(largest, hn::LoadU(d, scores + i));
  const float peak = std::max(state.max, hn::GetLane(hn::MaxOfLanes(d, largest)));
  auto sum = hn::Zero(d);
  for (int i = 0; i < kKvKeys; i += kLanes) {
    const auto weight = exp_of(d, hn::Sub(hn::LoadU(d, scores + i), hn::Set(d, peak)));
    hn::StoreU(weight, d, scores + i);
    sum = hn::Add(sum, weight);
  }
  const float scale = std::exp(state.max - peak);
  state.sum = state.sum * scale + hn::GetLane(hn::SumOfLanes(d, sum));
  state.max = peak;
  return scale;
}

// Planes of one block and head; scales follow int8 codes. `next_keys` are those of the block that comes then.
template <class T>
struct Planes {
  const T* keys;
  const T* values;
  const T* next_keys;
  const F16* key_scales() const { return reinterpret_cast<const F16*>(keys + kKvPlane); }
  const F16* value_scales() const { return reinterpret_cast<const F16*>(values + kKvPlane); }
};

template <int kRows, class T>
HWY_INLINE void rows_of_block(const Planes<T>& kv, const float* q, const int* n_keys, int most_keys,
                              float* scores, Partial* const* partials) {
  for (int tile = 0; tile * kKeyTile < most_keys; ++tile)
    score_tile<kRows>(kv.keys + tile * kKeyTile * kDim, kv.values + tile * kKeyTile * kDim,
                      kv.key_scales() + tile * kKeyTile, q, scores + tile * kKeyTile);
  float scale[kRows];
  int most = 0;
  for (int r = 0; r < kRows; ++r) {
    // A row that sees none of these keys keeps its state: weights 0, factor 1.
    if (n_keys[r] == 0) {
      std::fill_n(scores + r * kKvKeys, kKvKeys, 0.0f);
      scale[r] = 1;
      continue;
    }
    scale[r] = softmax_step(scores + r * kKvKeys, n_keys[r], *partials[r]);
    most = std::max(most, n_keys[r]);
  }
  if (most > 0) add_values<kRows>(kv.values, kv.next_keys, kv.value_scales(), most, scores, scale, partials);
}

template <class T>
void split_of(const KvLayer& kv, int head, const int32_t* block_table, int64_t split, const Query* queries,
              int n_queries, Partial* const* partials) {
  const F32 d;
  alignas(64) float q[kMaxQueries * kDim];
  alignas(64) float scores[kMaxQueries * kKvKeys];
  int64_t last_key = 0;
  for (int r = 0; r < n_queries; ++r) {
    const auto scale = hn::Set(d, 0.0625f);  // 256^-0.5, exact
    for (int i = 0; i < kDim; i += kLanes)
      hn::Store(hn::Mul(hn::LoadU(d, queries[r].q + i), scale), d, q + r * kDim + i);
    last_key = std::max(last_key, queries[r].n_keys);
    if (queries[r].n_keys <= split * kSplitKeys) continue;
    partials[r]->max = -std::numeric_limits<float>::infinity();
    partials[r]->sum = 0;
    std::fill_n(partials[r]->o, kDim, 0.0f);
  }
  const int64_t end = std::min(last_key, (split + 1) * kSplitKeys);
  for (int64_t first = split * kSplitKeys; first < end; first += kKvKeys) {
    const int64_t block = block_table[first / kKvKeys];
    const int64_t next = first + kKvKeys < end ? block_table[first / kKvKeys + 1] : block;
    const Planes<T> planes{reinterpret_cast<const T*>(kv.keys(block, head)),
                           reinterpret_cast<const T*>(kv.values(block, head)),
                           reinterpret_cast<const T*>(kv.keys(next, head))};
    int n_keys[kMaxQueries];
    for (int r = 0; r < n_queries; ++r)
      n_keys[r] = static_cast<int>(std::clamp<int64_t>(queries[r].n_keys - first, 0, kKvKeys));
    const int most = static_cast<int>(std::min<int64_t>(last_key - first, kKvKeys));
    int r = 0;
    for (; r + 8 <= n_queries; r += 8)
      rows_of_block<8>(planes, q + r * kDim, n_keys + r, most, scores + r * kKvKeys, partials + r);
    for (; r + 4 <= n_queries; r += 4)
      rows_of_block<4>(planes, q + r * kDim, n_keys + r, most, scores + r * kKvKeys, partials + r);
    for (; r < n_queries; ++r)
      rows_of_block<1>(planes, q + r * kDim, n_keys + r, most, scores + r * kKvKeys, partials + r);
  }
}

void split_bf16(const KvLayer& kv, int head, const int32_t* block_table, int64_t split, const Query* queries,
                int n_queries, Partial* const* partials) {
  split_of<uint16_t>(kv, head, block_table, split, queries, n_queries, partials);
}

void split_f32(const KvLayer& kv, int head, const int32_t* block_table, int64_t split, const Query* queries,
               int n_queries, Partial* const* partials) {
  split_of<float>(kv, head, block_table, split, queries, n_queries, partials);
}

void split_int8(const KvLayer& kv, int head, const int32_t* block_table, int64_t split, const Query* queries,
                int n_queries, Partial* const* partials) {
  split_of<int8_t>(kv, head, block_table, split, queries, n_queries, partials);
}

void merge(Partial& sum, const Partial& next) {
  const F32 d;
  const float peak = std::max(sum.max, next.max);
  const float keep = std::exp(sum.max - peak), add = std::exp(next.max - peak);
  for (int i = 0; i < kDim; i += kLanes) {
    const auto kept = hn::Mul(hn::LoadU(d, sum.o + i), hn::Set(d, keep));
    hn::StoreU(hn::MulAdd(hn::LoadU(d, next.o + i), hn::Set(d, add), kept), d, sum.o + i);
  }
  sum.sum = sum.sum * keep + next.sum * add;
  sum.max = peak;
}

void finish(const Partial& sum, float* o) {
  const F32 d;
  const auto factor = hn::Set(d, 1.0f / sum.sum);
  for (int i = 0; i < kDim; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, sum.o + i), factor), d, o + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(split_bf16);
HWY_EXPORT(split_f32);
HWY_EXPORT(split_int8);
HWY_EXPORT(merge);
HWY_EXPORT(finish);

void attention_split(const KvLayer& kv, int head, std::span<const int32_t> block_table, int64_t split,
                     std::span<const Query> queries, Partial* const* partials) {
  LILY_CHECK(queries.size() <= kMaxQueries, "{} queries", queries.size());
  const int n = static_cast<int>(queries.size());
  switch (kv.type) {
    case plan::KvType::f32:
      return HWY_DYNAMIC_DISPATCH(split_f32)(kv, head, block_table.data(), split, queries.data(), n,
                                             partials);
    case plan::KvType::bf16:
      return HWY_DYNAMIC_DISPATCH(split_bf16)(kv, head, block_table.data(), split, queries.data(), n,
                                              partials);
    case plan::KvType::int8:
      return HWY_DYNAMIC_DISPATCH(split_int8)(kv, head, block_table.data(), split, queries.data(), n,
                                              partials);
  }
}

void merge_partial(Partial& sum, const Partial& next) { HWY_DYNAMIC_DISPATCH(merge)(sum, next); }

void finish_partial(const Partial& sum, float* o) { HWY_DYNAMIC_DISPATCH(finish)(sum, o); }

}  // namespace lily::backend::cpu
#endif
