#include "backend/metal/weights.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/thread_pool.h"
#include "model/weight_stream.h"

namespace lily::metal {
namespace {

constexpr int64_t kSlabBytes = int64_t{4} << 20;

void copy(std::span<std::byte> to, int64_t offset, const void* from, int64_t bytes) {
  std::memcpy(to.subspan(static_cast<size_t>(offset), static_cast<size_t>(bytes)).data(), from,
              static_cast<size_t>(bytes));
}

void copy_slab(std::span<std::byte> to, const WeightLayout& l, int64_t rows_per_matrix,
               const model::LinearSlab& slab) {
  const int64_t row = slab.matrix * rows_per_matrix + slab.first_row;
  const int64_t row_bytes = l.in * code_bits(l.storage) / 8;
  const void* codes = slab.codes != nullptr ? static_cast<const void*>(slab.codes) : slab.values;
  copy(to, row * row_bytes, codes, slab.n_rows * row_bytes);
  if (slab.scales == nullptr) return;
  const int64_t group_bytes = l.in / model::kQuantGroup * 2;
  copy(to, l.scales + row * group_bytes, slab.scales, slab.n_rows * group_bytes);
  copy(to, l.biases + row * group_bytes, slab.biases, slab.n_rows * group_bytes);
}

}  // namespace

Weights::Weights(Device& gpu, const model::Checkpoint& checkpoint, const backend::Progress& progress,
                 size_t max_buffer_bytes) {
  const model::Dims& dims = checkpoint.dims();
  const size_t limit = std::min(max_buffer_bytes, gpu.limits().max_buffer_length);
  by_kind_.resize(model::kWeightKinds);
  for (auto& layers : by_kind_) layers.resize(static_cast<size_t>(dims.n_layers) + 1, {nullptr, 0, {}});
  const auto slot = [&](model::WeightId id) -> Range& {
    return by_kind_[static_cast<size_t>(id.weight)][static_cast<size_t>(id.layer + 1)];
  };

  // Which buffer each weight goes to, then the buffers.
  std::vector<size_t> lengths;
  std::vector<std::pair<model::WeightId, size_t>> places;  // those with bytes of their own, and their buffer
  for (const model::WeightSpec& spec : model::catalogue(dims)) {
    if (!(checkpoint.source(spec.id) == spec.id)) continue;
    const WeightLayout l = weight_layout(dims, spec.id, checkpoint.weight(spec.id).storage);
    const auto bytes = static_cast<size_t>(l.bytes);
    if (bytes > gpu.limits().max_buffer_length)
      fail(Fault::device, "{}: {} bytes are more than one buffer of this GPU can hold ({})", spec.name, bytes,
           gpu.limits().max_buffer_length);
    if (lengths.empty() || lengths.back() + bytes > limit) lengths.push_back(0);
    slot(spec.id) = {nullptr, lengths.back(), l};
    places.emplace_back(spec.id, lengths.size() - 1);
    lengths.back() += bytes;
    n_bytes_ += l.bytes;
  }
  if (gpu.limits().recommended_working_set != 0 &&
      static_cast<size_t>(n_bytes_) > gpu.limits().recommended_working_set)
    fail(Fault::device,
         "the weights take {:.1f} GB and this GPU should hold at most {:.1f} GB in all; use a machine with "
         "more memory",
         static_cast<double>(n_bytes_) * 1e-9,
         static_cast<double>(gpu.limits().recommended_working_set) * 1e-9);
  for (size_t i = 0; i < lengths.size(); ++i)
    buffers_.push_back(gpu.make_buffer(lengths[i], BufferUse::weights, fmt::format("weights {}", i)));

  ThreadPool pool(physical_cores());
  model::WeightStream stream(checkpoint, pool);
  int64_t done = 0;
  for (const auto& [id, buffer] : places) {
    Range& range = slot(id);
    range.buffer = buffers_[buffer].get();
    const WeightLayout& l = range.layout;
    const std::span<std::byte> to =
        buffers_[buffer]->contents().subspan(range.offset, static_cast<size_t>(l.bytes));
    if (l.storage == model::Storage::f32) {
      const std::vector<float> values = stream.vector(id);
      copy(to, 0, values.data(), static_cast<int64_t>(values.size()) * 4);
    } else {
      const model::WeightSpec spec = model::weight_spec(dims, id);
      const int64_t rows_per_matrix = spec.shape[spec.shape.size() - 2];
      const int64_t row_bytes = std::max<int64_t>(1, l.bytes / l.rows);
      stream.for_each_slab(
          id, std::clamp<int64_t>(kSlabBytes / row_bytes, 1, rows_per_matrix),
          [&](int, const model::LinearSlab& slab) { copy_slab(to, l, rows_per_matrix, slab); });
    }
    done += l.bytes;
    if (progress && !progress(done, n_bytes_)) fail(Fault::user, "interrupted");
  }
  for (const model::WeightSpec& spec : model::catalogue(dims))
    if (slot(spec.id).buffer == nullptr) slot(spec.id) = slot(checkpoint.source(spec.id));
}

const Weights::Range& Weights::range(model::WeightId id) const {
  const Range& r = by_kind_[static_cast<size_t>(id.weight)][static_cast<size_t>(id.layer + 1)];
  LILY_CHECK(r.buffer != nullptr, "{} is not loaded", model::to_string(id));
  return r;
}

}  // namespace lily::metal
