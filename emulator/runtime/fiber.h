// Fibers: stacks with a saved place to go on from. A fiber never leaves the OS thread that made it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace lily::emulator {

// Saves the callee-saved registers on the present stack, its pointer in *save, and goes on at `to`. Returns
// when somebody switches back.
extern "C" void lily_switch_context(void** save, void* to);

struct Fiber {
  void* sp = nullptr;
};

// Stacks with a guard page below each, and the fibers on them that have nothing to do.
class FiberPool {
 public:
  // `entry` runs on each fiber and never returns.
  FiberPool(size_t max_fibers, void (*entry)());
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  Fiber& take() {
    if (idle_.empty()) grow();
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    return *fiber;
  }
  // The fiber's sp must be where it waits for work.
  void give_back(Fiber& fiber) { idle_.push_back(&fiber); }
  // Makes all fibers new, whatever they were in the middle of.
  void reset();

  bool contains(const void* address) const {
    return static_cast<size_t>(static_cast<const char*>(address) - stacks_) < bytes_;
  }

 private:
  void grow();
  void make_new(size_t index);

  void (*const entry_)();
  const size_t max_fibers_, bytes_;
  char* stacks_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

}  // namespace lily::emulator
