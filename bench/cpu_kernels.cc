// Kernels of the cpu backend at the shapes of the real model, one thread: GB/s of memory read and GFLOP/s.
// Weights exceed the caches, as they do in a token.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "backend/cpu/kernels/attention.h"
#include "backend/cpu/kernels/delta_rule.h"
#include "backend/cpu/kernels/linear.h"
#include "backend/cpu/kernels/matrix_unit.h"
#include "backend/cpu/kernels/norm.h"
#include "backend/cpu/kernels/short_conv.h"
#include "backend/cpu/kernels/targets.h"
#include "base/page_block.h"
#include "pack/cpu_tiles.h"

namespace lily::backend::cpu {
namespace {

using model::Storage;

// Random bytes; quantised ones with scales and biases near 0.01, since numbers that are not normal cost
// processors a hundred times as much.
PageBlock random_tiles(Storage storage, int64_t rows, int64_t cols) {
  PageBlock block(static_cast<size_t>(pack::cpu_packed_bytes(storage, rows, cols)));
  std::mt19937 random(1);
  auto* words = reinterpret_cast<uint32_t*>(block.data());
  const size_t lines = storage == Storage::q4 ? 9 : 17;  // of a group; the last one holds scales and biases
  for (size_t i = 0; i < block.size() / 4; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    const bool is_code = storage != Storage::bf16 && i / 16 % lines != lines - 1;
    words[i] = is_code ? bits : 0x3c003c00u | (bits & 0x007f007fu);
  }
  return block;
}

std::vector<float> random_floats(int64_t n) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random);
  return x;
}

void set_rates(benchmark::State& state, double bytes, double flops) {
  const auto n = static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(n * bytes / 1e9, benchmark::Counter::kIsRate);
  state.counters["GFLOP/s"] = benchmark::Counter(n * flops / 1e9, benchmark::Counter::kIsRate);
}

// Target, storage, input width, activation rows, on the matrix unit, int8 planes of activations; 64 MiB of
// weights for few rows, 1,024 output rows for many.
void linear(benchmark::State& state) {
  const auto target = static_cast<SimdTarget>(state.range(0));
  const auto storage = static_cast<Storage>(state.range(1));
  const int64_t cols = state.range(2), n_rows = state.range(3);
  const bool on_unit = state.range(4) != 0;
  const auto n_planes = static_cast<int>(state.range(5));
  if (on_unit && !matrix_unit_present()) return state.SkipWithError("no matrix unit");
  use_target(target);
  const int64_t tile_bytes = pack::cpu_tile_bytes(storage, cols);
  const int64_t out = n_rows > kMaxTileRows ? 1024 : (int64_t{64} << 20) / tile_bytes * 16;
  const PageBlock tiles = random_tiles(storage, out, cols);
  const TileMatrix w{storage, reinterpret_cast<const uint8_t*>(tiles.data()), out, cols, tile_bytes};
  const std::vector<float> x = random_floats(n_rows * cols);
  PageBlock memory(static_cast<size_t>(quantised_bytes(n_rows, cols, n_planes)));
  const QuantisedRows quantised = quantised_rows(memory.data(), n_rows, cols, n_planes);
  for (int64_t r = 0; r < n_rows; ++r) quantise_row(x.data() + r * cols, quantised, r);
  std::vector<float> y(static_cast<size_t>(n_rows * out));
  PageBlock scratch(static_cast<size_t>(matrix_scratch_bytes(cols)));
  const InputRows in{.quantised = quantised,
                     .x = x.data(),
                     .x_stride = cols,
                     .matrix_scratch = on_unit ? scratch.data() : nullptr};
  for (auto _ : state) {
    linear_tiles(w, 0, w.n_tiles(), in, n_rows, {y.data(), out, 0, nullptr});
    benchmark::ClobberMemory();
  }
  set_rates(state, static_cast<double>(w.n_tiles() * tile_bytes),
            2.0 * static_cast<double>(n_rows * out * cols));
  state.SetLabel(std::string(to_string(target)) + (on_unit ? " AMX" : ""));
  use_target(runnable_targets().front());
}

void quantise(benchmark::State& state) {
  const int64_t cols = state.range(0);
  const std::vector<float> x = random_floats(cols);
  PageBlock memory(static_cast<size_t>(quantised_bytes(1, cols, 2)));
  const QuantisedRows rows = quantised_rows(memory.data(), 1, cols, 2);
  for (auto _ : state) {
    quantise_row(x.data(), rows, 0);
    benchmark::ClobberMemory();
  }
  set_rates(state, static_cast<double>(cols) * 6, static_cast<double>(cols) * 2);
}

void norm(benchmark::State& state) {
  const int64_t cols = state.range(0);
  const std::vector<float> x = random_floats(cols);
  std::vector<float> y(x);
  for (auto _ : state) {
    rms_norm(x.data(), x.data(), y.data(), cols);
    benchmark::ClobberMemory();
  }
  set_rates(state, static_cast<double>(cols) * 12, static_cast<double>(cols) * 4);
}

// Rows; the 32 value heads of a layer, whose states come from memory, as in a token: 1 GiB of them take
// turns.
void delta(benchmark::State& state) {
  constexpr int64_t kHeads = 32, kDim = 128, kStates = 512;
  const int64_t n_rows = state.range(0);
  const std::vector<float> x = random_floats(n_rows * kDim), g(static_cast<size_t>(n_rows), -0.1f);
  std::vector<float> q(x), o(x);
  for (int64_t t = 0; t < n_rows; ++t) l2_norm(q.data() + t * kDim, 1, q.data() + t * kDim, kDim);
  PageBlock states(static_cast<size_t>(kStates * kHeads * kDim * kDim * 4));
  auto* all = reinterpret_cast<float*>(states.data());
  std::fill_n(all, kStates * kHeads * kDim * kDim, 0.5f);
  int64_t turn = 0;
  for (auto _ : state) {
    float* s = all + turn++ % kStates * kHeads * kDim * kDim;
    for (int64_t head = 0; head < kHeads; ++head)
      delta_rule_scan({q.data(), q.data(), kDim, x.data(), kDim, g.data(), g.data(), 1, o.data(), kDim,
                       n_rows, s + head * kDim * kDim, s + head * kDim * kDim});
    benchmark::ClobberMemory();
  }
  set_rates(state, 2.0 * kHeads * kDim * kDim * 4, static_cast<double>(n_rows) * kHeads * kDim * kDim * 7);
}

void conv(benchmark::State& state) {
  constexpr int64_t kChannels = 8192;
  const int64_t n_rows = state.range(0);
  const std::vector<float> x = random_floats(n_rows * kChannels), w = random_floats(4 * kChannels);
  std::vector<float> y(x), s(3 * kChannels);
  for (auto _ : state) {
    short_conv({x.data(), kChannels, y.data(), kChannels, n_rows, kChannels, w.data(), s.data(), s.data()}, 0,
               kChannels);
    benchmark::ClobberMemory();
  }
  set_rates(state, static_cast<double>(n_rows * kChannels) * 8, static_cast<double>(n_rows * kChannels) * 12);
}

// Target, query rows of one KV head, keys, KV type.
void attention(benchmark::State& state) {
  use_target(static_cast<SimdTarget>(state.range(0)));
  const auto n_queries = static_cast<size_t>(state.range(1));
  const int64_t n_keys = state.range(2), n_blocks = n_keys / kKvKeys;
  KvLayer kv{nullptr, static_cast<plan::KvType>(state.range(3)), 1};
  kv.stride = kv.block_bytes();
  PageBlock memory(static_cast<size_t>(n_blocks * kv.block_bytes()));
  kv.blocks = memory.data();
  const std::vector<float> values = random_floats(256 + kKvKeys);
  for (int64_t key = 0; key < n_keys; ++key) {
    store_key(kv, key / kKvKeys, 0, static_cast<int>(key % kKvKeys), values.data() + key % kKvKeys);
    store_value(kv, key / kKvKeys, 0, static_cast<int>(key % kKvKeys), values.data() + key % kKvKeys);
  }
  std::vector<int32_t> table;
  for (int32_t i = 0; i < n_blocks; ++i) table.push_back(i);
  const std::vector<float> q = random_floats(static_cast<int64_t>(n_queries) * 256);
  std::vector<Query> queries;
  std::vector<Partial> partials(n_queries);
  std::vector<Partial*> pointers;
  for (size_t i = 0; i < n_queries; ++i) {
    queries.push_back({q.data() + 256 * i, n_keys});
    pointers.push_back(&partials[i]);
  }
  for (auto _ : state) {
    for (int64_t split = 0; split < n_splits(n_keys); ++split)
      attention_split(kv, 0, table, split, queries, pointers.data());
    benchmark::ClobberMemory();
  }
  set_rates(state, static_cast<double>(n_blocks * kv.block_bytes()),
            4.0 * 256 * static_cast<double>(n_queries) * static_cast<double>(n_keys));
}

void register_all() {
  for (const SimdTarget target : runnable_targets()) {
    const auto t = static_cast<int64_t>(target);
    for (const int64_t rows : {1, 2, 4, 8, 64}) {
      benchmark::RegisterBenchmark("linear_q4", linear)
          ->Args({t, static_cast<int64_t>(Storage::q4), 2048, rows, 0, 2});
      benchmark::RegisterBenchmark("linear_q4", linear)
          ->Args({t, static_cast<int64_t>(Storage::q4), 2048, rows, 0, 1});
      if (rows != 1 && rows != 64) continue;
      benchmark::RegisterBenchmark("linear_q4", linear)
          ->Args({t, static_cast<int64_t>(Storage::q4), 512, rows, 0, 2});
      benchmark::RegisterBenchmark("linear_q8", linear)
          ->Args({t, static_cast<int64_t>(Storage::q8), 2048, rows, 0, 2});
      benchmark::RegisterBenchmark("linear_bf16", linear)
          ->Args({t, static_cast<int64_t>(Storage::bf16), 2048, rows, 0, 2});
    }
  }
  for (const int64_t cols : {512, 2048, 4096})
    for (const int64_t rows : {16, 64, 512})
      for (const int64_t n_planes : {2, 1})
        benchmark::RegisterBenchmark("linear_q4", linear)
            ->Args({static_cast<int64_t>(runnable_targets().front()), static_cast<int64_t>(Storage::q4), cols,
                    rows, 1, n_planes});
  benchmark::RegisterBenchmark("quantise_row", quantise)->Arg(2048);
  benchmark::RegisterBenchmark("rms_norm", norm)->Arg(2048);
  for (const int64_t rows : {1, 64, 512}) benchmark::RegisterBenchmark("delta_rule", delta)->Arg(rows);
  for (const int64_t rows : {1, 512}) benchmark::RegisterBenchmark("short_conv", conv)->Arg(rows);
  for (const SimdTarget target : runnable_targets())
    for (const auto type : {plan::KvType::bf16, plan::KvType::int8})
      for (const int64_t queries : {8, 32})
        benchmark::RegisterBenchmark("attention", attention)
            ->Args({static_cast<int64_t>(target), queries, 16384, static_cast<int64_t>(type)});
}

const bool kRegistered = (register_all(), true);

}  // namespace
}  // namespace lily::backend::cpu
