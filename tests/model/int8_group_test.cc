// Groups of 8-bit numbers: what they hold, at the edges of their scale, and that they are read and written
// again without a change.
#include "model/int8_group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace lily::model {
namespace {

using Values = std::array<float, kInt8Group>;
using Codes = std::array<int8_t, kInt8Group>;

struct Group {
  F16 scale;
  Codes codes;
  bool operator==(const Group& other) const { return scale.bits == other.scale.bits && codes == other.codes; }
};

Group group_of(const Values& x) {
  Group g;
  g.scale = to_int8_group(x, g.codes);
  return g;
}

Values values_of(const Group& g) {
  Values x;
  from_int8_group(g.scale, g.codes, x);
  return x;
}

// Values of every sign and of magnitudes up to `largest`, which is among them.
Values random_values(float largest, std::mt19937& random) {
  Values x;
  for (float& v : x) v = largest * (static_cast<float>(random() >> 8) * 0x1p-23f - 1);
  x[random() % kInt8Group] = random() % 2 == 0 ? largest : -largest;
  return x;
}

TEST(Int8Group, AnErrorIsAtMostHalfAScale) {
  std::mt19937 random(1);
  for (int exponent = -40; exponent <= 22; ++exponent)
    for (int i = 0; i < 50; ++i) {
      const Values x =
          random_values(std::ldexp(1 + static_cast<float>(random() % 1024) / 1024, exponent), random);
      const Group g = group_of(x);
      const Values y = values_of(g);
      const double scale = to_float(g.scale);
      // The quotient is rounded to fp32 before it is rounded to a code.
      for (size_t j = 0; j < x.size(); ++j)
        ASSERT_LE(std::abs(static_cast<double>(x[j]) - y[j]), scale * (0.5 + 127 * 0x1p-24)) << exponent;
      const auto peak =
          *std::max_element(x.begin(), x.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
      EXPECT_LE(scale, std::max(0x1p-17, std::abs(peak) / 127.0 * (1 + 0x1p-8)));
    }
}

TEST(Int8Group, WhatIsReadBecomesTheSameGroupAgain) {
  std::mt19937 random(2);
  for (int exponent = -40; exponent <= 40; ++exponent)
    for (int i = 0; i < 200; ++i) {
      const Group g = group_of(
          random_values(std::ldexp(1 + static_cast<float>(random() % 4096) / 4096, exponent), random));
      ASSERT_EQ(group_of(values_of(g)), g) << exponent;
    }
}

// Every scale there is, with the code that is largest in its group.
TEST(Int8Group, EveryScaleIsKeptByTheGroupsThatHaveIt) {
  for (uint16_t bits = to_f16(kLeastInt8Scale).bits; bits <= to_f16(kLargestInt8Scale).bits; ++bits) {
    Group g{.scale = {bits}, .codes = {}};
    for (size_t i = 0; i < g.codes.size(); ++i)
      g.codes[i] = static_cast<int8_t>(2 * static_cast<int>(i) - 64);
    g.codes[9] = bits % 2 == 0 ? 127 : -127;
    ASSERT_EQ(group_of(values_of(g)), g) << "scale " << to_float(g.scale);
  }
}

TEST(Int8Group, TiesGoToEvenCodes) {
  Values x{};
  x[0] = 127;  // scale 1
  for (int i = 0; i < 20; ++i) x[static_cast<size_t>(i + 1)] = static_cast<float>(i) - 10.5f;
  const Group g = group_of(x);
  EXPECT_EQ(to_float(g.scale), 1);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(g.codes[static_cast<size_t>(i + 1)] % 2, 0) << i;
    EXPECT_EQ(
        std::abs(static_cast<float>(g.codes[static_cast<size_t>(i + 1)]) - x[static_cast<size_t>(i + 1)]),
        0.5f);
  }
}

TEST(Int8Group, ZerosHaveTheLeastScale) {
  Values x{};
  x[3] = -0.0f;
  const Group g = group_of(x);
  EXPECT_EQ(to_float(g.scale), kLeastInt8Scale);
  EXPECT_EQ(g.codes, Codes{});
  for (const float v : values_of(g)) EXPECT_EQ(std::bit_cast<uint32_t>(v), 0u);
}

TEST(Int8Group, AScaleThatWouldBeSubnormalOrZeroIsTheLeastOne) {
  Values x{};
  x[0] = 100 * kLeastInt8Scale;
  x[1] = -0.6f * kLeastInt8Scale;
  x[2] = std::numeric_limits<float>::denorm_min();
  const Group g = group_of(x);
  EXPECT_EQ(to_float(g.scale), kLeastInt8Scale);
  EXPECT_EQ(g.codes[0], 100);
  EXPECT_EQ(g.codes[1], -1);
  EXPECT_EQ(g.codes[2], 0);
}

TEST(Int8Group, AScaleBeyondFp16IsTheLargestOne) {
  for (const float huge : {127.0f * 65504, 127.0f * 65520, 1e30f, std::numeric_limits<float>::max()}) {
    Values x{};
    x[0] = huge;
    x[1] = -huge;
    x[2] = 65504;
    const Group g = group_of(x);
    EXPECT_EQ(to_float(g.scale), kLargestInt8Scale);
    EXPECT_EQ(g.codes[0], 127);
    EXPECT_EQ(g.codes[1], -127);
    EXPECT_EQ(g.codes[2], 1);
    EXPECT_EQ(group_of(values_of(g)), g);
  }
}

TEST(Int8Group, WhatIsNoNumberStaysVisible) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    Values x{};
    x[0] = 5;
    x[63] = bad;
    const Group g = group_of(x);
    for (const float v : values_of(g)) EXPECT_TRUE(std::isnan(v));
    EXPECT_EQ(group_of(values_of(g)), g);
  }
}

}  // namespace
}  // namespace lily::model
