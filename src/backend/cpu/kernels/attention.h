// (11) attention of query rows over a paged KV cache: o = softmax(q k / 16) v, keys 0 .. the row's own
// position.
//
// The cache is read in splits of 512 keys at fixed positions. Within a split, 64 keys at a time: scores,
// running maximum, weights, weighted values, all fp32, over dims and keys in rising order (int8: codes become
// fp32, scales apply to sums over 64 dims of a key and to weights of a value). Splits start
// afresh and are merged in rising order. The arithmetic of a row is therefore the same whether splits run on
// one thread or on many, whether the row comes in a prompt chunk or alone, and whether query heads share the
// reading of a key (D6) or not.
//
// Rows of a call share one KV head: each key is read from memory once for all of them. Bound by the bytes of
// the cache for the 8 rows of a decoded token, by FMAs for more.
#pragma once

#include <cstdint>
#include <span>

#include "backend/cpu/kernels/kv_block.h"

namespace lily::backend::cpu {

inline constexpr int kSplitBlocks = 8;
inline constexpr int kSplitKeys = kSplitBlocks * kKvKeys;
inline constexpr int kMaxQueries = 32;  // rows of a call

inline int64_t n_splits(int64_t n_keys) { return (n_keys + kSplitKeys - 1) / kSplitKeys; }

// What a split leaves for one query row: sum of weights, their maximum's exponent, weighted values not yet
// divided.
struct Partial {
  float max = 0;
  float sum = 0;
  float o[model::kHeadDim];
};

// One query row: 256 values, and how many keys it sees (position + 1).
struct Query {
  const float* q = nullptr;
  int64_t n_keys = 0;
};

// Computes one split for each query. A query that sees no key of the split leaves its Partial untouched.
// `block_table` holds the sequence's blocks, entry i for positions 64 i ...
void attention_split(const KvLayer& kv, int head, std::span<const int32_t> block_table, int64_t split,
                     std::span<const Query> queries, Partial* const* partials);

// Adds `next`, the split after those already in `sum`; then the division that ends a row.
void merge_partial(Partial& sum, const Partial& next);
void finish_partial(const Partial& sum, float* o);

}  // namespace lily::backend::cpu
