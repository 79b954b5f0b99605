#include "backend/cpu/weights.h"

#include <algorithm>
#include <atomic>

#include "base/error.h"
#include "model/weight_stream.h"
#include "pack/cpu_tiles.h"

namespace lily::backend::cpu {
namespace {

using model::Storage;
using model::Weight;
using model::WeightId;

// Rows that a thread reads and packs at a time; a multiple of a tile.
constexpr int64_t kRowsPerSlab = 256;

template <typename T>
std::span<const std::byte> bytes_of(const T* data, int64_t n) {
  return data == nullptr ? std::span<const std::byte>()
                         : std::as_bytes(std::span(data, static_cast<size_t>(n)));
}

pack::MatrixBytes matrix_of(const model::LinearSlab& slab) {
  const int64_t n = slab.n_rows * slab.in;
  pack::MatrixBytes m{slab.storage, slab.n_rows, slab.in, {}};
  if (slab.storage == Storage::bf16) {
    m.codes = bytes_of(slab.values, n);
    return m;
  }
  m.codes = bytes_of(slab.codes, slab.storage == Storage::q4 ? n / 2 : n);
  m.scales = bytes_of(slab.scales, n / model::kQuantGroup);
  m.biases = bytes_of(slab.biases, n / model::kQuantGroup);
  return m;
}

std::vector<float> transposed_conv(const std::vector<float>& by_channel) {
  const size_t channels = by_channel.size() / model::kConvTaps;
  std::vector<float> by_tap(by_channel.size());
  for (size_t c = 0; c < channels; ++c)
    for (size_t tap = 0; tap < model::kConvTaps; ++tap)
      by_tap[tap * channels + c] = by_channel[c * model::kConvTaps + tap];
  return by_tap;
}

}  // namespace

size_t Weights::index(WeightId id) const {
  return static_cast<size_t>((id.layer + 1) * model::kWeightKinds + static_cast<int>(id.weight));
}

Weights::Weights(const model::Dims& dims) : dims_(dims) {
  static constexpr uint8_t kNothing = 0;
  linear_.resize(static_cast<size_t>(dims_.n_layers + 1) * model::kWeightKinds);
  vectors_.resize(linear_.size());
  for (const auto& spec : model::catalogue(dims_)) {
    if (!spec.quantisable) {
      vectors_[index(spec.id)].resize(1);
      continue;
    }
    const Storage storage = model::published_storage(spec.id.weight);
    const int64_t cols = spec.shape.back(), rows = spec.shape[spec.shape.size() - 2];
    linear_[index(spec.id)] = {{storage, &kNothing, rows, cols, pack::cpu_tile_bytes(storage, cols)},
                               spec.shape.size() == 3 ? spec.shape[0] : 1};
  }
}

Weights::Weights(const model::Checkpoint& checkpoint, ThreadPool& pool, const backend::Progress& progress)
    : dims_(checkpoint.dims()) {
  const std::vector<model::WeightSpec> specs = model::catalogue(dims_);
  linear_.resize(static_cast<size_t>(dims_.n_layers + 1) * model::kWeightKinds);
  vectors_.resize(linear_.size());
  int64_t total = 0, done = 0;
  for (const auto& spec : specs)
    if (checkpoint.source(spec.id) == spec.id) total += checkpoint.weight(spec.id).n_bytes();

  model::WeightStream stream(checkpoint, pool);
  for (const auto& spec : specs) {
    const WeightId source = checkpoint.source(spec.id);
    if (source != spec.id) continue;  // tied: taken from its source below
    const model::StoredWeight& stored = checkpoint.weight(spec.id);
    if (!spec.quantisable) {
      std::vector<float> values = stream.vector(spec.id);
      n_bytes_ += static_cast<int64_t>(values.size() * sizeof(float));
      vectors_[index(spec.id)] = spec.id.weight == Weight::conv ? transposed_conv(values) : std::move(values);
    } else {
      const int64_t cols = spec.shape.back(), rows = spec.shape[spec.shape.size() - 2];
      const int64_t n_matrices = spec.shape.size() == 3 ? spec.shape[0] : 1;
      const int64_t matrix_bytes = pack::cpu_packed_bytes(stored.storage, rows, cols);
      const int64_t tile_bytes = pack::cpu_tile_bytes(stored.storage, cols);
      PageBlock block(static_cast<size_t>(n_matrices * matrix_bytes));
      stream.for_each_slab(spec.id, kRowsPerSlab, [&](int, const model::LinearSlab& slab) {
        const int64_t first_tile = slab.first_row / pack::kCpuTileRows,
                      n_tiles = pack::cpu_tiles(slab.n_rows);
        std::byte* to = block.data() + slab.matrix * matrix_bytes + first_tile * tile_bytes;
        pack::pack_cpu_tiles(matrix_of(slab), 0, n_tiles, {to, static_cast<size_t>(n_tiles * tile_bytes)});
      });
      linear_[index(spec.id)] = {
          {stored.storage, reinterpret_cast<const uint8_t*>(block.data()), rows, cols, tile_bytes},
          n_matrices};
      n_bytes_ += n_matrices * matrix_bytes;
      blocks_.push_back(std::move(block));
    }
    done += stored.n_bytes();
    if (progress && !progress(done, total)) fail(Fault::user, "interrupted");
  }
  for (const auto& spec : specs) {
    const WeightId source = checkpoint.source(spec.id);
    if (source != spec.id) linear_[index(spec.id)] = linear_[index(source)];
  }
}

const PackedWeight& Weights::linear(WeightId id) const {
  const PackedWeight& w = linear_[index(id)];
  LILY_CHECK(w.first.tiles != nullptr, "{} is not a linear weight of this model", model::to_string(id));
  return w;
}

std::span<const float> Weights::vector(WeightId id) const {
  const std::vector<float>& v = vectors_[index(id)];
  LILY_CHECK(!v.empty(), "{} is not a vector of this model", model::to_string(id));
  return v;
}

}  // namespace lily::backend::cpu
