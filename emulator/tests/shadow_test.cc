#include "emulator/runtime/shadow.h"

#include <gtest/gtest.h>

namespace lily::emulator {
namespace {

AccessRecord by(uint32_t dispatch, uint32_t group, uint16_t thread, uint32_t epoch = 0,
                uint32_t simd_epoch = 0) {
  AccessRecord r;
  r.dispatch = dispatch;
  r.group = group;
  r.thread = thread;
  r.simdgroup = static_cast<uint8_t>(thread / 32);
  r.epoch = epoch;
  r.simd_epoch = simd_epoch;
  r.is_set = true;
  return r;
}

struct Memory {
  BufferShadow shadow{1 << 16};
  uint32_t interval_start = 1;
  AccessRecord other;

  Clash access(size_t offset, size_t size, const AccessRecord& record, bool is_write) {
    Clash found = Clash::none;
    shadow.add(offset, size, record, is_write, true, interval_start, found, other);
    return found;
  }
  Clash write(size_t offset, const AccessRecord& record) { return access(offset, 4, record, true); }
  Clash read(size_t offset, const AccessRecord& record) { return access(offset, 4, record, false); }
};

TEST(Shadow, ReadsDoNotClash) {
  Memory m;
  EXPECT_EQ(m.read(0, by(1, 0, 0)), Clash::none);
  EXPECT_EQ(m.read(0, by(1, 0, 1)), Clash::none);
  EXPECT_EQ(m.read(0, by(1, 1, 0)), Clash::none);
  EXPECT_EQ(m.read(0, by(2, 1, 0)), Clash::none);
}

TEST(Shadow, BarriersOrderThreadsOfAThreadgroup) {
  Memory m;
  EXPECT_EQ(m.write(0, by(1, 0, 0, 0)), Clash::none);
  EXPECT_EQ(m.read(0, by(1, 0, 40, 1)), Clash::none);
  EXPECT_EQ(m.write(0, by(1, 0, 41, 1)), Clash::in_threadgroup);
  EXPECT_EQ(m.other.thread, 40);
}

TEST(Shadow, SimdgroupBarriersOrderLanesOnly) {
  Memory m;
  EXPECT_EQ(m.write(0, by(1, 0, 0, 0, 0)), Clash::none);
  EXPECT_EQ(m.read(0, by(1, 0, 1, 0, 1)), Clash::none);
  EXPECT_EQ(m.read(0, by(1, 0, 33, 0, 1)), Clash::in_threadgroup);
}

TEST(Shadow, NothingOrdersThreadgroupsOfADispatch) {
  Memory m;
  m.write(0, by(1, 0, 0, 0));
  EXPECT_EQ(m.read(0, by(1, 1, 0, 5)), Clash::between_threadgroups);
}

TEST(Shadow, MemoryBarriersOrderDispatches) {
  Memory m;
  m.write(0, by(1, 0, 0));
  m.read(4, by(1, 0, 0));
  EXPECT_EQ(m.read(0, by(2, 0, 0)), Clash::between_dispatches);
  EXPECT_EQ(m.write(4, by(2, 0, 0)), Clash::between_dispatches);
  m.interval_start = 3;
  EXPECT_EQ(m.read(0, by(3, 0, 0)), Clash::none);
  EXPECT_EQ(m.write(4, by(3, 0, 0)), Clash::none);
}

TEST(Shadow, AReaderOfAnotherThreadgroupIsNotForgotten) {
  Memory m;
  m.read(0, by(1, 0, 0));
  for (uint16_t thread = 0; thread < 64; ++thread) m.read(0, by(1, 1, thread));
  EXPECT_EQ(m.write(0, by(1, 1, 0, 1)), Clash::between_threadgroups);
}
TEST(Shadow, AReaderOfAnotherSimdgroupIsNotForgotten) {
  Memory m;
  m.read(0, by(1, 0, 33));
  for (uint16_t thread = 0; thread < 32; ++thread) m.read(0, by(1, 0, thread));
  EXPECT_EQ(m.write(0, by(1, 0, 31, 0, 1)), Clash::in_threadgroup);
  EXPECT_EQ(m.other.thread, 33);
}
TEST(Shadow, AReaderOfTheSameSimdgroupIsNotForgotten) {
  Memory m;
  m.read(0, by(1, 0, 4));
  m.read(0, by(1, 0, 5));
  m.read(0, by(1, 0, 5));
  EXPECT_EQ(m.write(0, by(1, 0, 5)), Clash::in_threadgroup);
  EXPECT_EQ(m.other.thread, 4);
}

TEST(Shadow, AtomicsClashWithPlainAccessesOnly) {
  Memory m;
  AccessRecord a = by(1, 0, 0), b = by(1, 1, 0);
  a.is_atomic = b.is_atomic = true;
  EXPECT_EQ(m.write(0, a), Clash::none);
  EXPECT_EQ(m.write(0, b), Clash::none);
  EXPECT_EQ(m.read(0, by(1, 2, 0)), Clash::between_threadgroups);
}

TEST(Shadow, NeighbouringBytesAreApart) {
  Memory m;
  EXPECT_EQ(m.access(100, 4, by(1, 0, 0), true), Clash::none);
  EXPECT_EQ(m.access(104, 2, by(1, 0, 1), true), Clash::none);
  EXPECT_EQ(m.access(106, 1, by(1, 0, 2), true), Clash::none);
  EXPECT_EQ(m.access(107, 1, by(1, 0, 3), true), Clash::none);
  EXPECT_EQ(m.access(103, 1, by(1, 0, 4), false), Clash::in_threadgroup) << "the split keeps what was known";
  EXPECT_EQ(m.access(104, 4, by(1, 0, 5), false), Clash::in_threadgroup);
}

TEST(Shadow, AccessesMayCrossPages) {
  Memory m;
  EXPECT_EQ(m.access(4092, 8, by(1, 0, 0), true), Clash::none);
  EXPECT_EQ(m.access(4096, 4, by(1, 1, 0), false), Clash::between_threadgroups);
}

TEST(Shadow, CountsDistinctBytesOfADispatch) {
  BufferShadow shadow(1 << 16);
  AccessRecord other;
  Clash found = Clash::none;
  const auto add = [&](size_t offset, size_t size, uint32_t dispatch, bool is_write) {
    return shadow.add(offset, size, by(dispatch, 0, 0), is_write, false, 1, found, other);
  };
  EXPECT_EQ(add(2, 4, 1, false), 4u);
  EXPECT_EQ(add(4, 4, 1, false), 2u);
  EXPECT_EQ(add(0, 8, 1, false), 2u);
  EXPECT_EQ(add(0, 8, 1, true), 8u) << "reads and writes count apart";
  EXPECT_EQ(add(0, 8, 2, false), 8u) << "the next dispatch counts anew";
  EXPECT_EQ(add(4090, 16, 2, false), 16u);
}

}  // namespace
}  // namespace lily::emulator
