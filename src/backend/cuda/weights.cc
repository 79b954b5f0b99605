#include "backend/cuda/weights.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "backend/cuda/kernels/repack.h"
#include "base/error.h"
#include "base/half.h"
#include "model/weight_stream.h"
#include "pack/mma_q4.h"

namespace lily::cuda {
namespace {

using model::Storage;
using model::Weight;
using model::WeightId;

// Bytes that a thread has in flight at a time; two such buffers a thread.
constexpr int64_t kSlabBytes = 8 << 20;

bool keeps_file_layout(Weight w) {
  return w == Weight::embed || w == Weight::router || w == Weight::shared_gate;
}
Storage wanted_storage(Weight w) {
  return w == Weight::router || w == Weight::shared_gate ? Storage::q8 : Storage::q4;
}

int64_t row_bytes(Storage storage, int64_t in) { return storage_bytes(in, storage); }

// Pinned and device staging of one reading thread: two slabs in turn.
struct Stager {
  explicit Stager(size_t n_bytes)
      : pinned{PinnedMemory(n_bytes), PinnedMemory(n_bytes)},
        raw{DeviceMemory(n_bytes), DeviceMemory(n_bytes)} {}
  PinnedMemory pinned[2];
  DeviceMemory raw[2];
  Event done[2];
  Stream stream;
  int turn = 0;
};

DeviceMemory uploaded(const void* data, size_t n_bytes) {
  DeviceMemory m(n_bytes);
  check(cudaMemcpy(m.get(), data, n_bytes, cudaMemcpyHostToDevice), "copying a weight to the device");
  return m;
}

}  // namespace

Weights::Weights(const model::Checkpoint& checkpoint, ThreadPool& pool, const backend::Progress& progress)
    : dims_(checkpoint.dims()) {
  const std::vector<model::WeightSpec> specs = model::catalogue(dims_);
  weights_.resize(static_cast<size_t>(dims_.n_layers + 1) * model::kWeightKinds);
  int64_t total = 0, done = 0;
  for (const auto& spec : specs) total += checkpoint.weight(checkpoint.source(spec.id)).n_bytes();

  model::WeightStream stream(checkpoint, pool);
  std::vector<std::unique_ptr<Stager>> stagers;
  for (int i = 0; i < pool.n_threads(); ++i)
    stagers.push_back(std::make_unique<Stager>(static_cast<size_t>(kSlabBytes)));

  for (const auto& spec : specs) {
    const WeightId source = checkpoint.source(spec.id);
    const model::StoredWeight& stored = checkpoint.weight(source);
    DeviceWeight& w = weights_.at(model::weight_index(spec.id));
    if (!spec.quantisable) {
      const std::vector<float> values = stream.vector(spec.id);
      if (spec.id.weight == Weight::conv) {
        std::vector<uint16_t> bits;
        for (const float x : values) bits.push_back(to_bf16(x).bits);
        memory_.push_back(uploaded(bits.data(), bits.size() * 2));
        w.bf16 = memory_.back().get<uint16_t>();
      } else {
        memory_.push_back(uploaded(values.data(), values.size() * 4));
        w.vector = memory_.back().get<float>();
      }
    } else {
      const Storage storage = wanted_storage(spec.id.weight);
      if (stored.storage != storage)
        fail(Fault::model, "{}: stored as {}, the cuda backend takes {} here; use --backend cpu",
             model::to_string(spec.id),
             stored.storage == Storage::q4   ? "4-bit"
             : stored.storage == Storage::q8 ? "8-bit"
                                             : "bf16",
             storage == Storage::q4 ? "4-bit" : "8-bit");
      w.in = spec.shape.back();
      w.out = spec.shape[spec.shape.size() - 2];
      w.n_matrices = spec.shape.size() == 3 ? spec.shape[0] : 1;
      const int64_t n_rows = w.n_matrices * w.out, groups = w.in / model::kQuantGroup,
                    code_bytes = storage == Storage::q4 ? w.in / 2 : w.in;
      const bool as_file = keeps_file_layout(spec.id.weight);
      const size_t matrix_bytes = pack::mma_q4::packed_bytes(static_cast<int>(w.out), static_cast<int>(w.in));
      std::byte *codes = nullptr, *records = nullptr;
      uint16_t *scales = nullptr, *biases = nullptr;
      if (as_file) {
        memory_.emplace_back(static_cast<size_t>(n_rows * code_bytes + 4 * n_rows * groups));
        codes = memory_.back().get();
        scales = memory_.back().get<uint16_t>(static_cast<size_t>(n_rows * code_bytes));
        biases = scales + n_rows * groups;
      } else {
        memory_.emplace_back(static_cast<size_t>(w.n_matrices) * matrix_bytes);
        records = memory_.back().get();
      }
      w.codes = codes;
      w.scales = scales;
      w.biases = biases;
      w.records = records;
      const int64_t rows_per_slab =
          std::max<int64_t>(pack::mma_q4::kTileRows, kSlabBytes / row_bytes(storage, w.in) /
                                                         pack::mma_q4::kTileRows * pack::mma_q4::kTileRows);
      stream.for_each_slab(source, rows_per_slab, [&](int thread, const model::LinearSlab& slab) {
        Stager& s = *stagers[static_cast<size_t>(thread)];
        const int turn = s.turn;
        s.turn ^= 1;
        s.done[turn].wait();
        const auto n_codes = static_cast<size_t>(slab.n_rows * code_bytes),
                   n_scales = static_cast<size_t>(slab.n_rows * groups) * 2;
        std::byte* pinned = s.pinned[turn].get();
        std::memcpy(pinned, slab.codes, n_codes);
        std::memcpy(pinned + n_codes, slab.scales, n_scales);
        std::memcpy(pinned + n_codes + n_scales, slab.biases, n_scales);
        const int64_t first_row = slab.matrix * w.out + slab.first_row;
        const auto copy = [&](void* to, const void* from, size_t n) {
          check(cudaMemcpyAsync(to, from, n, cudaMemcpyHostToDevice, s.stream.get()),
                "copying a weight to the device");
        };
        if (as_file) {
          copy(codes + first_row * code_bytes, pinned, n_codes);
          copy(scales + first_row * groups, pinned + n_codes, n_scales);
          copy(biases + first_row * groups, pinned + n_codes + n_scales, n_scales);
        } else {
          copy(s.raw[turn].get(), pinned, n_codes + 2 * n_scales);
          RepackQ4 repack;
          repack.codes = s.raw[turn].get<uint32_t>();
          repack.scales = s.raw[turn].get<uint16_t>(n_codes);
          repack.biases = s.raw[turn].get<uint16_t>(n_codes + n_scales);
          repack.rows = static_cast<int>(slab.n_rows);
          repack.cols = static_cast<int>(slab.in);
          repack.records = reinterpret_cast<uint32_t*>(
              records + static_cast<size_t>(slab.matrix) * matrix_bytes +
              pack::mma_q4::packed_bytes(static_cast<int>(slab.first_row), static_cast<int>(slab.in)));
          launch_repack_q4(repack, s.stream.get());
        }
        s.done[turn].record(s.stream);
      });
    }
    done += stored.n_bytes();
    if (progress && !progress(done, total)) fail(Fault::user, "interrupted");
  }
  for (const auto& s : stagers) s->stream.synchronize();

  std::vector<double> frequency;
  for (int i = 0; i < model::kRotaryDim / 2; ++i)
    frequency.push_back(std::pow(dims_.rope_theta, -2.0 * i / model::kRotaryDim));
  rope_frequency_ = uploaded(frequency.data(), frequency.size() * sizeof(double));
}

const DeviceWeight& Weights::get(WeightId id) const { return weights_.at(model::weight_index(id)); }

}  // namespace lily::cuda
