#include "model/weight_stream.h"

#include <algorithm>
#include <atomic>

#include "base/error.h"
#include "model/part_reader.h"

namespace lily::model {
namespace {

constexpr size_t kSlabAlignment = 64;

}  // namespace

WeightStream::WeightStream(const Checkpoint& checkpoint, ThreadPool& pool)
    : checkpoint_(checkpoint), pool_(pool), slabs_(pool.n_threads()) {}

void WeightStream::for_each_slab(WeightId id, int64_t rows_per_slab,
                                 const std::function<void(int, const LinearSlab&)>& use) {
  const StoredWeight& weight = checkpoint_.weight(id);
  LILY_CHECK(weight.storage != Storage::f32 && rows_per_slab > 0, "{}: {} rows a slab", to_string(id),
             rows_per_slab);
  const std::vector<int64_t>& shape = weight.shape;
  const int64_t n_matrices = shape.size() == 3 ? shape[0] : 1;
  const int64_t n_out = shape[shape.size() - 2], n_in = shape.back();
  const int64_t slab_rows = std::min(rows_per_slab, n_out);
  const int64_t slabs_per_matrix = (n_out + slab_rows - 1) / slab_rows;
  const bool is_quantised = weight.storage != Storage::bf16;

  // Bytes of a row in memory.
  const int64_t code_bytes = weight.storage == Storage::q4 ? n_in / 2 : n_in;
  const int64_t n_groups = n_in / kQuantGroup;
  const auto aligned = [](int64_t n) {
    return (static_cast<size_t>(n) + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
  };
  const size_t first_bytes = aligned(slab_rows * (is_quantised ? code_bytes : n_in * 2));
  const size_t group_bytes = is_quantised ? aligned(slab_rows * n_groups * 2) : 0;
  const size_t slab_bytes = first_bytes + 2 * group_bytes;

  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  pool_.run([&](int thread) {
    try {
      PageBlock& memory = slabs_[thread];
      PartReader reader(checkpoint_);
      while (!stop) {
        const int64_t i = next.fetch_add(1);
        if (i >= n_matrices * slabs_per_matrix) return;
        if (memory.size() < slab_bytes) memory = PageBlock(slab_bytes);
        LinearSlab slab{.storage = weight.storage,
                        .matrix = i / slabs_per_matrix,
                        .first_row = i % slabs_per_matrix * slab_rows,
                        .in = n_in};
        slab.n_rows = std::min(slab_rows, n_out - slab.first_row);
        const int64_t row = slab.matrix * n_out + slab.first_row;  // counted over all matrices
        std::byte* const first = memory.data();
        if (is_quantised) {
          auto* const scales = reinterpret_cast<Bf16*>(first + first_bytes);
          auto* const biases = reinterpret_cast<Bf16*>(first + first_bytes + group_bytes);
          const auto n = static_cast<size_t>(slab.n_rows * n_groups);
          reader.read_bytes(weight.codes, row * code_bytes,
                            {first, static_cast<size_t>(slab.n_rows * code_bytes)});
          reader.read_bf16(weight.scales, row * n_groups, {scales, n});
          reader.read_bf16(weight.biases, row * n_groups, {biases, n});
          slab.codes = reinterpret_cast<const uint8_t*>(first);
          slab.scales = scales;
          slab.biases = biases;
        } else {
          auto* const values = reinterpret_cast<Bf16*>(first);
          reader.read_bf16(weight.values, row * n_in, {values, static_cast<size_t>(slab.n_rows * n_in)});
          slab.values = values;
        }
        use(thread, slab);
      }
    } catch (...) {
      stop = true;
      throw;
    }
  });
  checkpoint_.release_cached(weight);
}

std::vector<float> WeightStream::vector(WeightId id) {
  const StoredWeight& weight = checkpoint_.weight(id);
  LILY_CHECK(weight.storage == Storage::f32, "{} is a linear weight", to_string(id));
  std::vector<float> values(static_cast<size_t>(weight.values.n_bytes / dtype_bytes(weight.values.dtype)));
  PartReader(checkpoint_).read_f32(weight.values, 0, values);
  return values;
}

}  // namespace lily::model
