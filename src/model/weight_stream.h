// Weights passing through memory once, for backends that keep them in a layout of their own (packed for SIMD,
// or on a GPU): the caller sees each row range in temporary memory and puts it where it wants.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/half.h"
#include "base/page_block.h"
#include "base/thread_pool.h"
#include "model/checkpoint.h"

namespace lily::model {

// Rows [first_row, first_row + n_rows) of one matrix of a linear weight, laid out as in LinearView. Valid,
// and 64-byte aligned, during the call only.
struct LinearSlab {
  Storage storage = Storage::bf16;  // q4, q8 or bf16
  int64_t matrix = 0;               // expert; else 0
  int64_t first_row = 0, n_rows = 0, in = 0;
  const uint8_t* codes = nullptr;  // [n_rows, in / 2 or in]
  const Bf16* scales = nullptr;    // [n_rows, in / 64]
  const Bf16* biases = nullptr;    // likewise
  const Bf16* values = nullptr;    // [n_rows, in]
};

// One a backend load; keeps a slab's memory for each thread. Checks and converts as WeightStore does.
class WeightStream {
 public:
  // Both must outlive the stream.
  WeightStream(const Checkpoint& checkpoint, ThreadPool& pool);

  // Calls use(thread, slab) once for each slab of rows_per_slab rows (the last of a matrix may have fewer),
  // from all threads of the pool at once, 0 <= thread < pool.n_threads(), in no particular order. An
  // exception from `use` or from reading ends the loop and reaches the caller.
  void for_each_slab(WeightId id, int64_t rows_per_slab,
                     const std::function<void(int thread, const LinearSlab&)>& use);

  // A small weight whole (norms, A_log, dt_bias; conv as [channels, 4]).
  std::vector<float> vector(WeightId id);

 private:
  const Checkpoint& checkpoint_;
  ThreadPool& pool_;
  std::vector<PageBlock> slabs_;  // one a thread
};

}  // namespace lily::model
