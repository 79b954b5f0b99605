// What the kernel tests share: device memory that starts poisoned, packed random weights with their exact
// values, and a comparison that reports the worst element. On a machine without a GPU the device build of a
// test skips.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "backend/cuda/kernels/host_types.h"
#include "base/half.h"
#include "pack/mma_q4.h"

#ifndef LILY_CUDA_EMULATED
#include "backend/cuda/check.h"
#endif

namespace lily::cuda {

inline bool device_present() {
#ifdef LILY_CUDA_EMULATED
  return true;
#else
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
#endif
}

class KernelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_present()) GTEST_SKIP() << "no CUDA device";
    const auto seed = static_cast<uint32_t>(::testing::UnitTest::GetInstance()->random_seed() + 20);
    RecordProperty("seed", static_cast<int>(seed));
    random.seed(seed);
  }
  float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(random); }
  float normal(float sigma = 1) { return std::normal_distribution<float>(0, sigma)(random); }
  std::mt19937 random;
};

inline void synchronize() {
#ifndef LILY_CUDA_EMULATED
  check(cudaGetLastError(), "launching");
  check(cudaDeviceSynchronize(), "running");
#endif
}

// n elements on the device; every byte 0xff until written, which is NaN in the float types.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t n) : n_(n) {
#ifdef LILY_CUDA_EMULATED
    p_ = static_cast<T*>(std::aligned_alloc(256, (n * sizeof(T) + 255) / 256 * 256));
#else
    check(cudaMalloc(reinterpret_cast<void**>(&p_), n * sizeof(T) + 256), "allocating");
#endif
    poison();
  }
  explicit DeviceBuffer(std::span<const T> data) : DeviceBuffer(data.size()) { upload(data); }
  explicit DeviceBuffer(const std::vector<T>& data) : DeviceBuffer(std::span<const T>(data)) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
#ifdef LILY_CUDA_EMULATED
    std::free(p_);
#else
    cudaFree(p_);
#endif
  }
  T* get() { return p_; }
  size_t size() const { return n_; }
  void poison() {
#ifdef LILY_CUDA_EMULATED
    std::memset(static_cast<void*>(p_), 0xff, n_ * sizeof(T));
#else
    check(cudaMemset(p_, 0xff, n_ * sizeof(T)), "poisoning");
#endif
  }
  void upload(std::span<const T> data) {
#ifdef LILY_CUDA_EMULATED
    std::memcpy(static_cast<void*>(p_), data.data(), data.size() * sizeof(T));
#else
    check(cudaMemcpy(p_, data.data(), data.size() * sizeof(T), cudaMemcpyHostToDevice), "uploading");
#endif
  }
  std::vector<T> download() {
    synchronize();
    std::vector<T> out(n_);
#ifdef LILY_CUDA_EMULATED
    std::memcpy(out.data(), p_, n_ * sizeof(T));
#else
    check(cudaMemcpy(out.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "downloading");
#endif
    return out;
  }

 private:
  T* p_ = nullptr;
  size_t n_;
};

inline std::vector<double> widened(std::span<const uint16_t> bf16) {
  std::vector<double> x;
  for (const uint16_t b : bf16) x.push_back(to_float(Bf16{b}));
  return x;
}

// A random affine 4-bit weight [rows, cols] in the packed layout, with the values it stands for.
struct Q4Weight {
  int rows = 0, cols = 0;
  std::vector<double> value;              // [rows, cols]
  std::vector<double> code, scale, bias;  // [rows, cols], [rows, groups]
  std::vector<unsigned char> packed;

  Q4Weight(std::mt19937& random, int n_rows, int n_cols, float sigma = 0.02f) : rows(n_rows), cols(n_cols) {
    const size_t n = static_cast<size_t>(rows) * static_cast<size_t>(cols), n_groups = n / 64;
    std::vector<uint32_t> codes(n / 8);
    for (auto& c : codes) c = static_cast<uint32_t>(random());
    std::vector<uint16_t> scales(n_groups), biases(n_groups);
    std::normal_distribution<float> normal(0, sigma);
    for (size_t g = 0; g < n_groups; ++g) {
      const float s = normal(random) / 4;  // either sign
      scales[g] = to_bf16(s).bits;
      biases[g] = to_bf16(-7.5f * s + normal(random)).bits;
      scale.push_back(to_float(Bf16{scales[g]}));
      bias.push_back(to_float(Bf16{biases[g]}));
    }
    for (size_t i = 0; i < n; ++i) {
      code.push_back(codes[i / 8] >> (4 * (i % 8)) & 15);
      value.push_back(scale[i / 64] * code[i] + bias[i / 64]);
    }
    packed.resize(pack::mma_q4::packed_bytes(rows, cols));
    pack::mma_q4::pack(codes, scales, biases, rows, cols, std::as_writable_bytes(std::span(packed)));
  }

  // Exact product with x and a bound on the kernel's rounding: x is held to half a unit of 1/32512 of its
  // group's maximum, integer sums are exact, and the sums over groups are fp32.
  struct Product {
    double y = 0, error = 0;
  };
  Product multiply(int row, std::span<const double> x) const {
    Product p;
    double largest = 0;
    for (int c = 0; c < cols; ++c) {
      if (c % 64 == 0) {
        largest = 0;
        for (int j = c; j < c + 64; ++j) largest = std::max(largest, std::fabs(x[static_cast<size_t>(j)]));
      }
      const size_t i = static_cast<size_t>(row) * static_cast<size_t>(cols) + static_cast<size_t>(c),
                   g = i / 64;
      const double xc = x[static_cast<size_t>(c)];
      p.y += value[i] * xc;
      p.error += std::fabs(value[i]) * largest * (0.5 / 32512) +
                 (std::fabs(scale[g]) * code[i] + std::fabs(bias[g])) * std::fabs(xc) * 0x1p-21;
    }
    return p;
  }
};

// Tracks the worst error in units of its tolerance; names the first element that exceeds it.
class Comparison {
 public:
  void add(double got, double expected, double tolerance, int i, int j = 0) {
    ++n_;
    const double error = std::fabs(got - expected);
    if (!(error <= tolerance)) {
      if (n_bad_++ == 0)
        ADD_FAILURE() << "element (" << i << ", " << j << "): " << got << ", expected " << expected
                      << ", error " << error << " over tolerance " << tolerance;
    }
    if (tolerance > 0) worst_ = std::max(worst_, error / tolerance);
  }
  ~Comparison() {
    EXPECT_GT(n_, 0);
    EXPECT_EQ(n_bad_, 0) << "of " << n_ << " elements; worst error / tolerance " << worst_;
    ::testing::Test::RecordProperty("worst_error_over_tolerance", std::to_string(worst_));
  }

 private:
  int n_ = 0, n_bad_ = 0;
  double worst_ = 0;
};

inline double silu_exact(double x) { return x / (1 + std::exp(-x)); }
inline double sigmoid_exact(double x) { return 1 / (1 + std::exp(-x)); }
inline constexpr double kBf16Half = 0x1p-8;  // one rounding to bf16, relative

}  // namespace lily::cuda
