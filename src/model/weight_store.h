// Weights in memory in the layout of the file, but aligned: what the reference backend, the Metal backend
// (which shares the blocks with the GPU) and tests compute from. Backends with a layout of their own use
// weight_stream.h.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/half.h"
#include "base/page_block.h"
#include "base/thread_pool.h"
#include "model/checkpoint.h"

namespace lily::model {

// A linear weight: n_matrices (experts; else 1) matrices [out, in], one after the other. w = scale * code +
// bias per group of 64 along `in`; scales may be negative. Pointers are 64-byte aligned; those of the other
// storage are null.
struct LinearView {
  Storage storage = Storage::bf16;  // q4, q8 or bf16
  int64_t n_matrices = 0, out = 0, in = 0;
  const uint8_t* codes = nullptr;  // [n_matrices * out, in / 2 or in]; q4: low nibble first
  const Bf16* scales = nullptr;    // [n_matrices * out, in / 64]
  const Bf16* biases = nullptr;    // likewise
  const Bf16* values = nullptr;    // [n_matrices * out, in]
};

// Called from the thread that loads. Returning false cancels: the load throws Fault::user.
using LoadProgress = std::function<bool(int64_t done_bytes, int64_t total_bytes)>;

inline constexpr int64_t kMaxBlockBytes = int64_t{4} << 30;

class WeightStore {
 public:
  // Reads the weights by all threads of the pool into blocks of at most max_block_bytes, in the order of
  // execution and cut between weights (one that is larger has a block of its own). Needs the weights' memory
  // and up to 128 MB while it loads. The checkpoint must outlive the call only.
  static WeightStore load(const Checkpoint& checkpoint, const std::vector<WeightId>& which, ThreadPool& pool,
                          const LoadProgress& progress = {}, int64_t max_block_bytes = kMaxBlockBytes);

  bool has(WeightId id) const { return find(id) != nullptr; }
  LinearView linear(WeightId id) const;
  std::span<const float> vector(WeightId id) const;  // norms, A_log, dt_bias; conv as [channels, 4]

  std::span<const PageBlock> blocks() const { return blocks_; }
  int64_t n_bytes() const { return n_bytes_; }  // of weights, without what alignment adds

 private:
  struct Entry {
    bool is_linear = false;
    LinearView linear;
    std::span<const float> vector;
  };

  void set_index(WeightId id, int32_t entry);
  const Entry* find(WeightId id) const;
  const Entry& entry(WeightId id) const;

  std::vector<PageBlock> blocks_;
  std::vector<Entry> entries_;
  std::vector<int32_t> by_index_;  // weight_index() -> entry, -1: not loaded
  int64_t n_bytes_ = 0;
};

}  // namespace lily::model
