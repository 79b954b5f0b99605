#include "tests/engine/faults.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

namespace {

std::atomic<bool> counting = false;
std::atomic<int64_t> n_seen = 0, fails_at = -1;
std::atomic<bool> has_failed = false;
thread_local int exempt = 0;

bool fails_now() {
  if (!counting.load(std::memory_order_relaxed) || exempt > 0) return false;
  if (n_seen.fetch_add(1) != fails_at.load()) return false;
  has_failed = true;
  return true;
}

void* allocate(std::size_t n, std::size_t alignment) {
  if (fails_now()) {
    if (const std::new_handler handler = std::get_new_handler()) handler();  // as the library's does
    throw std::bad_alloc();
  }
  if (n == 0) n = 1;
  void* const memory = alignment == 0
                           ? std::malloc(n)
                           : std::aligned_alloc(alignment, (n + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// These belong together; a compiler that inlines one of them cannot know.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t n) { return allocate(n, 0); }
void* operator new(std::size_t n, std::align_val_t alignment) {
  return allocate(n, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

#if defined(__linux__)
// What lily maps itself: weights, states, KV, scratch memory, files. The C library's own calls do not come
// here.
extern "C" void* mmap(void* at, size_t n, int protection, int flags, int file, off_t offset) noexcept {
  if (fails_now()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the system call returns a number
  return reinterpret_cast<void*>(::syscall(SYS_mmap, at, n, protection, flags, file, offset));
}
#endif

namespace lily::test {

void fail_allocation(int64_t n) {
  n_seen = 0;
  fails_at = n;
  has_failed = false;
  counting = true;
}

Allocations stop_failing() {
  counting = false;
  return {.n = n_seen, .failed = has_failed};
}

Exempt::Exempt() { ++exempt; }
Exempt::~Exempt() { --exempt; }

}  // namespace lily::test
