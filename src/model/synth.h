// Synthetic checkpoints: the true shapes in the true file layout with plausible random values, for measuring
// speed where the real weights cannot be had (docs/formats.md, "Synthetic checkpoints").
//
// The files look as the published ones do: 4-bit codes with bf16 scales and biases, 8-bit gates, tensors in
// no particular order, no alignment, shards of at most 5 GiB, an index. The bytes depend on the dimensions
// and the seed alone: integer hashing and exact float arithmetic, no library function that may differ between
// machines.
//
// Values: activations stay finite and of order one through all layers. Embedding rows share a constant part,
// for which each router row has a preference of its own: routing is uneven, as in trained models, and in
// every layer about as much (engine/routing.h counts it).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "base/thread_pool.h"
#include "model/dims.h"

namespace lily::model {

struct SynthOptions {
  uint64_t seed = 1;
  int64_t max_shard_bytes = int64_t{5} << 30;  // of tensor data
};

// Bytes that write_synthetic will put on disk, headers excluded.
int64_t synthetic_bytes(const Dims& dims);

// Writes config.json, generation_config.json, shards and index into `folder`, which is created or empty (else
// Error). Uses all threads of the pool and a few MB a thread.
// `progress` is called from the calling thread; returning false removes what was written and throws.
void write_synthetic(const Dims& dims, const std::filesystem::path& folder, const SynthOptions& options,
                     ThreadPool& pool,
                     const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress);

}  // namespace lily::model
