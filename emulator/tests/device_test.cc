// The host side: arguments, limits, declared accesses, events, hand-off, indirect dispatch, counters, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "emulator/tests/test_device.h"
#include "emulator_faults.h"
#include "emulator_faults_emulated.h"

namespace lily::emulator {
namespace {

using metal::Access;
using testing::HasSubstr;

Options plain(Options options = {}) {
  options.libraries = {&emulator_faults_plain};
  return options;
}
Options traced(Options options = {}) {
  options.libraries = {&emulator_faults_traced};
  return options;
}
std::vector<uint32_t> numbers(uint32_t n) {
  std::vector<uint32_t> v(n);
  for (uint32_t i = 0; i < n; ++i) v[i] = 1000 + i;
  return v;
}

void encode_fill(TestDevice& device, metal::Encoder& e, const metal::Buffer& buffer, size_t offset,
                 uint32_t value, uint32_t n, std::span<const Access> accesses = {}) {
  e.set_pipeline(device.pipeline("fill"));
  e.set_buffer(0, buffer, offset);
  e.set_value(1, value);
  e.dispatch_threadgroups({1, 1, 1}, {n, 1, 1}, accesses);
}

// ---- Memory

TEST(Buffer, MemoryIsNanUntilWritten) {
  TestDevice device(metal::emulator_faults, plain());
  auto buffer = device->make_buffer(24, metal::BufferUse::mutable_data, "fresh");
  for (float x : device.values<float>(*buffer)) EXPECT_NE(x, x);
}

TEST(Buffer, SizesBeyondTheLimitAreRefused) {
  TestDevice device(metal::emulator_faults, plain());
  EXPECT_THROW(device->make_buffer(0, metal::BufferUse::mutable_data, "none"), Error);
  EXPECT_THROW(device->make_buffer((size_t{4} << 30) + 1, metal::BufferUse::mutable_data, "huge"), Error);
}

TEST(Buffer, ThePlainBuildStopsAtTheEnd) {
  TestDevice device(metal::emulator_faults, plain());
  auto a = device.buffer("a", numbers(64)), o = device.buffer("o", numbers(64));
  const std::string error = device.run([&](metal::Encoder& e) {
    e.set_pipeline(device.pipeline("reads_past_the_end"));
    e.set_buffer(0, *a);
    e.set_buffer(1, *o);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  });
  EXPECT_THAT(error, HasSubstr("fault at a+256 (length 256) by thread 63"));
  EXPECT_EQ(device.values<uint32_t>(*o)[62], 1063u) << "threads before it have run";
  EXPECT_EQ(device.run([&](metal::Encoder& e) { encode_fill(device, e, *o, 0, 5, 64); }), "")
      << "the device goes on";
  EXPECT_EQ(device.values<uint32_t>(*o), std::vector<uint32_t>(64, 5));
}

// ---- Arguments and limits

class Arguments : public testing::Test {
 protected:
  TestDevice device_{metal::emulator_faults, plain()};
  std::unique_ptr<metal::Buffer> o_ = device_.buffer("o", numbers(64));

  template <typename Encode>
  void expect_refused(Finding::Kind kind, const std::string& message, Encode encode) {
    EXPECT_THAT(device_.run(encode), HasSubstr(message));
    EXPECT_TRUE(device_.found(kind)) << device_.report();
    EXPECT_EQ(device_.values<uint32_t>(*o_), numbers(64)) << "the dispatch must not have run";
  }
};

TEST_F(Arguments, EachMustBeSet) {
  expect_refused(Finding::Kind::bad_argument, "argument 1 is not set", [&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("fill"));
    e.set_buffer(0, *o_);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  });
}
TEST_F(Arguments, BytesMustHaveTheSizeOfTheKernelsType) {
  expect_refused(Finding::Kind::bad_argument,
                 "argument 0 has 8 bytes from set_bytes, the kernel's type has 16", [&](metal::Encoder& e) {
                   e.set_pipeline(device_.pipeline("takes_a_struct"));
                   e.set_value(0, uint64_t{7});
                   e.set_buffer(1, *o_);
                   e.dispatch_threadgroups({1, 1, 1}, {4, 1, 1}, {});
                 });
}
TEST_F(Arguments, BytesAreAtMost4096) {
  expect_refused(Finding::Kind::limit, "set_bytes of 4100 bytes", [&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("copy"));
    e.set_bytes(0, std::vector<std::byte>(4100));
    e.set_buffer(1, *o_);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  });
}
TEST_F(Arguments, BytesAreNotForWriting) {
  expect_refused(Finding::Kind::bad_argument, "is written by the kernel", [&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("fill"));
    e.set_value(0, 1u);
    e.set_value(1, 1u);
    e.dispatch_threadgroups({1, 1, 1}, {1, 1, 1}, {});
  });
}
TEST_F(Arguments, OffsetsAreAligned) {
  expect_refused(Finding::Kind::bad_argument, "offset 2 in o, not a multiple of 4",
                 [&](metal::Encoder& e) { encode_fill(device_, e, *o_, 2, 5, 1); });
  expect_refused(Finding::Kind::bad_argument, "offset 8 in o, not a multiple of 16", [&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("takes_a_struct"));
    e.set_buffer(0, *o_, 8);
    e.set_buffer(1, *o_);
    e.dispatch_threadgroups({1, 1, 1}, {1, 1, 1}, {});
  });
}
TEST_F(Arguments, ObjectsFitInTheBuffer) {
  expect_refused(Finding::Kind::bad_argument, "at offset 256 does not fit in o of 256 bytes",
                 [&](metal::Encoder& e) {
                   e.set_pipeline(device_.pipeline("takes_a_struct"));
                   e.set_buffer(0, *o_, 256);
                   e.set_buffer(1, *o_);
                   e.dispatch_threadgroups({1, 1, 1}, {1, 1, 1}, {});
                 });
}
TEST_F(Arguments, ThreadgroupsHaveAtMost1024Threads) {
  expect_refused(Finding::Kind::limit, "1056 threads a threadgroup",
                 [&](metal::Encoder& e) { encode_fill(device_, e, *o_, 0, 5, 1056); });
}
TEST_F(Arguments, GridsAreNotEmpty) {
  expect_refused(Finding::Kind::limit, "a grid of 0 threadgroups", [&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("fill"));
    e.set_buffer(0, *o_);
    e.set_value(1, 5u);
    e.dispatch_threadgroups({1, 0, 1}, {64, 1, 1}, {});
  });
}
TEST_F(Arguments, ThreadgroupMemoryIsAtMost32K) {
  expect_refused(Finding::Kind::limit, "32800 bytes of threadgroup memory", [&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("too_much_threadgroup_memory"));
    e.set_buffer(0, *o_);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  });
}
TEST_F(Arguments, ThreadgroupMemoryArguments) {
  EXPECT_EQ(device_.run([&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("sums_with_argument_memory"));
    e.set_buffer(0, *o_);
    e.set_threadgroup_memory_length(0, 256);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  }),
            "");
  EXPECT_EQ(device_.values<uint32_t>(*o_), std::vector<uint32_t>(64, 2016));
}

TEST_F(Arguments, FunctionConstantsBelongToThePipeline) {
  const metal::FunctionConstant on[] = {{3, true}, {4, 10u}}, off[] = {{3, false}, {4, 7u}};
  const metal::Pipeline& scaled = device_.pipeline("optional_argument", on);
  const metal::Pipeline& fixed = device_.pipeline("optional_argument", off);
  auto scale = device_.buffer("scale", numbers(64)), second = device_.buffer("second", numbers(64));
  EXPECT_EQ(device_.run([&](metal::Encoder& e) {
    e.set_pipeline(fixed);
    e.set_buffer(0, *o_);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});  // argument 2 is not needed
    e.set_pipeline(scaled);
    e.set_buffer(0, *second);
    e.set_buffer(2, *scale);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  }),
            "");
  EXPECT_EQ(device_.values<uint32_t>(*o_)[5], 7u);
  EXPECT_EQ(device_.values<uint32_t>(*second)[5], 10050u);
}
TEST_F(Arguments, FunctionConstantsHaveTheirType) {
  const metal::FunctionConstant wrong[] = {{3, 1u}}, unknown[] = {{9, true}};
  EXPECT_THROW(device_.pipeline("optional_argument", wrong), Error);
  EXPECT_THROW(device_.pipeline("optional_argument", unknown), Error);
  EXPECT_THROW(device_.pipeline("no_such_kernel"), Error);
}

TEST(FunctionConstants, UseOfOneWithoutAValueIsFound) {
  TestDevice device(metal::emulator_faults, traced());
  auto o = device.buffer("o", numbers(64));
  const metal::FunctionConstant half_set[] = {{3, false}};
  const std::string error = device.run([&](metal::Encoder& e) {
    e.set_pipeline(device.pipeline("optional_argument", half_set));
    e.set_buffer(0, *o);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  });
  EXPECT_THAT(error, HasSubstr("use of kFactor"));
  EXPECT_TRUE(device.found(Finding::Kind::undefined_constant)) << device.report();
}

// ---- Declared accesses

class Declared : public testing::Test {
 protected:
  TestDevice device_{metal::emulator_faults, traced()};
  std::unique_ptr<metal::Buffer> o_ = device_.buffer("o", numbers(64)), a_ = device_.buffer("a", numbers(64));
};

TEST_F(Declared, WhatIsDeclaredIsAllowed) {
  const Access accesses[] = {{o_.get(), 0, 100, Access::Kind::write},
                             {o_.get(), 100, 28, Access::Kind::read_write}};
  EXPECT_EQ(device_.run([&](metal::Encoder& e) { encode_fill(device_, e, *o_, 0, 5, 32, accesses); }), "");
  EXPECT_TRUE(device_->findings().empty()) << device_.report();
}
TEST_F(Declared, AWriteOutsideIsFound) {
  const Access accesses[] = {{o_.get(), 0, 124, Access::Kind::write}};
  EXPECT_THAT(device_.run([&](metal::Encoder& e) { encode_fill(device_, e, *o_, 0, 5, 32, accesses); }),
              HasSubstr("write of 4 bytes at o+124"));
  EXPECT_TRUE(device_.found(Finding::Kind::undeclared_access)) << device_.report();
}
TEST_F(Declared, AWriteWhereAReadIsDeclaredIsFound) {
  const Access accesses[] = {{o_.get(), 0, 256, Access::Kind::read}};
  device_.run([&](metal::Encoder& e) { encode_fill(device_, e, *o_, 0, 5, 32, accesses); });
  EXPECT_TRUE(device_.found(Finding::Kind::undeclared_access)) << device_.report();
}
TEST_F(Declared, AReadThatIsNotDeclaredIsFound) {
  const Access accesses[] = {{o_.get(), 0, 256, Access::Kind::write}};
  device_.run([&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("copy"));
    e.set_buffer(0, *a_);
    e.set_buffer(1, *o_);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, accesses);
  });
  EXPECT_TRUE(device_.found(Finding::Kind::undeclared_access)) << device_.report();
}
TEST_F(Declared, RangesLieInTheirBuffers) {
  const Access accesses[] = {{o_.get(), 128, 132, Access::Kind::write}};
  EXPECT_THAT(device_.run([&](metal::Encoder& e) { encode_fill(device_, e, *o_, 0, 5, 32, accesses); }),
              HasSubstr("declares [128, 260) of o"));
}

TEST_F(Declared, RangesAStrideApartAreAllowedAndNothingBetweenThem) {
  const auto run = [&](const Access& access) {
    return device_.run([&](metal::Encoder& e) { encode_fill(device_, e, *o_, 0, 5, 32, {&access, 1}); });
  };
  const Access whole{o_.get(), 0, 64, Access::Kind::write, 64, 2};
  EXPECT_EQ(run(whole), "");
  const Access with_a_gap{o_.get(), 0, 60, Access::Kind::write, 64, 2};
  EXPECT_THAT(run(with_a_gap), HasSubstr("write of 4 bytes at o+60"));
  const Access too_many{o_.get(), 0, 60, Access::Kind::write, 64, 5};
  EXPECT_THAT(run(too_many), HasSubstr("declares [256, 316) of o"));
}

// ---- Events and the CPU's accesses

class HandOff : public testing::Test {
 protected:
  TestDevice device_{metal::emulator_faults, plain({.seed = 3, .max_delay_us = 2000})};
  std::unique_ptr<metal::Buffer> slots_ = device_.buffer("slots", numbers(64));
  std::unique_ptr<metal::Event> event_ = device_->make_event();

  // Writes `value` to slot `slot` and raises the event to `step`.
  std::unique_ptr<metal::CommandBuffer> submit(uint32_t slot, uint32_t value, uint64_t step) {
    auto command_buffer = device_->make_command_buffer("step");
    metal::Encoder& e = command_buffer->make_encoder();
    const Access access{slots_.get(), slot * 4, 4, Access::Kind::write};
    encode_fill(device_, e, *slots_, slot * 4, value, 1, {&access, 1});
    e.end();
    command_buffer->signal(*event_, step);
    command_buffer->commit();
    return command_buffer;
  }
};

TEST_F(HandOff, TwoCommandBuffersAndFourSlots) {
  std::vector<std::unique_ptr<metal::CommandBuffer>> in_flight;
  in_flight.push_back(submit(0, 100, 1));
  for (uint32_t n = 1; n <= 20; ++n) {
    in_flight.push_back(submit(n % 4, 100 + n, n + 1));
    ASSERT_TRUE(event_->wait(n, kTimeoutMs));
    EXPECT_EQ(slots_->read_value<uint32_t>((n - 1) % 4 * 4), 99 + n);
  }
  ASSERT_TRUE(event_->wait(21, kTimeoutMs));
  EXPECT_TRUE(device_->findings().empty()) << device_.report();
}
TEST_F(HandOff, AReadBeforeTheEventIsFoundEvenIfItComesLate) {
  auto command_buffer = submit(2, 7, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  slots_->read_value<uint32_t>(12);
  EXPECT_TRUE(device_->findings().empty()) << "the slot beside it";
  slots_->read_value<uint32_t>(8);
  EXPECT_TRUE(device_.found(Finding::Kind::host_race)) << device_.report();
  EXPECT_THAT(device_.report(), HasSubstr("CPU reads slots [8, 12)"));
}
TEST_F(HandOff, WaitingForAnEarlierEventIsNotEnough) {
  auto first = submit(0, 1, 1), second = submit(1, 2, 2);
  ASSERT_TRUE(event_->wait(1, kTimeoutMs));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  slots_->read_value<uint32_t>(0);
  EXPECT_TRUE(device_->findings().empty()) << device_.report();
  slots_->read_value<uint32_t>(4);
  EXPECT_TRUE(device_.found(Finding::Kind::host_race)) << device_.report();
}
TEST_F(HandOff, AWriteToWhatIsReadIsFound) {
  auto o = device_.buffer("o", numbers(64));
  auto command_buffer = device_->make_command_buffer("reader");
  metal::Encoder& e = command_buffer->make_encoder();
  const Access accesses[] = {{slots_.get(), 0, 128, Access::Kind::read},
                             {o.get(), 0, 128, Access::Kind::write}};
  e.set_pipeline(device_.pipeline("copy"));
  e.set_buffer(0, *slots_);
  e.set_buffer(1, *o);
  e.dispatch_threadgroups({1, 1, 1}, {32, 1, 1}, accesses);
  e.end();
  command_buffer->commit();
  slots_->read_value<uint32_t>(0);
  slots_->write_value(128, 1u);
  EXPECT_TRUE(device_->findings().empty()) << device_.report();
  slots_->write_value(124, 1u);
  EXPECT_TRUE(device_.found(Finding::Kind::host_race)) << device_.report();
}
TEST_F(HandOff, OfRangesAStrideApartOnlyThoseAreInUse) {
  auto command_buffer = device_->make_command_buffer("step");
  metal::Encoder& e = command_buffer->make_encoder();
  const Access access{slots_.get(), 0, 4, Access::Kind::write, 64, 3};
  encode_fill(device_, e, *slots_, 128, 9, 1, {&access, 1});
  e.end();
  command_buffer->signal(*event_, 1);
  command_buffer->commit();
  std::byte between[60];
  slots_->read(4, between);
  slots_->read(68, between);
  slots_->read(192, between);
  EXPECT_TRUE(device_->findings().empty()) << device_.report();
  std::byte with_the_last[68];
  slots_->read(68, with_the_last);
  EXPECT_TRUE(device_.found(Finding::Kind::host_race)) << device_.report();
}
TEST_F(HandOff, ContentsInFlightAreFound) {
  auto command_buffer = submit(0, 1, 1);
  slots_->contents();
  EXPECT_TRUE(device_.found(Finding::Kind::host_race)) << device_.report();
}
TEST_F(HandOff, ABufferThatEndsBeforeItsCommandBufferIsFound) {
  auto short_lived = device_.buffer("short-lived", numbers(64));
  auto command_buffer = device_->make_command_buffer("step");
  metal::Encoder& e = command_buffer->make_encoder();
  encode_fill(device_, e, *short_lived, 0, 1, 1);
  e.end();
  command_buffer->signal(*event_, 1);
  command_buffer->commit();
  while (event_->value() == 0) std::this_thread::yield();
  short_lived.reset();
  EXPECT_TRUE(device_->findings().empty()) << "the event's value tells as well: " << device_.report();

  short_lived = device_.buffer("short-lived", numbers(64));
  auto second = device_->make_command_buffer("step");
  metal::Encoder& e2 = second->make_encoder();
  encode_fill(device_, e2, *short_lived, 0, 1, 1);
  e2.end();
  second->commit();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  short_lived.reset();
  EXPECT_THAT(device_.report(), HasSubstr("destroys short-lived"));
}
TEST_F(HandOff, WaitingTimesOut) {
  EXPECT_FALSE(event_->wait(1, 1));
  EXPECT_EQ(event_->value(), 0u);
}
TEST_F(HandOff, AFailedCommandBufferStillSetsItsEvent) {
  auto command_buffer = device_->make_command_buffer("bad");
  metal::Encoder& e = command_buffer->make_encoder();
  e.set_pipeline(device_.pipeline("fill"));
  e.dispatch_threadgroups({1, 1, 1}, {1, 1, 1}, {});
  e.end();
  command_buffer->signal(*event_, 1);
  command_buffer->commit();
  ASSERT_TRUE(event_->wait(1, kTimeoutMs));
  EXPECT_THROW(command_buffer->wait_until_completed(kTimeoutMs), Error);
  EXPECT_TRUE(command_buffer->error().has_value());
  auto next = submit(0, 9, 2);
  ASSERT_TRUE(event_->wait(2, kTimeoutMs));
  EXPECT_FALSE(next->error().has_value());
  EXPECT_EQ(slots_->read_value<uint32_t>(0), 9u);
}

TEST(InjectedFailure, EndsOneCommandBufferOnly) {
  TestDevice device(metal::emulator_faults, plain({.failing_command_buffer = 1}));
  auto o = device.buffer("o", numbers(64));
  for (uint32_t n = 0; n < 3; ++n)
    EXPECT_EQ(device.run([&](metal::Encoder& e) { encode_fill(device, e, *o, size_t{4} * n, n, 1); }),
              n == 1 ? "test: injected failure" : "");
  EXPECT_EQ(o->read_value<uint32_t>(0), 0u);
  EXPECT_EQ(o->read_value<uint32_t>(4), 1001u);
  EXPECT_EQ(o->read_value<uint32_t>(8), 2u);
  EXPECT_TRUE(device->findings().empty());
}

// ---- Indirect dispatch and counters

class Indirect : public testing::Test {
 protected:
  TestDevice device_{metal::emulator_faults, traced({.keep_counters = true})};
  std::unique_ptr<metal::Buffer> o_ = device_.buffer("o", std::vector<uint32_t>(256));
  std::unique_ptr<metal::Buffer> arguments_ = device_.buffer("arguments", std::vector<uint32_t>{9, 9, 9, 9});

  void encode(metal::Encoder& e, uint32_t n_groups, bool barrier) {
    e.set_pipeline(device_.pipeline("fill_arguments"));
    e.set_buffer(0, *arguments_, 4);
    e.set_value(1, n_groups);
    e.dispatch_threadgroups({1, 1, 1}, {1, 1, 1}, {});
    if (barrier) e.memory_barrier();
    e.set_pipeline(device_.pipeline("fill"));
    e.set_buffer(0, *o_);
    e.set_value(1, 5u);
    e.dispatch_indirect(*arguments_, 4, {32, 1, 1}, {});
  }
};

TEST_F(Indirect, GridIsReadWhenTheDispatchStarts) {
  EXPECT_EQ(device_.run([&](metal::Encoder& e) { encode(e, 3, true); }), "");
  EXPECT_TRUE(device_->findings().empty()) << device_.report();
  const auto values = device_.values<uint32_t>(*o_);
  EXPECT_EQ(std::count(values.begin(), values.end(), 5u), 96);
  const auto counters = device_->take_counters();
  ASSERT_EQ(counters.size(), 2u);
  EXPECT_TRUE(counters[1].indirect);
  EXPECT_EQ(counters[1].n_threadgroups, 3u);
}
TEST_F(Indirect, EmptyGridsAreAllowed) {
  EXPECT_EQ(device_.run([&](metal::Encoder& e) { encode(e, 0, true); }), "");
  EXPECT_EQ(device_.values<uint32_t>(*o_), std::vector<uint32_t>(256));
}
TEST_F(Indirect, ArgumentsWithoutABarrierAreFound) {
  device_.run([&](metal::Encoder& e) { encode(e, 3, false); });
  EXPECT_TRUE(device_.found(Finding::Kind::missing_dispatch_barrier)) << device_.report();
  EXPECT_THAT(device_.report(), HasSubstr("arguments+4 are written by fill_arguments"));
}
TEST_F(Indirect, GridsOfGarbageAreRefused) {
  auto garbage = device_->make_buffer(16, metal::BufferUse::mutable_data, "garbage");
  EXPECT_THAT(device_.run([&](metal::Encoder& e) {
    e.set_pipeline(device_.pipeline("fill"));
    e.set_buffer(0, *o_);
    e.set_value(1, 5u);
    e.dispatch_indirect(*garbage, 0, {32, 1, 1}, {});
  }),
              HasSubstr("were garbage+0 written?"));
}

TEST(Counters, BytesAreDistinctAndTrafficIsNot) {
  TestDevice device(metal::emulator_faults, traced({.keep_counters = true}));
  auto a = device.buffer("a", numbers(256)), o = device.buffer("o", numbers(64));
  EXPECT_EQ(device.run([&](metal::Encoder& e) {
    e.set_pipeline(device.pipeline("copy"));
    e.set_buffer(0, *a, 64);
    e.set_buffer(1, *o);
    e.dispatch_threadgroups({2, 1, 1}, {32, 1, 1}, {});
    e.memory_barrier();
    e.set_pipeline(device.pipeline("exchanges"));
    e.set_buffer(0, *o);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  }),
            "");
  EXPECT_EQ(device.run([&](metal::Encoder& e) { encode_fill(device, e, *o, 0, 1, 64); }), "");
  const auto counters = device->take_counters();
  ASSERT_EQ(counters.size(), 3u);
  EXPECT_EQ(counters[0].kernel, "copy");
  EXPECT_EQ(counters[0].bytes_read, 256u);
  EXPECT_EQ(counters[0].bytes_written, 256u);
  EXPECT_EQ(counters[0].n_threads, 64u);
  EXPECT_EQ(counters[0].stage, 0u);
  EXPECT_EQ(counters[1].n_threadgroup_barriers, 1u);
  EXPECT_EQ(counters[1].bytes_read, 0u) << "threadgroup memory does not count";
  EXPECT_EQ(counters[1].stage, 1u);
  EXPECT_EQ(counters[2].command_buffer, 1u);
  EXPECT_EQ(counters[2].bytes_read, 0u) << "what set_bytes gave does not count";
  EXPECT_EQ(counters[0].traffic_read, 256u);
  EXPECT_TRUE(device->take_counters().empty());
}

TEST(Device, TextForMacsIsSelfContained) {
  ASSERT_EQ(metal::emulator_faults.files.size(), 1u);
  const metal::KernelFile& file = metal::emulator_faults.files[0];
  EXPECT_EQ(file.name, "faults.metal");
  EXPECT_EQ(file.text.substr(0, 52), "#line 1 \"emulator/tests/faults/faults.metal\"\n// One ");
  EXPECT_EQ(file.text.find("#include \""), std::string_view::npos);
  EXPECT_NE(file.text.find("#include <metal_stdlib>"), std::string_view::npos);
}

TEST(Device, PlainAndTracedLibrariesDoNotMix) {
  EXPECT_THROW(make_emulated_device({.libraries = {&emulator_faults_plain, &emulator_faults_traced}}), Error);
}

}  // namespace
}  // namespace lily::emulator
