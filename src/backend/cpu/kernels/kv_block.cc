#include "backend/cpu/kernels/kv_block.h"

#include <array>
#include <span>

#include "model/int8_group.h"

namespace lily::backend::cpu {
namespace {

using model::kInt8Group;
using plan::KvType;

template <auto kIndex>
void store_int8(std::byte* plane, int key, const float* x) {
  auto* elements = reinterpret_cast<int8_t*>(plane);
  std::array<int8_t, kInt8Group> codes;
  for (int first = 0; first < model::kHeadDim; first += kInt8Group) {
    int8_scales(plane)[first / kInt8Group * kKvKeys + key] =
        model::to_int8_group(std::span<const float, kInt8Group>(x + first, kInt8Group), codes);
    for (int i = 0; i < kInt8Group; ++i) elements[kIndex(key, first + i)] = codes[static_cast<size_t>(i)];
  }
}

template <auto kIndex>
void load_int8(std::byte* plane, int key, float* x) {
  const auto* elements = reinterpret_cast<const int8_t*>(plane);
  std::array<int8_t, kInt8Group> codes;
  for (int first = 0; first < model::kHeadDim; first += kInt8Group) {
    for (int i = 0; i < kInt8Group; ++i) codes[static_cast<size_t>(i)] = elements[kIndex(key, first + i)];
    model::from_int8_group(int8_scales(plane)[first / kInt8Group * kKvKeys + key], codes,
                           std::span<float, kInt8Group>(x + first, kInt8Group));
  }
}

// kInt8Index: where an int8 plane has them.
template <auto kIndex, auto kInt8Index>
void store(std::byte* plane, KvType type, int key, const float* x) {
  if (type == KvType::int8) return store_int8<kInt8Index>(plane, key, x);
  for (int dim = 0; dim < model::kHeadDim; ++dim) {
    if (type == KvType::bf16) reinterpret_cast<Bf16*>(plane)[kIndex(key, dim)] = to_bf16(x[dim]);
    else reinterpret_cast<float*>(plane)[kIndex(key, dim)] = x[dim];
  }
}

template <auto kIndex, auto kInt8Index>
void load(std::byte* plane, KvType type, int key, float* x) {
  if (type == KvType::int8) return load_int8<kInt8Index>(plane, key, x);
  for (int dim = 0; dim < model::kHeadDim; ++dim) {
    x[dim] = type == KvType::bf16 ? to_float(reinterpret_cast<const Bf16*>(plane)[kIndex(key, dim)])
                                  : reinterpret_cast<const float*>(plane)[kIndex(key, dim)];
  }
}

}  // namespace

void store_key(const KvLayer& kv, int64_t block, int head, int key, const float* k) {
  store<key_index, int8_key_index>(kv.keys(block, head), kv.type, key, k);
}

void store_value(const KvLayer& kv, int64_t block, int head, int key, const float* v) {
  store<value_index, value_index>(kv.values(block, head), kv.type, key, v);
}

void load_key(const KvLayer& kv, int64_t block, int head, int key, float* k) {
  load<key_index, int8_key_index>(kv.keys(block, head), kv.type, key, k);
}

void load_value(const KvLayer& kv, int64_t block, int head, int key, float* v) {
  load<value_index, value_index>(kv.values(block, head), kv.type, key, v);
}

}  // namespace lily::backend::cpu
