#include "base/page_block.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

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

TEST(PageBlock, WhatIsGivenBackIsZeroAndTakesNoMemory) {
  constexpr size_t kBytes = size_t{8} << 20, kAt = (size_t{2} << 20) + 100, kGivenBack = size_t{4} << 20;
  PageBlock block(kBytes);
  std::memset(block.data(), 1, kBytes);
  const auto n_resident = [&] {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages(kBytes / page);
#if defined(__APPLE__)
    mincore(block.data(), kBytes, reinterpret_cast<char*>(pages.data()));
#else
    mincore(block.data(), kBytes, pages.data());
#endif
    return page *
           static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](auto p) { return p & 1; }));
  };
  EXPECT_EQ(n_resident(), kBytes);
  block.give_back(kAt, kGivenBack);
  EXPECT_LE(n_resident(), kBytes - kGivenBack + 2 * PageBlock::kAlignment);
  EXPECT_EQ(block.data()[kAt - 1], std::byte{1});
  EXPECT_EQ(block.data()[kAt + kGivenBack], std::byte{1});
  for (size_t i = kAt + PageBlock::kAlignment; i < kAt + kGivenBack - PageBlock::kAlignment; i += 4096)
    ASSERT_EQ(block.data()[i], std::byte{0}) << i;
  block.data()[kBytes / 2] = std::byte{2};
  EXPECT_EQ(block.data()[kBytes / 2], std::byte{2});
  block.give_back(kBytes, 0);  // nothing
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
