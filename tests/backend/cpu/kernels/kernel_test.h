// What the kernel tests share: one run for each instruction set of this machine, random data, aligned memory
// whose unused part is poisoned, and a comparison that reports the worst coordinate.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "backend/cpu/kernels/linear.h"
#include "backend/cpu/kernels/targets.h"
#include "base/half.h"
#include "pack/cpu_tiles.h"

namespace lily::backend::cpu {

inline constexpr double kEps = 0x1p-24;  // half a unit in the last place of 1, fp32

// A test that runs once for each runnable target.
class PerTarget : public testing::TestWithParam<SimdTarget> {
 protected:
  void SetUp() override { use_target(GetParam()); }
  void TearDown() override { use_target(runnable_targets().front()); }
};

inline std::string target_test_name(const testing::TestParamInfo<SimdTarget>& info) {
  std::string name(to_string(info.param));
  std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
  return name;
}

#define LILY_FOR_EACH_TARGET(suite) \
  INSTANTIATE_TEST_SUITE_P(Targets, suite, testing::ValuesIn(runnable_targets()), target_test_name)

inline constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// 64-byte aligned array of T, filled with 0xff (a NaN in every float format).
template <typename T>
class Aligned {
 public:
  explicit Aligned(int64_t n) : n_(n), data_(static_cast<T*>(::operator new(bytes(), std::align_val_t{64}))) {
    std::memset(static_cast<void*>(data_.get()), 0xff, bytes());
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) { return data_.get()[i]; }
  const T& operator[](int64_t i) const { return data_.get()[i]; }
  int64_t size() const { return n_; }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  size_t bytes() const { return (static_cast<size_t>(n_) * sizeof(T) + 63) / 64 * 64 + 64; }
  int64_t n_;
  std::unique_ptr<T, Free> data_;
};

inline std::vector<float> random_floats(int64_t n, std::mt19937& random, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random);
  return x;
}

// A random weight, packed, beside the exact values it stands for.
struct TestWeight {
  model::Storage storage;
  int64_t rows, cols;
  Aligned<std::byte> tiles;
  std::vector<double> values;  // [rows, cols]

  TestWeight(model::Storage s, int64_t n_rows, int64_t n_cols, std::mt19937& random)
      : storage(s),
        rows(n_rows),
        cols(n_cols),
        tiles(pack::cpu_packed_bytes(s, n_rows, n_cols)),
        values(static_cast<size_t>(n_rows * n_cols)) {
    const bool q = s != model::Storage::bf16;
    const int64_t bits = s == model::Storage::q4 ? 4 : s == model::Storage::q8 ? 8 : 16;
    std::vector<std::byte> codes(static_cast<size_t>(rows * cols * bits / 8));
    std::vector<uint16_t> scales(q ? static_cast<size_t>(rows * cols / 64) : 0), biases(scales.size());
    std::normal_distribution<float> normal;
    for (size_t g = 0; g < scales.size(); ++g) {
      const float scale = normal(random) * (s == model::Storage::q4 ? 0.01f : 0.001f);  // of either sign
      scales[g] = to_bf16(scale).bits;
      biases[g] = to_bf16(-8 * scale + 0.01f * normal(random)).bits;
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const auto i = static_cast<size_t>(r * cols + c);
        if (!q) {
          const Bf16 w = to_bf16(normal(random) * 0.05f);
          std::memcpy(&codes[2 * i], &w.bits, 2);
          values[i] = to_float(w);
          continue;
        }
        const auto code = static_cast<uint32_t>(random() & ((1u << bits) - 1));
        if (bits == 8) codes[i] = static_cast<std::byte>(code);
        else codes[i / 2] |= static_cast<std::byte>(i % 2 == 0 ? code : code << 4);
        const size_t g = i / 64;
        values[i] = static_cast<double>(to_float(Bf16{scales[g]})) * code + to_float(Bf16{biases[g]});
      }
    }
    pack::pack_cpu_tiles(
        {s, rows, cols, codes, std::as_bytes(std::span(scales)), std::as_bytes(std::span(biases))}, 0,
        pack::cpu_tiles(rows), {tiles.data(), static_cast<size_t>(tiles.size())});
  }
  TestWeight(const TestWeight&) = delete;

  TileMatrix matrix() const {
    return {storage, reinterpret_cast<const uint8_t*>(tiles.data()), rows, cols,
            pack::cpu_tile_bytes(storage, cols)};
  }
  double at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }
};

// Activation rows, quantised too.
struct TestRows {
  int64_t rows, cols;
  std::vector<float> x;
  Aligned<std::byte> memory;
  QuantisedRows quantised;

  TestRows(int64_t n_rows, int64_t n_cols, std::vector<float> values, int n_planes = 2)
      : rows(n_rows),
        cols(n_cols),
        x(std::move(values)),
        memory(quantised_bytes(n_rows, n_cols, n_planes)),
        quantised(quantised_rows(memory.data(), n_rows, n_cols, n_planes)) {
    for (int64_t r = 0; r < rows; ++r) quantise_row(x.data() + r * cols, quantised, r);
  }
  TestRows(const TestRows&) = delete;
  InputRows input() const { return {.quantised = quantised, .x = x.data(), .x_stride = cols}; }
};

// Largest |got - want| / allowed over all coordinates, with where it is: at most 1 passes.
struct Worst {
  double ratio = 0;
  int64_t at = -1;
  double got = 0, want = 0, allowed = 0;
  void see(int64_t i, double value, double expected, double tolerance) {
    const double error = std::abs(value - expected);
    const double r =
        std::isfinite(value) ? error / std::max(tolerance, 1e-300) : std::numeric_limits<double>::infinity();
    if (r > ratio || at < 0) *this = {r, i, value, expected, tolerance};
  }
};

#define LILY_EXPECT_CLOSE(worst)                                                                           \
  EXPECT_LE((worst).ratio, 1.0) << "coordinate " << (worst).at << ": got " << (worst).got << ", expected " \
                                << (worst).want << ", allowed error " << (worst).allowed

}  // namespace lily::backend::cpu
