#include "emulator/runtime/memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "base/error.h"
#include "emulator/shim/msl_runtime.h"

namespace lily::emulator {

namespace {

constexpr size_t kEndAlignment = 16;

// All guarded memory of the process, by the start of its mapping: faults have no other context than an
// address.
struct Registry {
  std::mutex mutex;
  struct Entry {
    const char* map_end;
    const GuardedMemory* memory;
  };
  std::map<const char*, Entry> maps;

  // The memory whose mapping, guards included, holds `p`. Call with the mutex held.
  const GuardedMemory* find(const char* p) const {
    const auto after = maps.upper_bound(p);
    if (after == maps.begin() || p >= std::prev(after)->second.map_end) return nullptr;
    return std::prev(after)->second.memory;
  }
};
Registry& registry() {
  static Registry instance;
  return instance;
}

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction g_previous[std::size(kSignals)];

// What happened travels from the signal handler to the fiber in a thread's own variable.
__thread KernelFault fault;

void resume_in_fault() { on_kernel_fault(fault); }

void on_signal(int signal, siginfo_t* info, void* context) {
  if (current_thread == nullptr) {
    // Not a kernel: let the instruction fault again under the previous handler.
    for (size_t i = 0; i < std::size(kSignals); ++i)
      if (kSignals[i] == signal) sigaction(signal, &g_previous[i], nullptr);
    return;
  }
  // x86 gives no address for a misaligned vector access, nor for one that is no address at all.
  fault = {info->si_code == SI_KERNEL ? nullptr : info->si_addr, signal == SIGFPE};
  auto* u = static_cast<ucontext_t*>(context);
#if defined(__x86_64__)
  // As after a call: below the red zone, return address at 8 mod 16.
  auto sp = static_cast<uintptr_t>(u->uc_mcontext.gregs[REG_RSP]);
  u->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(((sp - 256) & ~uintptr_t{15}) - 8);
  u->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(&resume_in_fault);
#else
  u->uc_mcontext.sp = (u->uc_mcontext.sp - 256) & ~uintptr_t{15};
  u->uc_mcontext.pc = reinterpret_cast<uintptr_t>(&resume_in_fault);
#endif
}

}  // namespace

GuardedMemory::GuardedMemory(size_t length, std::string label) : length_(length), label_(std::move(label)) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t body = round_up(std::max<size_t>(length, 1), page);
  map_bytes_ = body + 2 * page;
  void* map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED || mprotect(static_cast<char*>(map) + page, body, PROT_READ | PROT_WRITE) != 0)
    fail(Fault::device, "{}: no memory for a buffer of {} bytes", label_, length);
  map_ = static_cast<char*>(map);
  data_ = map_ + page + body - round_up(length, kEndAlignment);
  std::memset(map_ + page, 0xff, body);
  const std::lock_guard lock(registry().mutex);
  registry().maps[map_] = {map_ + map_bytes_, this};
}

GuardedMemory::~GuardedMemory() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().maps.erase(map_);
  }
  munmap(map_, map_bytes_);
}

std::string describe_address(const void* address) {
  const auto* p = static_cast<const char*>(address);
  const std::lock_guard lock(registry().mutex);
  const GuardedMemory* memory = registry().find(p);
  if (memory == nullptr) return {};
  return fmt::format("{}{:+} (length {})", memory->label(), p - memory->data(), memory->length());
}

bool is_device_memory(const void* address, size_t size) {
  const auto* p = static_cast<const char*>(address);
  const std::lock_guard lock(registry().mutex);
  const GuardedMemory* memory = registry().find(p);
  return memory != nullptr && p >= memory->data() && p + size <= memory->data() + memory->length();
}

void catch_faults_on_this_thread() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &g_previous[i]);
  });
  // The fault may be an overflow of the fiber's stack, so the handler has one of its own.
  constexpr size_t kBytes = 64 * 1024;
  static thread_local const std::unique_ptr<char[]> memory = std::make_unique<char[]>(kBytes);
  stack_t stack{};
  stack.ss_sp = memory.get();
  stack.ss_size = kBytes;
  sigaltstack(&stack, nullptr);
}

}  // namespace lily::emulator
