// What clang calls in kernels compiled with -fsanitize=thread. No sanitizer runtime is linked; these names
// are its.
#include <cstring>

#include "emulator/runtime/worker.h"

namespace lily::emulator {

namespace {

inline void note(const volatile void* address, size_t size, bool is_write, bool is_atomic, const void* site) {
  const Thread* thread = current_thread;
  if (thread == nullptr) return;
  if (Trace* trace = thread->group->worker->trace())
    trace->access(*thread, address, size, is_write, is_atomic, site);
}

}  // namespace

void note_range(const volatile void* address, size_t bytes, bool write) {
  note(address, bytes, write, false, __builtin_return_address(0));
}
void note_atomic(const volatile void* address, size_t bytes, bool write) {
  note(address, bytes, write, true, __builtin_return_address(0));
}

}  // namespace lily::emulator

using lily::emulator::note;

// NOLINTBEGIN(bugprone-reserved-identifier): the compiler calls them so
extern "C" {

#define LILY_ACCESS(n)                                                                              \
  void __tsan_read##n(void* p) { note(p, n, false, false, __builtin_return_address(0)); }           \
  void __tsan_write##n(void* p) { note(p, n, true, false, __builtin_return_address(0)); }           \
  void __tsan_unaligned_read##n(void* p) { note(p, n, false, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##n(void* p) { note(p, n, true, false, __builtin_return_address(0)); } \
  void __tsan_read_write##n(void* p) {                                                              \
    note(p, n, false, false, __builtin_return_address(0));                                          \
    note(p, n, true, false, __builtin_return_address(0));                                           \
  }                                                                                                 \
  void __tsan_unaligned_read_write##n(void* p) {                                                    \
    note(p, n, false, false, __builtin_return_address(0));                                          \
    note(p, n, true, false, __builtin_return_address(0));                                           \
  }
LILY_ACCESS(1)
LILY_ACCESS(2)
LILY_ACCESS(4)
LILY_ACCESS(8)
LILY_ACCESS(16)
#undef LILY_ACCESS

void __tsan_read_range(void* p, unsigned long n) { note(p, n, false, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { note(p, n, true, false, __builtin_return_address(0)); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  note(from, n, false, false, __builtin_return_address(0));
  note(to, n, true, false, __builtin_return_address(0));
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  note(from, n, false, false, __builtin_return_address(0));
  note(to, n, true, false, __builtin_return_address(0));
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  note(to, n, true, false, __builtin_return_address(0));
  return std::memset(to, value, n);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
// NOLINTEND(bugprone-reserved-identifier)

namespace lily::emulator {

const char* site_base() { return reinterpret_cast<const char*>(&__tsan_init); }

}  // namespace lily::emulator
