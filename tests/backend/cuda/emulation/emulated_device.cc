#include "tests/backend/cuda/emulation/emulated_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace lily::cuda::emulated {
namespace {

constexpr size_t kStackBytes = 48 << 10;

#if defined(__x86_64__)
// Saves the callee-saved registers on the old stack and continues on the new one.
extern "C" void lily_switch_fiber(void** save, void* next);
asm(R"(
.text
.type lily_switch_fiber,@function
lily_switch_fiber:
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
.size lily_switch_fiber,.-lily_switch_fiber
)");
using Context = void*;
#else
using Context = ucontext_t;
#endif

struct Fiber {
  Thread state;
  Context context{};
  bool done = false;
};

struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
};
struct CopyBarrier {
  unsigned expected = 0, requested = 0, phases = 0;  // phases completed
  std::vector<Copy> copies;
};

// Shared memory of a cluster's blocks. Each block's ends where a page begins that nobody may touch: an access
// beyond what was asked for, which a GPU refuses in steps of 128 bytes, is a segmentation fault.
class SharedMemory {
 public:
  void resize(unsigned n_blocks, size_t n_bytes) {
    n_bytes_ = (n_bytes + kGranularity - 1) / kGranularity * kGranularity;
    if (n_blocks <= n_blocks_ && n_bytes_ <= capacity_) return;
    if (base_ != nullptr) munmap(base_, n_blocks_ * (capacity_ + page_));
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    n_blocks_ = std::max(n_blocks, n_blocks_);
    capacity_ = (std::max(n_bytes_, capacity_) + page_ - 1) / page_ * page_;
    void* const p = mmap(nullptr, n_blocks_ * (capacity_ + page_), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fatal("no memory for shared memory");
    base_ = static_cast<unsigned char*>(p);
    for (unsigned b = 0; b < n_blocks_; ++b)
      if (mprotect(base_ + b * (capacity_ + page_) + capacity_, page_, PROT_NONE) != 0)
        fatal("a guard page cannot be made");
  }
  unsigned char* of(unsigned block) const {
    return base_ + block * (capacity_ + page_) + capacity_ - n_bytes_;
  }
  void poison(unsigned block) const {
    std::memset(of(block), 0xff, n_bytes_);
  }  // NaN in every type kept there

 private:
  static constexpr size_t kGranularity = 128;
  [[noreturn]] static void fatal(const char* why) {
    std::fprintf(stderr, "emulated device: %s\n", why);
    std::abort();
  }
  unsigned char* base_ = nullptr;
  size_t n_bytes_ = 0, capacity_ = 0, page_ = 0;
  unsigned n_blocks_ = 0;
};

struct Machine {
  dim3 grid, block;
  unsigned cluster = 1;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::vector<unsigned char> stacks;
  SharedMemory shared;
  Group cluster_group;
  size_t running = 0, n_alive = 0;
  uint64_t idle_switches = 0;  // since a barrier opened or a thread ended
  std::vector<CopyBarrier> copy_barriers;
  Context main{};
  const std::function<void()>* body = nullptr;
};
Machine machine;
Graph* captured = nullptr;

void switch_to(Context& from, size_t next) {
  machine.running = next;
#if defined(__x86_64__)
  lily_switch_fiber(&from, machine.fibers[next].context);
#else
  swapcontext(&from, &machine.fibers[next].context);
#endif
}

size_t next_alive(size_t from) {
  for (size_t i = (from + 1) % machine.fibers.size();; i = (i + 1) % machine.fibers.size())
    if (!machine.fibers[i].done) return i;
}

void fiber_main() {
  (*machine.body)();
  Fiber& me = machine.fibers[machine.running];
  me.done = true;
  machine.idle_switches = 0;
  if (--machine.n_alive == 0) {
#if defined(__x86_64__)
    lily_switch_fiber(&me.context, machine.main);
#else
    setcontext(&machine.main);
#endif
  }
  switch_to(me.context, next_alive(machine.running));
  std::abort();
}

}  // namespace

void progress() { machine.idle_switches = 0; }

void yield() {
  if (++machine.idle_switches > 4 * machine.fibers.size()) {
    const Thread& t = current();
    std::fprintf(stderr,
                 "emulated kernel: a barrier is not reached by all threads (block %u,%u thread %u waits)\n",
                 t.block->index.x, t.block->index.y, t.thread.x);
    std::abort();
  }
  const size_t me = machine.running;
  const size_t next = next_alive(me);
  if (next != me) switch_to(machine.fibers[me].context, next);
}

Thread& current() { return machine.fibers[machine.running].state; }
dim3 grid_size() { return machine.grid; }
dim3 block_size() { return machine.block; }
unsigned cluster_size() { return machine.cluster; }
Group& cluster_group() { return machine.cluster_group; }
unsigned char* cluster_shared(unsigned rank) { return machine.blocks[rank].shared; }

void barrier(Group& group) {
  const uint64_t mine = group.generation;
  if (++group.arrived == group.size) {
    group.arrived = 0;
    ++group.generation;
    machine.idle_switches = 0;
    return;
  }
  while (group.generation == mine) yield();
}

uint64_t new_mbarrier() {
  machine.copy_barriers.emplace_back();
  return machine.copy_barriers.size() - 1;
}

void expect(uint64_t barrier, unsigned bytes) { machine.copy_barriers.at(barrier).expected += bytes; }

void bulk_copy(void* shared, const void* global, unsigned bytes, uint64_t barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
    std::fprintf(stderr, "emulated kernel: a bulk copy of %u bytes is not aligned to 16\n", bytes);
    std::abort();
  }
  CopyBarrier& b = machine.copy_barriers.at(barrier);
  b.copies.push_back({shared, global, bytes});
  b.requested += bytes;
}

void wait(uint64_t barrier, unsigned parity) {
  while (machine.copy_barriers.at(barrier).requested < machine.copy_barriers.at(barrier).expected) yield();
  CopyBarrier& b = machine.copy_barriers.at(barrier);
  if (b.expected != 0) {
    if (b.requested != b.expected) {
      std::fprintf(stderr, "emulated kernel: %u bytes expected, %u requested\n", b.expected, b.requested);
      std::abort();
    }
    for (const Copy& c : b.copies) std::memcpy(c.to, c.from, c.bytes);
    b = CopyBarrier{0, 0, b.phases + 1, {}};
  }
  if (b.phases == 0 || ((b.phases - 1) & 1) != parity) {
    std::fprintf(stderr, "emulated kernel: a wait for a copy that nobody asked for\n");
    std::abort();
  }
}

void send(void* shared, const void* value, unsigned bytes, uint64_t barrier) {
  std::memcpy(shared, value, bytes);
  machine.copy_barriers.at(barrier).requested += bytes;
  progress();
}

void begin_capture() { captured = new Graph; }
Graph* end_capture() { return std::exchange(captured, nullptr); }

void run_grid(dim3 grid, unsigned threads, unsigned cluster, size_t shared_bytes,
              const std::function<void()>& body) {
  if (captured != nullptr) {
    captured->push_back([=] { run_grid(grid, threads, cluster, shared_bytes, body); });
    return;
  }
  Machine& m = machine;
  const unsigned n_warps = (threads + 31) / 32;
  m.grid = grid;
  m.block = dim3(threads);
  m.cluster = cluster;
  m.body = &body;
  m.fibers = std::vector<Fiber>(size_t{threads} * cluster);
  m.warps = std::vector<Warp>(size_t{n_warps} * cluster);
  m.blocks = std::vector<Block>(cluster);
  m.stacks.resize(m.fibers.size() * kStackBytes);
  m.shared.resize(cluster, shared_bytes);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += cluster) {
        m.cluster_group = Group{static_cast<int>(m.fibers.size())};
        for (unsigned c = 0; c < cluster; ++c) {
          Block& b = m.blocks[c];
          b.group = Group{static_cast<int>(threads)};
          b.index = dim3(x + c, y, z);
          b.cluster_rank = c;
          m.shared.poison(c);
          b.shared = m.shared.of(c);
          for (unsigned w = 0; w < n_warps; ++w)
            m.warps[c * n_warps + w].group = Group{static_cast<int>(std::min(32u, threads - 32 * w))};
        }
        for (size_t i = 0; i < m.fibers.size(); ++i) {
          Fiber& f = m.fibers[i];
          const unsigned c = i / threads, t = i % threads;
          f.done = false;
          f.state = Thread{dim3(t, 0, 0), &m.blocks[c], &m.warps[c * n_warps + t / 32], t % 32};
          unsigned char* stack = m.stacks.data() + i * kStackBytes;
#if defined(__x86_64__)
          auto* top =
              reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + kStackBytes) & ~uintptr_t{15});
          *--top = nullptr;  // keeps the entry's stack aligned as after a call
          *--top = reinterpret_cast<void*>(&fiber_main);
          for (int r = 0; r < 6; ++r) *--top = nullptr;
          f.context = top;
#else
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = stack;
          f.context.uc_stack.ss_size = kStackBytes;
          makecontext(&f.context, fiber_main, 0);
#endif
        }
        m.copy_barriers.clear();
        m.n_alive = m.fibers.size();
        m.idle_switches = 0;
        switch_to(m.main, 0);
      }
}

}  // namespace lily::cuda::emulated
