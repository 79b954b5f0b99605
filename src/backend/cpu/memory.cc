#include "backend/cpu/memory.h"

#include <algorithm>

#include "base/error.h"

namespace lily::backend::cpu {
namespace {

using backend::StateSlot;
using backend::TokenSlot;

static_assert(kKvKeys == backend::kKvBlockTokens);

}  // namespace

Memory::Memory(const model::Dims& dims, const backend::MemorySpec& spec, plan::KvType kv_type)
    : dims_(dims),
      spec_(spec),
      kv_type_(kv_type),
      states_(static_cast<size_t>(std::max<int64_t>(1, spec.n_state_slots * slot_floats())) * sizeof(float)),
      tokens_(static_cast<size_t>(spec.n_token_slots), 0) {
  kv_ = PageBlock(static_cast<size_t>(std::max<int64_t>(1, spec.n_kv_blocks * kv_block_bytes())));
}

int64_t Memory::kv_block_bytes() const {
  return dims_.n_attention_layers() * KvLayer{nullptr, kv_type_, dims_.n_kv_heads}.block_bytes();
}

int64_t Memory::delta_floats() const {
  return int64_t{dims_.n_value_heads} * model::kDeltaHeadDim * model::kDeltaHeadDim;
}

int64_t Memory::conv_floats() const { return int64_t{model::kConvTaps - 1} * dims_.conv_channels(); }

float* Memory::slot(StateSlot slot) const {
  const auto i = static_cast<int64_t>(slot);
  LILY_CHECK(i >= 0 && i < spec_.n_state_slots, "state slot {} of {}", i, spec_.n_state_slots);
  return reinterpret_cast<float*>(states_.data()) + i * slot_floats();
}

float* Memory::delta_state(StateSlot s, int layer) const {
  return slot(s) + dims_.mixer_index(layer) * (delta_floats() + conv_floats());
}

float* Memory::conv_state(StateSlot s, int layer) const { return delta_state(s, layer) + delta_floats(); }

KvLayer Memory::kv(int layer) const {
  KvLayer kv{kv_.data(), kv_type_, dims_.n_kv_heads, kv_block_bytes()};
  kv.blocks += dims_.mixer_index(layer) * kv.block_bytes();
  return kv;
}

int32_t& Memory::token(TokenSlot slot) {
  const auto i = static_cast<int64_t>(slot);
  LILY_CHECK(i >= 0 && i < spec_.n_token_slots, "token slot {} of {}", i, spec_.n_token_slots);
  return tokens_[static_cast<size_t>(i)];
}

void Memory::copy_state(StateSlot src, StateSlot dst) {
  if (src != dst) std::copy_n(slot(src), slot_floats(), slot(dst));
}

void Memory::give_back_state(StateSlot s) {
  const auto at = reinterpret_cast<std::byte*>(slot(s)) - states_.data();
  states_.give_back(static_cast<size_t>(at), static_cast<size_t>(slot_floats()) * sizeof(float));
}

void Memory::give_back_kv(int32_t block) {
  LILY_CHECK(block >= 0 && block < spec_.n_kv_blocks, "KV block {} of {}", block, spec_.n_kv_blocks);
  kv_.give_back(static_cast<size_t>(block * kv_block_bytes()), static_cast<size_t>(kv_block_bytes()));
}

}  // namespace lily::backend::cpu
