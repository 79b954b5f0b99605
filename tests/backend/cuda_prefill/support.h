// What the prefill kernel tests share: device memory that is host memory when the kernels run emulated,
// random data with printed seeds, 4-bit matrices with their exact dequantised values.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "base/thread_pool.h"
#include "pack/mma_q4.h"
#ifdef LILY_CUDA_EMULATED
#include "tests/backend/cuda/emulation/emulated_device.h"
#else
#include "backend/cuda/check.h"
#endif

namespace lily::cuda::test {

#ifdef LILY_CUDA_EMULATED
inline constexpr int kMultiprocessors = 3;  // fewer blocks than items: the persistent loops turn
inline constexpr bool kEmulated = true;
inline void finish() {}
#else
inline constexpr int kMultiprocessors = 132;
inline constexpr bool kEmulated = false;
inline void finish() {
  check(cudaGetLastError(), "launching");
  check(cudaDeviceSynchronize(), "running");
}
#endif

// Device memory that starts as NaN in every floating type.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : n_(n) {
#ifdef LILY_CUDA_EMULATED
    data_ = static_cast<T*>(std::aligned_alloc(256, (n * sizeof(T) + 255) / 256 * 256));
    std::memset(data_, 0xff, n * sizeof(T));
#else
    check(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T) + 16), "allocating");
    check(cudaMemset(data_, 0xff, n * sizeof(T)), "poisoning");
#endif
  }
  DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { upload(host); }
  DeviceArray(DeviceArray&& o) noexcept : n_(o.n_), data_(std::exchange(o.data_, nullptr)) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() {
#ifdef LILY_CUDA_EMULATED
    std::free(data_);
#else
    cudaFree(data_);
#endif
  }
  void upload(const std::vector<T>& host) {
#ifdef LILY_CUDA_EMULATED
    std::memcpy(data_, host.data(), host.size() * sizeof(T));
#else
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "uploading");
#endif
  }
  void poison() {
#ifdef LILY_CUDA_EMULATED
    std::memset(data_, 0xff, n_ * sizeof(T));
#else
    check(cudaMemset(data_, 0xff, n_ * sizeof(T)), "poisoning");
#endif
  }
  std::vector<T> download() const {
    std::vector<T> host(n_);
#ifdef LILY_CUDA_EMULATED
    std::memcpy(host.data(), data_, n_ * sizeof(T));
#else
    finish();
    check(cudaMemcpy(host.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "downloading");
#endif
    return host;
  }
  T* get() const { return data_; }
  size_t size() const { return n_; }

 private:
  size_t n_;
  T* data_ = nullptr;
};

// What the tests expect is worked out by all cores: body(i) for 0 <= i < n, in any order.
template <typename Body>
void for_each_index(size_t n, const Body& body) {
  static ThreadPool pool(physical_cores());
  pool.parallel_for(static_cast<int64_t>(n), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(static_cast<size_t>(i));
  });
}

inline float value(uint16_t bits) { return to_float(Bf16{bits}); }
inline uint16_t bits(double x) { return to_bf16(static_cast<float>(x)).bits; }

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {
    ::testing::Test::RecordProperty("seed", std::to_string(seed));
  }
  float normal(float sigma = 1.0f) { return std::normal_distribution<float>(0.0f, sigma)(engine_); }
  float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(engine_); }
  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(engine_); }
  std::vector<uint16_t> normals(size_t n, float sigma = 1.0f) {
    std::vector<uint16_t> out(n);
    for (auto& x : out) x = bits(normal(sigma));
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

// A random 4-bit matrix: its packed bytes and the bf16 values that kernels must use.
struct Matrix {
  int n_rows, n_cols;
  std::vector<std::byte> packed;
  std::vector<float> weights;  // [n_rows, n_cols]

  Matrix(Random& random, int rows, int cols) : n_rows(rows), n_cols(cols) {
    const size_t n = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    std::vector<uint32_t> codes(n / 8);
    std::vector<uint16_t> scales(n / 64), biases(n / 64);
    for (auto& c : codes)
      c = static_cast<uint32_t>(random.below(1 << 16)) << 16 | static_cast<uint32_t>(random.below(1 << 16));
    for (size_t i = 0; i < scales.size(); ++i) {
      const float s = random.uniform(0.3f, 1.0f) / std::sqrt(static_cast<float>(cols)) / 4.6f;
      const bool negative = random.below(2) != 0;  // the encoder pins either end of the range
      scales[i] = bits(negative ? -s : s);
      biases[i] = bits((negative ? 7.5f : -7.5f) * s + random.normal(s));
    }
    packed.resize(pack::mma_q4::packed_bytes(rows, cols));
    pack::mma_q4::pack(codes, scales, biases, rows, cols, packed);
    weights.resize(n);
    for (size_t i = 0; i < n; ++i)
      weights[i] =
          bf16_rounded(value(scales[i / 64]) * static_cast<float>(codes[i / 8] >> (4 * (i % 8)) & 15u) +
                       value(biases[i / 64]));
  }
};

// Compares with a reference; the tolerance of an element is relative * |reference| + absolute. Reports the
// worst.
inline void expect_close(const std::vector<float>& got, const std::vector<double>& want, double relative,
                         const std::vector<double>& absolute, int row_length, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double tolerance = relative * std::abs(want[i]) + absolute[absolute.size() == 1 ? 0 : i];
    const double excess = std::isfinite(got[i]) ? std::abs(got[i] - want[i]) / tolerance : INFINITY;
    if (excess > worst) worst = excess, at = i;
  }
  EXPECT_LE(worst, 1.0) << what << ": row " << at / static_cast<size_t>(row_length) << ", column "
                        << at % static_cast<size_t>(row_length) << ": got " << got[at] << ", want "
                        << want[at];
}

inline std::vector<float> values(const std::vector<uint16_t>& x) {
  std::vector<float> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = value(x[i]);
  return out;
}

}  // namespace lily::cuda::test
