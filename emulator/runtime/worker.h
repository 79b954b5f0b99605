// Runs threadgroups of a dispatch on one OS thread.
//
// Each GPU thread runs on a fiber until it waits for others; then another lane of its simdgroup goes on,
// started or resumed, and if all of these wait, another simdgroup. A thread that ends without having waited
// leaves its fiber to the next one: kernels without collectives need no switches at all.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "emulator/runtime/dispatch.h"
#include "emulator/runtime/fiber.h"
#include "emulator/runtime/memory.h"
#include "emulator/runtime/trace.h"

namespace lily::emulator {

class Worker {
 public:
  Worker();
  // The one of the calling thread, made on first use.
  static Worker& of_this_thread();

  // Executes threadgroups until none is left or the dispatch has failed.
  void run(Dispatch& dispatch);

  // ---- Called by kernels (msl_runtime.h)
  unsigned collect(Operation operation, unsigned flags, const void* site, Combine combine);
  void threadgroup_barrier(unsigned flags, const void* site);
  void* variable(uint32_t key, uint32_t bytes, uint32_t alignment);
  void* argument(unsigned index) const { return arguments_[index]; }
  void* scratch(size_t bytes);
  Trace* trace() { return dispatch_->traced ? &trace_ : nullptr; }
  // Lists a finding and ends the threadgroup and with it the dispatch.
  [[noreturn]] void abandon(Finding::Kind kind, uint64_t place, const std::string& message);

 private:
  void prepare(Dispatch& dispatch);
  void run_group(uint32_t group);
  void start_over(uint32_t group);
  static void fiber_entry();
  void fiber_loop();
  void finish(Thread& thread);
  Thread* choose(Simdgroup& preferred);
  Thread* pick(Simdgroup& simdgroup);
  void wait(Thread& thread);
  void go_on(Thread& next, void** save);
  std::string deadlock() const;
  uint32_t random();
  char* allocate(uint32_t bytes, uint32_t alignment);

  Dispatch* dispatch_ = nullptr;
  Group group_{};
  std::vector<Thread> threads_;
  std::vector<Simdgroup> simdgroups_;
  FiberPool fibers_;
  // What the fiber that is switched to shall start, and that fiber itself.
  Thread* to_start_ = nullptr;
  Fiber* starting_ = nullptr;
  void* scheduler_sp_ = nullptr;
  bool abandoned_ = false;
  uint64_t random_ = 1;
  uint64_t n_barriers_ = 0;

  // Threadgroup memory: variables and arguments with gaps between them, all handed out anew for each
  // threadgroup.
  struct Variable {
    uint32_t key;
    char* begin;
  };
  GuardedMemory arena_;
  std::vector<Variable> variables_;
  void* arguments_[kArguments] = {};
  uint32_t arena_end_ = 0, arena_used_ = 0;
  std::vector<char> scratch_;

  Trace trace_;
};

}  // namespace lily::emulator
