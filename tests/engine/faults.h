// Allocations that fail on purpose: the n-th from when it was said, on whatever thread it comes. Whoever
// links faults.cc has its operator new and mmap.
#pragma once

#include <cstdint>

namespace lily::test {

// The n-th allocation from now on fails, and those after it do not; negative: none does. Allocations are
// counted from here.
void fail_allocation(int64_t n);
// None fails from now on. How many there were; `failed`: one of them was made to fail.
struct Allocations {
  int64_t n = 0;
  bool failed = false;
};
Allocations stop_failing();

// Of this thread, for as long as this lives: neither counted nor failing. For what a test itself needs.
class Exempt {
 public:
  Exempt();
  ~Exempt();
  Exempt(const Exempt&) = delete;
  Exempt& operator=(const Exempt&) = delete;
};

}  // namespace lily::test
