#include "model/weight_store.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "base/error.h"
#include "model/part_reader.h"

namespace lily::model {
namespace {

constexpr int64_t kAlignment = 64;
// Large enough for full read speed, small enough that all threads end together.
constexpr int64_t kPieceBytes = int64_t{4} << 20;

int64_t aligned(int64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

enum class As { bytes, bf16, f32 };

// A tensor's place in memory.
struct Target {
  const Part* part = nullptr;
  As as = As::bytes;
  int64_t n_elements = 0;
  int64_t n_bytes() const { return as == As::bytes ? part->n_bytes : n_elements * (as == As::bf16 ? 2 : 4); }
};

Target target_of(const Part& part, As as) {
  return {&part, as, as == As::bytes ? part.n_bytes : part.n_bytes / dtype_bytes(part.dtype)};
}

std::vector<Target> targets_of(const StoredWeight& weight) {
  std::vector<Target> targets = {};
  if (weight.storage == Storage::f32) {
    targets.push_back(target_of(weight.values, As::f32));
  } else if (weight.storage == Storage::bf16) {
    targets.push_back(target_of(weight.values, As::bf16));
  } else {
    targets.push_back(target_of(weight.codes, As::bytes));
    targets.push_back(target_of(weight.scales, As::bf16));
    targets.push_back(target_of(weight.biases, As::bf16));
  }
  return targets;
}

// What one thread reads at a time.
struct Piece {
  Target target;
  int64_t first = 0, n = 0;  // elements of the target
  std::byte* memory = nullptr;
  int64_t element_bytes() const { return target.as == As::bytes ? 1 : dtype_bytes(target.part->dtype); }
};

void read_piece(const Piece& piece, PartReader& reader) {
  const Part& part = *piece.target.part;
  switch (piece.target.as) {
    case As::bytes:
      return reader.read_bytes(part, piece.first, {piece.memory, static_cast<size_t>(piece.n)});
    case As::bf16:
      return reader.read_bf16(part, piece.first,
                              {reinterpret_cast<Bf16*>(piece.memory), static_cast<size_t>(piece.n)});
    case As::f32:
      return reader.read_f32(part, piece.first,
                             {reinterpret_cast<float*>(piece.memory), static_cast<size_t>(piece.n)});
  }
}

void read_all(const Checkpoint& checkpoint, std::vector<Piece> pieces, ThreadPool& pool,
              const LoadProgress& progress) {
  // By position in the files, so that disks and read-ahead see one stream.
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    const auto key = [](const Piece& p) {
      return std::pair(p.target.part->file, p.target.part->offset + p.first * p.element_bytes());
    };
    return key(a) < key(b);
  });
  int64_t total_bytes = 0;
  for (const Piece& piece : pieces) total_bytes += piece.n * piece.element_bytes();

  std::atomic<size_t> next{0};
  std::atomic<int64_t> done_bytes{0};
  std::atomic<bool> stop{false};
  bool is_cancelled = false;
  const auto report = [&] {
    if (progress && !progress(done_bytes.load(), total_bytes)) is_cancelled = stop = true;
  };
  report();
  pool.run([&](int thread) {
    try {
      PartReader reader(checkpoint);
      while (!stop) {
        const size_t i = next.fetch_add(1);
        if (i >= pieces.size()) return;
        read_piece(pieces[i], reader);
        done_bytes.fetch_add(pieces[i].n * pieces[i].element_bytes());
        if (thread == 0) report();  // the calling thread
      }
    } catch (...) {
      stop = true;
      throw;
    }
  });
  if (!is_cancelled) report();
  if (is_cancelled) fail(Fault::user, "{}: loading was cancelled", checkpoint.folder().filename().string());
}

// Where a weight will lie.
struct Placed {
  WeightId id;
  const StoredWeight* weight = nullptr;
  std::vector<Target> targets = {};
  size_t block = 0;
  int64_t offset = 0;
};

// The weights in the catalogue's order, each once, and the bytes of each block.
std::vector<Placed> place(const Checkpoint& checkpoint, const std::vector<WeightId>& which,
                          int64_t max_block_bytes, std::vector<int64_t>& block_bytes) {
  std::set<size_t> wanted;
  for (const WeightId id : which) wanted.insert(weight_index(checkpoint.source(id)));
  std::vector<Placed> placed;
  for (const WeightSpec& spec : catalogue(checkpoint.dims())) {
    if (wanted.erase(weight_index(spec.id)) == 0) continue;
    Placed next{.id = spec.id, .weight = &checkpoint.weight(spec.id)};
    next.targets = targets_of(*next.weight);
    int64_t n_bytes = 0;
    for (const Target& target : next.targets) n_bytes += aligned(target.n_bytes());
    if (block_bytes.empty() || (block_bytes.back() > 0 && block_bytes.back() + n_bytes > max_block_bytes))
      block_bytes.push_back(0);
    next.block = block_bytes.size() - 1;
    next.offset = block_bytes.back();
    block_bytes.back() += n_bytes;
    placed.push_back(std::move(next));
  }
  LILY_CHECK(wanted.empty(), "{} weights are not in the catalogue", wanted.size());
  return placed;
}

void add_pieces(const Target& target, std::byte* memory, std::vector<Piece>& pieces) {
  const int64_t n_at_once = kPieceBytes / Piece{target}.element_bytes();
  const int64_t bytes_each = target.n_bytes() / target.n_elements;
  for (int64_t first = 0; first < target.n_elements; first += n_at_once)
    pieces.push_back(
        {target, first, std::min(n_at_once, target.n_elements - first), memory + first * bytes_each});
}

LinearView linear_view(const StoredWeight& weight, const std::vector<std::byte*>& starts) {
  const std::vector<int64_t>& shape = weight.shape;
  LinearView view{.storage = weight.storage,
                  .n_matrices = shape.size() == 3 ? shape[0] : 1,
                  .out = shape[shape.size() - 2],
                  .in = shape.back()};
  if (weight.storage == Storage::bf16) {
    view.values = reinterpret_cast<const Bf16*>(starts[0]);
  } else {
    view.codes = reinterpret_cast<const uint8_t*>(starts[0]);
    view.scales = reinterpret_cast<const Bf16*>(starts[1]);
    view.biases = reinterpret_cast<const Bf16*>(starts[2]);
  }
  return view;
}

}  // namespace

WeightStore WeightStore::load(const Checkpoint& checkpoint, const std::vector<WeightId>& which,
                              ThreadPool& pool, const LoadProgress& progress, int64_t max_block_bytes) {
  WeightStore store;
  std::vector<int64_t> block_bytes;
  const std::vector<Placed> placed = place(checkpoint, which, max_block_bytes, block_bytes);
  for (const int64_t n_bytes : block_bytes) store.blocks_.emplace_back(static_cast<size_t>(n_bytes));

  std::vector<Piece> pieces;
  for (const Placed& p : placed) {
    std::byte* memory = store.blocks_[p.block].data() + p.offset;
    std::vector<std::byte*> starts;  // of the targets
    for (const Target& target : p.targets) {
      starts.push_back(memory);
      add_pieces(target, memory, pieces);
      memory += aligned(target.n_bytes());
      store.n_bytes_ += target.n_bytes();
    }
    Entry entry;
    entry.is_linear = p.weight->storage != Storage::f32;
    if (entry.is_linear) entry.linear = linear_view(*p.weight, starts);
    else
      entry.vector = {reinterpret_cast<const float*>(starts[0]),
                      static_cast<size_t>(p.targets[0].n_elements)};
    store.set_index(p.id, static_cast<int32_t>(store.entries_.size()));
    store.entries_.push_back(entry);
  }
  // An lm_head tied to the embedding is the embedding.
  for (const WeightId id : which) store.set_index(id, store.by_index_[weight_index(checkpoint.source(id))]);
  read_all(checkpoint, std::move(pieces), pool, progress);
  for (const Placed& p : placed) checkpoint.release_cached(*p.weight);
  return store;
}

void WeightStore::set_index(WeightId id, int32_t entry) {
  const size_t index = weight_index(id);
  if (index >= by_index_.size()) by_index_.resize(index + 1, -1);
  by_index_[index] = entry;
}

const WeightStore::Entry* WeightStore::find(WeightId id) const {
  const size_t index = weight_index(id);
  if (index >= by_index_.size() || by_index_[index] < 0) return nullptr;
  return &entries_[static_cast<size_t>(by_index_[index])];
}

const WeightStore::Entry& WeightStore::entry(WeightId id) const {
  const Entry* found = find(id);
  LILY_CHECK(found, "{} was not loaded", to_string(id));
  return *found;
}

LinearView WeightStore::linear(WeightId id) const {
  LILY_CHECK(entry(id).is_linear, "{} is a vector", to_string(id));
  return entry(id).linear;
}

std::span<const float> WeightStore::vector(WeightId id) const {
  LILY_CHECK(!entry(id).is_linear, "{} is a linear weight", to_string(id));
  return entry(id).vector;
}

}  // namespace lily::model
