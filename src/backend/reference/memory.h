// What outlives a step: states, KV blocks and tokens. What nobody has written, or what lies where a block has
// been begun since, reads as NaN.
//
// Where places are shared (MemorySpec::shared_places), states and blocks are two views of the same bytes: a
// slot and blocks that are in use at the same time, but must not be, spoil each other's values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/reference/kv_rows.h"

namespace lily::backend::reference {

class Memory {
 public:
  static size_t state_bytes(const model::Dims& dims);
  static size_t block_bytes(const model::Dims& dims, plan::KvType kv);

  void reserve(const model::Dims& dims, const MemorySpec& spec, plan::KvType kv);
  const MemorySpec& spec() const { return spec_; }

  // Of a delta layer, in fp32.
  std::vector<float> delta(StateSlot slot, int layer);  // [value head][dk][dv]
  std::vector<float> conv(StateSlot slot, int layer);   // [3][channels], oldest row first
  void write_delta(StateSlot slot, int layer, std::span<const float> values);
  void write_conv(StateSlot slot, int layer, std::span<const float> values);
  void copy_state(StateSlot src, StateSlot dst);

  // Of an attention layer.
  KvRows k_rows(int block, int layer) { return rows(block, layer, 0); }
  KvRows v_rows(int block, int layer) { return rows(block, layer, 1); }

  std::vector<int32_t> tokens;  // [token slot]

 private:
  enum class Part : uint8_t { delta, conv };
  std::span<std::byte> state(StateSlot slot);
  std::span<std::byte> part(StateSlot slot, int layer, Part part);
  KvRows rows(int block, int layer, size_t k_or_v);

  model::Dims dims_;
  MemorySpec spec_;
  plan::KvType kv_ = plan::KvType::f32;
  size_t state_stride_ = 0, block_bytes_ = 0;
  std::vector<std::byte> arena_;   // [state slot][delta layer][delta, conv]; shared places: blocks too
  std::vector<std::byte> blocks_;  // [block][attention layer][K, V], unless places are shared
};

}  // namespace lily::backend::reference
