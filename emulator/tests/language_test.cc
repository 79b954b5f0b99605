#include <gtest/gtest.h>

#include <numeric>

#include "base/half.h"
#include "emulator/tests/test_device.h"
#include "emulator_language.h"
#include "emulator_language_emulated.h"

namespace lily::emulator {
namespace {

// Each test runs in both builds.
class Language : public testing::TestWithParam<const CompiledLibrary*> {
 protected:
  TestDevice device_{metal::emulator_language, Options{.libraries = {GetParam()}}};

  void run(std::string_view kernel, std::vector<const metal::Buffer*> buffers, metal::Size3 groups,
           metal::Size3 threads) {
    EXPECT_EQ(device_.run([&](metal::Encoder& e) {
      e.set_pipeline(device_.pipeline(kernel));
      for (size_t i = 0; i < buffers.size(); ++i) e.set_buffer(static_cast<int>(i), *buffers[i]);
      e.dispatch_threadgroups(groups, threads, {});
    }),
              "");
    EXPECT_TRUE(device_->findings().empty()) << device_.report();
  }
};

TEST_P(Language, VectorsSwizzleConvertAndCompare) {
  auto o = device_.buffer("o", std::vector<float>(12, -1.0f));
  auto packed = device_.buffer("packed", std::vector<float>(6, -1.0f));
  run("vectors", {o.get(), packed.get()}, {1, 1, 1}, {1, 1, 1});
  EXPECT_EQ(device_.values<float>(*o),
            (std::vector<float>{4, 3, 17, 643, 16.12f, 6, 4, 127, 1, 6, 4 + 4 + 5 + 2, -1 + 18}));
  EXPECT_EQ(device_.values<float>(*packed), (std::vector<float>{-1, -1, -1, 6, 4, 3}));
}

TEST_P(Language, SmallFloatsRoundToNearestEvenAfterEachOperation) {
  auto o = device_.buffer("o", std::vector<float>(9, -1.0f));
  auto b = device_.buffer("b", std::vector<uint16_t>(2));
  auto h = device_.buffer("h", std::vector<uint16_t>(2));
  run("small_floats", {o.get(), b.get(), h.get()}, {1, 1, 1}, {1, 1, 1});
  EXPECT_EQ(device_.values<float>(*o),
            (std::vector<float>{1.0f, 1.015625f, 2048.0f, 1.0f, 1.0f, 1.00390625f, 1.0f, 1.0f, 4.0f}));
  EXPECT_EQ(device_.values<uint16_t>(*h), (std::vector<uint16_t>{0x6800, 0x7c00}));
}

TEST_P(Language, IntegerFunctions) {
  auto o = device_.buffer("o", std::vector<uint32_t>(10));
  run("integers", {o.get()}, {1, 1, 1}, {1, 1, 1});
  EXPECT_EQ(device_.values<uint32_t>(*o),
            (std::vector<uint32_t>{3, 8, 15, 32, 0x18, 0xd12, 0xfffff00f, 0x80000000, 0xffffffff, 7232}));
}

TEST_P(Language, SimdgroupFunctions) {
  auto o = device_.buffer("o", std::vector<uint32_t>(32 * 16));
  run("simdgroup_functions", {o.get()}, {1, 1, 1}, {32, 1, 1});
  const auto values = device_.values<uint32_t>(*o);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const std::vector<uint32_t> row(values.begin() + lane * 16, values.begin() + lane * 16 + 16);
    const uint32_t quad = lane / 4 * 4;
    EXPECT_EQ(
        row, (std::vector<uint32_t>{496, 93, lane * (lane - 1) / 2, lane + 1, 7, lane ^ 5,
                                    lane + 2 < 32 ? lane + 2 : lane, lane >= 2 ? lane - 2 : lane, 31, 9, 1, 0,
                                    0x55555555, (lane + 1) % 32, lane == 0 ? 131 : lane - 1, 4 * quad + 6}))
        << "lane " << lane;
  }
}

TEST_P(Language, MatrixProductAccumulatesInFloat) {
  std::vector<uint16_t> a(64), b(64);
  std::vector<float> c(64), want(64);
  for (int i = 0; i < 64; ++i) {
    a[i] = to_bf16(static_cast<float>(i % 7 - 3)).bits;
    b[i] = to_f16(static_cast<float>(i % 5) * 0.25f).bits;
    c[i] = static_cast<float>(i) * 1000;
  }
  for (int row = 0; row < 8; ++row)
    for (int column = 0; column < 8; ++column) {
      float sum = c[row * 8 + column];
      for (int k = 0; k < 8; ++k) sum += to_float(Bf16{a[row * 8 + k]}) * to_float(F16{b[column * 8 + k]});
      want[row * 8 + column] = sum;
    }
  auto ba = device_.buffer("a", a), bb = device_.buffer("b", b), bc = device_.buffer("c", c),
       bd = device_.buffer("d", std::vector<float>(64));
  run("matrix_product", {ba.get(), bb.get(), bc.get(), bd.get()}, {1, 1, 1}, {32, 1, 1});
  EXPECT_EQ(device_.values<float>(*bd), want);
}

TEST_P(Language, PositionsInThreeDimensions) {
  auto o = device_.buffer("o", std::vector<uint32_t>(4 * 2 * 3 * 6 * 2 * 2));
  run("positions", {o.get()}, {2, 2, 3}, {3, 4, 1});
  const auto values = device_.values<uint32_t>(*o);
  for (uint32_t z = 0; z < 3; ++z)
    for (uint32_t y = 0; y < 8; ++y)
      for (uint32_t x = 0; x < 6; ++x)
        EXPECT_EQ(values[(z * 8 + y) * 6 + x], x / 3 + 10 * (y / 4) + 100 * z + 1000 * (x % 3) +
                                                   10000 * (y % 4) + 100000 * (x % 3 + 3 * (y % 4)))
            << x << " " << y << " " << z;
}

TEST_P(Language, AtomicsOfAllThreadgroupsAddUp) {
  auto o = device_.buffer("o", std::vector<uint32_t>(4)), f = device_.buffer("f", std::vector<float>(1));
  run("atomics", {o.get(), f.get()}, {20, 1, 1}, {50, 1, 1});
  EXPECT_EQ(device_.values<uint32_t>(*o), (std::vector<uint32_t>{999 * 500, 999, 0xffffffff, 2000}));
  EXPECT_EQ(device_.values<float>(*f)[0], 500.0f);
}

INSTANTIATE_TEST_SUITE_P(Builds, Language,
                         testing::Values(&emulator_language_plain, &emulator_language_traced),
                         [](const auto& build) { return build.param->traced ? "traced" : "plain"; });

}  // namespace
}  // namespace lily::emulator
