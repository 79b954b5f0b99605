#include "base/page_block.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "base/error.h"

namespace lily {
namespace {

TEST(PageBlock, IsZeroedWritableAndAligned) {
  for (const size_t n_bytes : {size_t{1}, size_t{16384}, size_t{16385}, size_t{5} << 20}) {
    const PageBlock block(n_bytes);
    EXPECT_GE(block.size(), n_bytes);
    EXPECT_LT(block.size(), n_bytes + PageBlock::kAlignment);
    EXPECT_EQ(block.size() % PageBlock::kAlignment, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block.data()) % PageBlock::kAlignment, 0u);
    for (const size_t i : {size_t{0}, block.size() / 2, block.size() - 1}) {
      EXPECT_EQ(block.data()[i], std::byte{0});
      block.data()[i] = std::byte{1};
    }
  }
}

TEST(PageBlock, NothingNeedsNoMemory) { EXPECT_EQ(PageBlock(0).data(), nullptr); }

TEST(PageBlock, MovesItsMemory) {
  PageBlock first(100);
  first.data()[7] = std::byte{42};
  PageBlock second = std::move(first);
  EXPECT_EQ(second.data()[7], std::byte{42});
  first = PageBlock(20000);
  second = std::move(first);
  EXPECT_EQ(second.size(), 32768u);
  EXPECT_EQ(second.data()[7], std::byte{0});
}

TEST(PageBlock, ARefusedRequestIsADeviceError) {
  for (const size_t n_bytes : {std::numeric_limits<size_t>::max(), size_t{1} << 62}) {
    try {
      const PageBlock block(n_bytes);
      ADD_FAILURE() << block.size();
    } catch (const Error& error) {
      EXPECT_EQ(error.fault(), Fault::device);
    }
  }
}

}  // namespace
}  // namespace lily
