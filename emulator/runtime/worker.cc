#include "emulator/runtime/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace lily::emulator {

__thread Thread* current_thread;

namespace {

constexpr uint32_t kMaxThreads = 1024;
// Room for the largest threadgroup memory and for a gap after each variable.
constexpr uint32_t kGapBytes = 64;
constexpr uint32_t kArenaBytes = 64 * 1024 + 64 * kGapBytes;

uint32_t first_lanes(uint32_t n) { return n >= kLanes ? ~0u : (1u << n) - 1; }

const char* name_of(int operation) {
  static const char* const kNames[] = {"simd_sum",
                                       "simd_product",
                                       "simd_min",
                                       "simd_max",
                                       "simd_and",
                                       "simd_or",
                                       "simd_xor",
                                       "simd_prefix_exclusive_sum",
                                       "simd_prefix_inclusive_sum",
                                       "simd_prefix_exclusive_product",
                                       "simd_prefix_inclusive_product",
                                       "simd_shuffle",
                                       "simd_shuffle_xor",
                                       "simd_shuffle_up",
                                       "simd_shuffle_down",
                                       "simd_shuffle_rotate_up",
                                       "simd_shuffle_rotate_down",
                                       "simd_shuffle_and_fill_up",
                                       "simd_shuffle_and_fill_down",
                                       "simd_broadcast",
                                       "simd_broadcast_first",
                                       "a quad operation",
                                       "simd_ballot, simd_any or simd_all",
                                       "simdgroup_multiply_accumulate",
                                       "matmul2d",
                                       "simdgroup_barrier"};
  static_assert(std::size(kNames) == op_barrier + 1);
  return kNames[operation];
}

uint64_t place_of(const void* site) {
  return static_cast<uint32_t>(static_cast<const char*>(site) - site_base());
}

}  // namespace

// ---- Scheduling: on the path of every collective, several times for each lane

inline uint32_t Worker::random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return static_cast<uint32_t>(random_ >> 16);
}

inline Thread* Worker::pick(Simdgroup& simdgroup) {
  const uint32_t mask = simdgroup.runnable;
  if (!dispatch_->shuffle) return simdgroup.lanes[std::countr_zero(mask)];
  const auto turn = static_cast<int>(random() % kLanes);
  return simdgroup.lanes[(static_cast<uint32_t>(std::countr_zero(std::rotr(mask, turn)) + turn)) % kLanes];
}

// The next thread to run: of the preferred simdgroup if it has one that can.
inline Thread* Worker::choose(Simdgroup& preferred) {
  const bool leave = dispatch_->shuffle && (random() & 7) == 0;
  if (preferred.runnable != 0 && !leave) return pick(preferred);
  const auto n = group_.n_simdgroups;
  auto i = static_cast<uint32_t>(&preferred - simdgroups_.data());
  if (dispatch_->shuffle) i = random() % n;
  for (uint32_t k = 0; k < n; ++k) {
    i = i + 1 < n ? i + 1 : 0;
    if (simdgroups_[i].runnable != 0) return pick(simdgroups_[i]);
  }
  return nullptr;
}

inline void Worker::go_on(Thread& next, void** save) {
  if (next.started) {
    current_thread = &next;
    lily_switch_context(save, next.sp);
  } else {
    to_start_ = &next;
    starting_ = &fibers_.take();
    lily_switch_context(save, starting_->sp);
  }
}

// The running thread waits, having cleared its runnable bit.
inline void Worker::wait(Thread& thread) {
  Thread* next = choose(*thread.simdgroup);
  if (next == nullptr) abandon(Finding::Kind::deadlock, 0, deadlock());
  go_on(*next, &thread.sp);
}

Worker::Worker()
    : threads_(kMaxThreads),
      simdgroups_(kMaxThreads / kLanes),
      fibers_(kMaxThreads + 1, &Worker::fiber_entry),
      arena_(kArenaBytes, "threadgroup memory"),
      trace_(fibers_, arena_.data(), arena_.length()) {
  catch_faults_on_this_thread();
}

Worker& Worker::of_this_thread() {
  static thread_local Worker worker;
  return worker;
}

void Worker::run(Dispatch& dispatch) {
  prepare(dispatch);
  const uint32_t n_groups = dispatch.n_groups();
  while (!dispatch.failed.load(std::memory_order_relaxed)) {
    const uint32_t i = dispatch.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= n_groups) break;
    run_group(dispatch.order.empty() ? i : dispatch.order[i]);
  }
  dispatch.n_barriers += std::exchange(n_barriers_, 0);
  if (dispatch.traced) trace_.end_dispatch();
  dispatch_ = nullptr;
}

// What all threadgroups of the dispatch have in common.
void Worker::prepare(Dispatch& dispatch) {
  dispatch_ = &dispatch;
  if (dispatch.traced) trace_.begin_dispatch(dispatch);
  const uint32_t* size = dispatch.launch.threads;
  group_.launch = &dispatch.launch;
  group_.worker = this;
  group_.n_threads = dispatch.n_threads();
  group_.n_simdgroups = (group_.n_threads + kLanes - 1) / kLanes;
  for (uint32_t i = 0; i < group_.n_threads; ++i) {
    Thread& t = threads_[i];
    t.simdgroup = &simdgroups_[i / kLanes];
    t.group = &group_;
    t.lane = static_cast<uint16_t>(i % kLanes);
    t.simdgroup_index = static_cast<uint16_t>(i / kLanes);
    t.index = static_cast<uint16_t>(i);
    t.position[0] = i % size[0];
    t.position[1] = i / size[0] % size[1];
    t.position[2] = i / size[0] / size[1];
    t.simdgroup->lanes[t.lane] = &t;
  }
}

void Worker::start_over(uint32_t group) {
  const uint32_t* n = dispatch_->launch.groups;
  group_.id[0] = group % n[0];
  group_.id[1] = group / n[0] % n[1];
  group_.id[2] = group / n[0] / n[1];
  group_.linear_id = group;
  group_.n_live = group_.n_threads;
  group_.n_waiting = 0;
  group_.epochs[0] = group_.epochs[1] = 0;
  for (uint32_t i = 0; i < group_.n_simdgroups; ++i) {
    Simdgroup& s = simdgroups_[i];
    s.full = s.live = s.runnable = first_lanes(group_.n_threads - i * kLanes);
    s.arrived = s.sequence = 0;
    s.epochs[0] = s.epochs[1] = 0;
  }
  for (uint32_t i = 0; i < group_.n_threads; ++i) threads_[i].started = false;
  variables_.clear();
  arena_end_ = arena_used_ = 0;
  if (dispatch_->traced) trace_.begin_group();
  random_ = (dispatch_->seed + 1) * 0x9e3779b97f4a7c15u ^
            (uint64_t{dispatch_->serial} << 32 | group) * 0xbf58476d1ce4e5b9u;
  random_ |= 1;
  abandoned_ = false;
}

void Worker::run_group(uint32_t group) {
  start_over(group);
  for (unsigned i = 0; i < kArguments; ++i)
    if (const uint32_t bytes = dispatch_->launch.threadgroup_lengths[i]) arguments_[i] = allocate(bytes, 16);
  Thread* first = choose(simdgroups_[0]);
  go_on(*first, &scheduler_sp_);
  current_thread = nullptr;
  if (abandoned_) fibers_.reset();
}

// ---- Fibers

void Worker::fiber_entry() { of_this_thread().fiber_loop(); }

void Worker::fiber_loop() {
  while (true) {
    // Idle fibers are switched to in order to start a thread.
    Fiber& self = *starting_;
    Thread* thread = to_start_;
    while (true) {
      current_thread = thread;
      thread->started = true;
      dispatch_->kernel->body();
      thread = current_thread;
      finish(*thread);
      Thread* next = choose(*thread->simdgroup);
      if (next != nullptr && !next->started) {
        thread = next;
        continue;
      }
      if (next == nullptr && group_.n_live != 0) abandon(Finding::Kind::deadlock, 0, deadlock());
      fibers_.give_back(self);
      if (next != nullptr) go_on(*next, &self.sp);
      else lily_switch_context(&self.sp, scheduler_sp_);
      break;
    }
  }
}

void Worker::finish(Thread& thread) {
  Simdgroup& s = *thread.simdgroup;
  s.live &= ~(1u << thread.lane);
  s.runnable &= ~(1u << thread.lane);
  --group_.n_live;
  if (s.arrived != 0)
    abandon(Finding::Kind::early_return, 0,
            fmt::format("thread {} of threadgroup {} returned while lanes of its simdgroup wait in {}",
                        thread.index, group_.linear_id, name_of(s.operation)));
  if (group_.n_waiting != 0)
    abandon(Finding::Kind::early_return, 1,
            fmt::format("thread {} of threadgroup {} returned while others wait at a threadgroup_barrier",
                        thread.index, group_.linear_id));
}

// ---- Collectives and barriers

unsigned Worker::collect(Operation operation, unsigned flags, const void* site, Combine combine) {
  Thread& me = *current_thread;
  Simdgroup& s = *me.simdgroup;
  const unsigned parity = s.sequence & 1;
  if (s.live != s.full)
    abandon(Finding::Kind::early_return, place_of(site),
            fmt::format("{} by thread {} of threadgroup {} after {} lanes of its simdgroup returned",
                        name_of(operation), me.index, group_.linear_id, std::popcount(s.full & ~s.live)));
  if (s.arrived == 0) {
    s.operation = operation;
    s.site = site;
  } else if (s.operation != operation || s.site != site) {
    abandon(Finding::Kind::divergent_collective, place_of(site),
            s.operation == operation
                ? fmt::format("lanes of threadgroup {} are at different calls of {}", group_.linear_id,
                              name_of(operation))
                : fmt::format("lanes of threadgroup {} are at {} and {}", group_.linear_id,
                              name_of(s.operation), name_of(operation)));
  }
  s.arrived |= 1u << me.lane;
  if (s.arrived == s.full) {
    if (combine != nullptr) combine(s, parity);
    if (flags & barrier_threadgroup) ++s.epochs[0];
    if (flags & barrier_device) ++s.epochs[1];
    s.arrived = 0;
    ++s.sequence;
    s.runnable = s.full;
  } else {
    s.runnable &= ~(1u << me.lane);
    wait(me);
  }
  return parity;
}

void Worker::threadgroup_barrier(unsigned flags, const void* site) {
  Thread& me = *current_thread;
  if (group_.n_live != group_.n_threads)
    abandon(Finding::Kind::early_return, place_of(site),
            fmt::format("threadgroup_barrier by thread {} of threadgroup {} after {} threads returned",
                        me.index, group_.linear_id, group_.n_threads - group_.n_live));
  if (group_.n_waiting == 0) {
    group_.barrier_site = site;
    group_.barrier_flags = flags;
  } else if (group_.barrier_site != site) {
    abandon(Finding::Kind::divergent_barrier, place_of(site),
            fmt::format("threads of threadgroup {} wait at different barriers", group_.linear_id));
  }
  me.simdgroup->runnable &= ~(1u << me.lane);
  if (++group_.n_waiting < group_.n_threads) {
    wait(me);
    return;
  }
  if (flags & barrier_threadgroup) ++group_.epochs[0];
  if (flags & barrier_device) ++group_.epochs[1];
  group_.n_waiting = 0;
  ++n_barriers_;
  for (uint32_t i = 0; i < group_.n_simdgroups; ++i) simdgroups_[i].runnable = simdgroups_[i].full;
}

std::string Worker::deadlock() const {
  std::string text = fmt::format("threadgroup {}: {} of {} threads wait at a threadgroup_barrier",
                                 group_.linear_id, group_.n_waiting, group_.n_threads);
  for (uint32_t i = 0; i < group_.n_simdgroups; ++i)
    if (const Simdgroup& s = simdgroups_[i]; s.arrived != 0)
      text +=
          fmt::format(", {} lanes of simdgroup {} in {}", std::popcount(s.arrived), i, name_of(s.operation));
  return text;
}

void Worker::abandon(Finding::Kind kind, uint64_t place, const std::string& message) {
  dispatch_->findings->add(kind, dispatch_->kernel->host_name, place, message);
  dispatch_->failed = true;
  abandoned_ = true;
  void* forgotten = nullptr;
  lily_switch_context(&forgotten, scheduler_sp_);
  LILY_CHECK(false, "an abandoned fiber went on");
  std::abort();
}

void on_kernel_fault(const KernelFault& fault) {
  const Thread& t = *current_thread;
  Worker& worker = Worker::of_this_thread();
  if (fault.arithmetic)
    worker.abandon(Finding::Kind::misuse, 0,
                   fmt::format("integer division by zero, or overflow, by thread {} of threadgroup {}",
                               t.index, t.group->linear_id));
  std::string place = describe_address(fault.address);
  if (place.empty())
    place =
        fault.address == nullptr ? "a null or misaligned pointer" : fmt::format("address {}", fault.address);
  worker.abandon(
      Finding::Kind::out_of_bounds, 0,
      fmt::format("fault at {} by thread {} of threadgroup {}", place, t.index, t.group->linear_id));
}

// ---- Threadgroup memory

char* Worker::allocate(uint32_t bytes, uint32_t alignment) {
  arena_used_ += (bytes + 15) / 16 * 16;
  const uint32_t begin = (arena_end_ + alignment - 1) / alignment * alignment;
  if (arena_used_ > dispatch_->max_threadgroup_memory || begin + bytes > kArenaBytes)
    abandon(Finding::Kind::limit, 0,
            fmt::format("{} bytes of threadgroup memory, more than {}", arena_used_,
                        dispatch_->max_threadgroup_memory));
  arena_end_ = begin + bytes + kGapBytes;
  char* p = arena_.data() + begin;
  std::memset(p, 0xff, bytes);
  if (dispatch_->traced) trace_.add_variable(p, bytes);
  return p;
}

void* Worker::variable(uint32_t key, uint32_t bytes, uint32_t alignment) {
  for (const Variable& v : variables_)
    if (v.key == key) return v.begin;
  variables_.push_back({key, allocate(bytes, alignment)});
  return variables_.back().begin;
}

void* Worker::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

// ---- What kernels call

namespace {

Worker& running() { return *current_thread->group->worker; }

}  // namespace

unsigned simd_collect(Operation operation, const void* site, Combine combine) {
  return running().collect(operation, 0, site, combine);
}
void simdgroup_barrier(unsigned flags, const void* site) {
  running().collect(op_barrier, flags, site, nullptr);
}
void threadgroup_barrier(unsigned flags, const void* site) { running().threadgroup_barrier(flags, site); }
void* threadgroup_variable(uint32_t key, uint32_t bytes, uint32_t alignment) {
  return running().variable(key, bytes, alignment);
}
void* threadgroup_argument(unsigned index) { return running().argument(index); }
void* threadgroup_scratch(size_t bytes) { return running().scratch(bytes); }

void report_misuse(const char* message) {
  const Thread& t = *current_thread;
  running().abandon(Finding::Kind::misuse, place_of(message),
                    fmt::format("{} (thread {} of threadgroup {})", message, t.index, t.group->linear_id));
}
void report_inactive_lane(unsigned lane, int source) {
  const Thread& t = *current_thread;
  running().abandon(Finding::Kind::inactive_lane, 0,
                    fmt::format("lane {} of threadgroup {} takes a value from lane {}, which does not exist",
                                lane, t.group->linear_id, source));
}

}  // namespace lily::emulator
