#include "emulator/runtime/fiber.h"

#include <sys/mman.h>

#include <cstdint>

#include "base/error.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl lily_switch_context
.type lily_switch_context, @function
lily_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size lily_switch_context, .-lily_switch_context
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl lily_switch_context
.type lily_switch_context, %function
lily_switch_context:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size lily_switch_context, .-lily_switch_context
)");
#else
#error "the emulator's context switch exists for x86-64 and aarch64 only"
#endif

namespace lily::emulator {

namespace {

constexpr size_t kGuardBytes = 4096;
constexpr size_t kStackBytes = 64 * 1024;  // guard included

}  // namespace

FiberPool::FiberPool(size_t max_fibers, void (*entry)())
    : entry_(entry), max_fibers_(max_fibers), bytes_(max_fibers * kStackBytes) {
  void* memory = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail(Fault::device, "emulator: cannot reserve {} bytes for fiber stacks", bytes_);
  stacks_ = static_cast<char*>(memory);
}

FiberPool::~FiberPool() { munmap(stacks_, bytes_); }

void FiberPool::grow() {
  const size_t index = fibers_.size();
  LILY_CHECK(index < max_fibers_, "fiber {}", index);
  char* stack = stacks_ + index * kStackBytes;
  if (mprotect(stack + kGuardBytes, kStackBytes - kGuardBytes, PROT_READ | PROT_WRITE) != 0)
    fail(Fault::device, "emulator: no memory for fiber stack {}", index);
  fibers_.push_back(std::make_unique<Fiber>());
  make_new(index);
}

void FiberPool::make_new(size_t index) {
  // Equal offsets in all stacks would compete for the same cache sets.
  char* top = stacks_ + (index + 1) * kStackBytes - (index % 32) * 64;
  auto** frame = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
  *--frame = nullptr;  // alignment: a function starts with its return address at 8 mod 16
  *--frame = reinterpret_cast<void*>(entry_);  // popped by ret
  for (int i = 0; i < 6; ++i) *--frame = nullptr;
#else
  frame -= 20;
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry_);  // x30
#endif
  fibers_[index]->sp = static_cast<void*>(frame);
  idle_.push_back(fibers_[index].get());
}

void FiberPool::reset() {
  idle_.clear();
  for (size_t i = fibers_.size(); i-- > 0;) make_new(i);
}

}  // namespace lily::emulator
