#include "backend/processor_rates.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/cpu/kernels/dot_rate.h"
#include "backend/cpu/kernels/matrix_unit.h"
#include "backend/cpu/kernels/targets.h"
#include "base/error.h"
#include "base/page_block.h"
#include "base/thread_pool.h"

namespace lily::backend {
namespace {

constexpr size_t kReadBytes = size_t{1} << 30;
constexpr int kPasses = 5;
// Multiplications of a thread in a pass: some 20 ms of AVX2, some 3 ms of a matrix unit.
constexpr int64_t kProducts = int64_t{1} << 31, kUnitProducts = int64_t{1} << 33;

// Seconds of the fastest of several passes.
template <typename F>
double best_of(ThreadPool& pool, F pass) {
  double best_s = 1e9;
  for (int i = 0; i < kPasses; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(pass);
    best_s =
        std::min(best_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best_s;
}

double read_rate(ThreadPool& pool) {
  const PageBlock block(kReadBytes);
  const auto n_threads = static_cast<size_t>(pool.n_threads());
  const size_t share = kReadBytes / 8 / n_threads / 8 * 8;
  const auto part = [&](int thread) {
    return std::span(reinterpret_cast<uint64_t*>(block.data()) + static_cast<size_t>(thread) * share, share);
  };
  std::vector<uint64_t> sums(n_threads);
  pool.run([&](int thread) {  // first touch
    std::ranges::fill(part(thread), static_cast<uint64_t>(thread) + 1);
  });
  double seconds = 1e9;
  for (const bool asks_ahead : {false, true}) {
    seconds = std::min(seconds, best_of(pool, [&](int thread) {
                         sums[static_cast<size_t>(thread)] = cpu::sum_words(part(thread), asks_ahead);
                       }));
    for (size_t t = 0; t < n_threads; ++t) LILY_CHECK(sums[t] == (t + 1) * share, "sum {}", sums[t]);
  }
  return static_cast<double>(share * n_threads * 8) / seconds / 1e9;
}

double matrix_rate(ThreadPool& pool, bool on_unit) {
  std::vector<int64_t> done(static_cast<size_t>(pool.n_threads()));
  const double seconds = best_of(pool, [&](int thread) {
    int64_t& n = done[static_cast<size_t>(thread)];
    if (on_unit) {
      const cpu::MatrixUnit unit;
      n = cpu::MatrixUnit::run_products(kUnitProducts / (16 * 16 * 64));
    } else {
      n = cpu::run_dot_products(kProducts);
    }
  });
  double products = 0;
  for (const int64_t n : done) products += static_cast<double>(n);
  // A multiplication and an addition of two planes: as many operations as there are products of one.
  return products / seconds / 1e12;
}

}  // namespace

ProcessorRates measure_processor(std::string_view backend, int n_threads) {
  using cpu::SimdTarget;
  const SimdTarget target = backend == "cpu-avx2" ? SimdTarget::avx2 : cpu::runnable_targets().front();
  cpu::use_target(target);
  ThreadPool pool(n_threads);
  return {read_rate(pool),
          matrix_rate(pool, target == SimdTarget::avx512_vnni && cpu::matrix_unit_present())};
}

}  // namespace lily::backend
