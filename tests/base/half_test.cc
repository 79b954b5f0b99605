#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace lily {
namespace {

TEST(Half, EveryBf16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = to_float(Bf16{static_cast<uint16_t>(bits)});
    if (std::isnan(value)) EXPECT_TRUE(std::isnan(bf16_rounded(value)));
    else EXPECT_EQ(to_bf16(value).bits, bits);
  }
}

TEST(Half, EveryF16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = to_float(F16{static_cast<uint16_t>(bits)});
    if (std::isnan(value)) EXPECT_TRUE(std::isnan(to_float(to_f16(value))));
    else EXPECT_EQ(to_f16(value).bits, bits) << value;
  }
}

TEST(Half, TiesGoToEven) {
  EXPECT_EQ(to_bf16(1.0f + 0x1p-8f).bits, 0x3f80);      // halfway, even below
  EXPECT_EQ(to_bf16(1.0f + 3 * 0x1p-8f).bits, 0x3f82);  // halfway, even above
  EXPECT_EQ(to_f16(1.0f + 0x1p-11f).bits, 0x3c00);
  EXPECT_EQ(to_f16(1.0f + 3 * 0x1p-11f).bits, 0x3c02);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0);  // half the smallest subnormal
  EXPECT_EQ(to_f16(3 * 0x1p-25f).bits, 2);
}

TEST(Half, LargeValuesBecomeInfinity) {
  EXPECT_TRUE(std::isinf(bf16_rounded(std::numeric_limits<float>::max())));
  EXPECT_EQ(to_float(to_f16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(to_float(to_f16(65520.0f))));
  EXPECT_TRUE(std::isinf(to_float(to_f16(-1e30f))));
}

}  // namespace
}  // namespace lily
