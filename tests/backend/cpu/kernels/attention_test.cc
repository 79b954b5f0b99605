#include "backend/cpu/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/backend/cpu/kernels/kernel_test.h"

namespace lily::backend::cpu {
namespace {

using plan::KvType;

constexpr int kHeadDim = 256;

class Attention : public PerTarget {};

// A sequence of n keys in blocks that stand in no order; what no key fills is NaN.
struct Cache {
  int64_t n;
  int heads;
  Aligned<std::byte> memory;
  KvLayer kv;
  std::vector<int32_t> table;
  std::vector<float> k, v;  // [heads, n, 256], as the cache holds them

  Cache(int64_t n_keys, int n_heads, KvType type, std::mt19937& random)
      : n(n_keys),
        heads(n_heads),
        memory((n_keys / 64 + 3) * n_heads * 2 * plan::kv_bytes(type, kKvPlane)),
        kv{memory.data(), type, n_heads, KvLayer{nullptr, type, n_heads}.block_bytes()},
        k(random_floats(n_heads * n_keys * kHeadDim, random)),
        v(random_floats(n_heads * n_keys * kHeadDim, random)) {
    for (int32_t i = 0; i < n_keys / 64 + 1; ++i) table.push_back(i);
    std::ranges::shuffle(table, random);
    for (int h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        float* key = k.data() + (h * n + i) * kHeadDim;
        float* value = v.data() + (h * n + i) * kHeadDim;
        store_key(kv, table[static_cast<size_t>(i / 64)], h, static_cast<int>(i % 64), key);
        store_value(kv, table[static_cast<size_t>(i / 64)], h, static_cast<int>(i % 64), value);
        load_key(kv, table[static_cast<size_t>(i / 64)], h, static_cast<int>(i % 64), key);
        load_value(kv, table[static_cast<size_t>(i / 64)], h, static_cast<int>(i % 64), value);
      }
    }
  }
};

std::vector<float> attend(const Cache& cache, int head, std::span<const Query> queries) {
  std::vector<Partial> sums(queries.size()), next(queries.size());
  std::vector<Partial*> first_pointers, pointers;
  for (size_t r = 0; r < queries.size(); ++r) {
    first_pointers.push_back(&sums[r]);
    pointers.push_back(&next[r]);
  }
  int64_t most = 0;
  for (const Query& q : queries) most = std::max(most, q.n_keys);
  for (int64_t split = 0; split < n_splits(most); ++split) {
    attention_split(cache.kv, head, cache.table, split, queries,
                    split == 0 ? first_pointers.data() : pointers.data());
    if (split == 0) continue;
    for (size_t r = 0; r < queries.size(); ++r)
      if (queries[r].n_keys > split * kSplitKeys) merge_partial(sums[r], next[r]);
  }
  std::vector<float> o(queries.size() * kHeadDim, kPoison);
  for (size_t r = 0; r < queries.size(); ++r) finish_partial(sums[r], o.data() + r * kHeadDim);
  return o;
}

TEST_P(Attention, AgreesWithDoublePrecision) {
  std::mt19937 random(1);
  for (KvType type : {KvType::bf16, KvType::f32, KvType::int8}) {
    for (int64_t n : {1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1100}) {
      SCOPED_TRACE(testing::Message() << n << " keys");
      const Cache cache(n, 2, type, random);
      const auto q = random_floats(8 * kHeadDim, random, 2);
      std::vector<Query> queries;
      for (int r = 0; r < 8; ++r) queries.push_back({q.data() + r * kHeadDim, n});
      const auto o = attend(cache, 1, queries);
      Worst worst;
      for (size_t r = 0; r < 8; ++r) {
        std::vector<double> p(static_cast<size_t>(n)), o_want(kHeadDim, 0.0);
        double peak = -1e300, total = 0, size = 0;
        for (int64_t i = 0; i < n; ++i) {
          double s = 0, terms = 0;
          for (size_t d = 0; d < kHeadDim; ++d) {
            const double term =
                q[r * kHeadDim + d] * cache.k[static_cast<size_t>((n + i) * kHeadDim) + d] / 16;
            s += term;
            terms += std::abs(term);
          }
          size = std::max(size, terms);
          p[static_cast<size_t>(i)] = s;
          peak = std::max(peak, s);
        }
        for (double& s : p) total += s = std::exp(s - peak);
        double largest = 0;
        for (int64_t i = 0; i < n; ++i)
          for (size_t d = 0; d < kHeadDim; ++d) {
            const double value = cache.v[static_cast<size_t>((n + i) * kHeadDim) + d];
            o_want[d] += p[static_cast<size_t>(i)] / total * value;
            largest = std::max(largest, std::abs(value));
          }
        // A score's rounding (256 terms, random signs) scales its weight; weights sum to one.
        const double tolerance = largest * kEps * (2 * 16 * size / 4 + static_cast<double>(n) / 16 + 32);
        for (size_t d = 0; d < kHeadDim; ++d)
          worst.see(static_cast<int64_t>(r * kHeadDim + d), o[r * kHeadDim + d], o_want[d], tolerance);
      }
      LILY_EXPECT_CLOSE(worst);
    }
  }
}

TEST_P(Attention, ARowIsTheSameAloneAndAmongOthers) {
  std::mt19937 random(2);
  for (const KvType type : {KvType::bf16, KvType::int8}) {
    const Cache cache(700, 1, type, random);
    const auto q = random_floats(21 * kHeadDim, random);
    std::vector<Query> queries;
    for (int r = 0; r < 21; ++r) queries.push_back({q.data() + r * kHeadDim, 1 + (r * 257) % 700});
    const auto together = attend(cache, 0, queries);
    for (size_t r = 0; r < queries.size(); ++r) {
      const auto alone = attend(cache, 0, std::span(queries).subspan(r, 1));
      EXPECT_EQ(0, std::memcmp(alone.data(), together.data() + r * kHeadDim, kHeadDim * sizeof(float)))
          << "row " << r << ", KV type " << static_cast<int>(type);
    }
  }
}

TEST_P(Attention, LargeScoresDoNotOverflow) {
  std::mt19937 random(3);
  const Cache cache(130, 1, KvType::f32, random);
  auto q = random_floats(kHeadDim, random, 1e4f);
  const Query query{q.data(), 130};
  for (float v : attend(cache, 0, {&query, 1})) EXPECT_TRUE(std::isfinite(v));
}

// What the scales of a group may be, in the kernel's own reading of fp16: the least, subnormal ones, the
// largest.
TEST_P(Attention, ScalesOfInt8AreReadAtTheirEdges) {
  std::mt19937 random(4);
  for (const float largest : {0x1p-40f, 127 * 0x1p-17f, 127 * 0x1p-15f, 127 * 1.5f * 0x1p-14f, 8e6f}) {
    Cache cache(20, 1, KvType::int8, random);
    for (float& v : cache.v) v *= largest;
    for (int key = 0; key < 20; ++key)
      store_value(cache.kv, cache.table[0], 0, key, cache.v.data() + key * kHeadDim);
    // One key in reach: the answer is its value.
    const auto q = random_floats(kHeadDim, random);
    const Query query{q.data(), 1};
    std::vector<float> value(kHeadDim);
    load_value(cache.kv, cache.table[0], 0, 0, value.data());
    EXPECT_EQ(attend(cache, 0, {&query, 1}), value) << largest;
  }
}

TEST_P(Attention, WhatIsNoNumberInAnInt8ValueReachesTheAnswer) {
  std::mt19937 random(5);
  const Cache cache(70, 1, KvType::int8, random);
  std::vector<float> bad(kHeadDim, 1);
  bad[100] = std::numeric_limits<float>::infinity();
  store_value(cache.kv, cache.table[1], 0, 3, bad.data());
  const auto q = random_floats(kHeadDim, random);
  const Query query{q.data(), 70};
  const auto o = attend(cache, 0, {&query, 1});
  for (int dim = 0; dim < kHeadDim; ++dim)
    EXPECT_EQ(std::isnan(o[static_cast<size_t>(dim)]), dim >= 64 && dim < 128) << dim;
}

TEST_P(Attention, WhatIsNoNumberInAKeyReachesTheAnswer) {
  std::mt19937 random(12);
  std::vector<float> key = random_floats(kHeadDim, random);
  const auto q = random_floats(kHeadDim, random);
  key[100] = std::numeric_limits<float>::quiet_NaN();
  for (const KvType type : {KvType::bf16, KvType::f32, KvType::int8}) {
    const Cache cache(80, 1, type, random);
    store_key(cache.kv, cache.table[1], 0, 7, key.data());
    const Query query{q.data(), 80};
    for (const float o : attend(cache, 0, {&query, 1})) EXPECT_TRUE(std::isnan(o)) << static_cast<int>(type);
  }
}

TEST_P(Attention, ValuesAreReadBackFromEveryPlaceOfABlock) {
  std::mt19937 random(6);
  for (const KvType type : {KvType::bf16, KvType::f32, KvType::int8}) {
    const Cache cache(128, 2, type, random);
    std::vector<float> x(kHeadDim);
    for (int h = 0; h < 2; ++h)
      for (int key = 0; key < 128; ++key) {
        const auto at = static_cast<ptrdiff_t>((h * 128 + key) * kHeadDim);
        load_key(cache.kv, cache.table[static_cast<size_t>(key / 64)], h, key % 64, x.data());
        EXPECT_TRUE(std::ranges::equal(x, std::span(cache.k).subspan(static_cast<size_t>(at), kHeadDim)));
        load_value(cache.kv, cache.table[static_cast<size_t>(key / 64)], h, key % 64, x.data());
        EXPECT_TRUE(std::ranges::equal(x, std::span(cache.v).subspan(static_cast<size_t>(at), kHeadDim)));
      }
  }
}

TEST(KvBlock, EveryElementHasOnePlace) {
  std::vector<int> keys(static_cast<size_t>(kKvPlane)), values(keys), int8_keys(keys);
  for (int key = 0; key < kKvKeys; ++key) {
    for (int dim = 0; dim < kHeadDim; ++dim) {
      ++keys[static_cast<size_t>(key_index(key, dim))];
      ++values[static_cast<size_t>(value_index(key, dim))];
      ++int8_keys[static_cast<size_t>(int8_key_index(key, dim))];
    }
  }
  EXPECT_TRUE(std::ranges::all_of(keys, [](int n) { return n == 1; }));
  EXPECT_TRUE(std::ranges::all_of(values, [](int n) { return n == 1; }));
  EXPECT_TRUE(std::ranges::all_of(int8_keys, [](int n) { return n == 1; }));
}

LILY_FOR_EACH_TARGET(Attention);

}  // namespace
}  // namespace lily::backend::cpu
