#include "backend/cpu/kernels/kv_block.h"

#include "base/half.h"

namespace lily::backend::cpu {
namespace {

using plan::FloatType;

template <auto kIndex>
void store(std::byte* plane, FloatType type, int key, const float* x) {
  for (int dim = 0; dim < model::kHeadDim; ++dim) {
    if (type == FloatType::bf16) reinterpret_cast<Bf16*>(plane)[kIndex(key, dim)] = to_bf16(x[dim]);
    else reinterpret_cast<float*>(plane)[kIndex(key, dim)] = x[dim];
  }
}

template <auto kIndex>
void load(const std::byte* plane, FloatType type, int key, float* x) {
  for (int dim = 0; dim < model::kHeadDim; ++dim) {
    x[dim] = type == FloatType::bf16 ? to_float(reinterpret_cast<const Bf16*>(plane)[kIndex(key, dim)])
                                     : reinterpret_cast<const float*>(plane)[kIndex(key, dim)];
  }
}

}  // namespace

void store_key(const KvLayer& kv, int64_t block, int head, int key, const float* k) {
  store<key_index>(kv.keys(block, head), kv.type, key, k);
}

void store_value(const KvLayer& kv, int64_t block, int head, int key, const float* v) {
  store<value_index>(kv.values(block, head), kv.type, key, v);
}

void load_key(const KvLayer& kv, int64_t block, int head, int key, float* k) {
  load<key_index>(kv.keys(block, head), kv.type, key, k);
}

void load_value(const KvLayer& kv, int64_t block, int head, int key, float* v) {
  load<value_index>(kv.values(block, head), kv.type, key, v);
}

}  // namespace lily::backend::cpu
