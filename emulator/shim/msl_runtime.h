// What compiled kernels and the emulator's runtime share: the state of the running GPU thread, and the calls
// by which a kernel meets other threads. Plain structures without library types: this header is compiled into
// every kernel, with the sanitizer's instrumentation in the traced build.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __clang__
#define LILY_CONVERGENT __attribute__((convergent))
#else
#define LILY_CONVERGENT
#endif

namespace lily::emulator {

inline constexpr unsigned kLanes = 32;
inline constexpr unsigned kArguments = 31;
inline constexpr unsigned kSlotBytes = 64;  // largest value that a lane can deposit in a collective

// Arguments of a dispatch as the kernel sees them.
struct Launch {
  void* buffers[kArguments];
  uint32_t threadgroup_lengths[kArguments];
  uint32_t groups[3];   // threadgroups of the grid
  uint32_t threads[3];  // threads of a threadgroup
};

struct Group;
class Worker;
struct Simdgroup;

struct Thread {
  void* sp;  // of its fiber, while it waits in a collective or barrier
  Simdgroup* simdgroup;
  Group* group;
  uint16_t lane, simdgroup_index, index;
  bool started;
  uint32_t position[3];  // in the threadgroup
};

// Masks have a bit for each lane.
struct Simdgroup {
  uint32_t full;      // lanes that exist
  uint32_t live;      // lanes that have not returned
  uint32_t runnable;  // lanes that wait for nothing, started or not
  uint32_t arrived;   // lanes that wait in the present collective
  uint32_t sequence;  // collectives so far
  int operation;      // of the present collective
  const void* site;
  uint32_t epochs[2];  // simdgroup_barriers so far that ordered threadgroup and device memory
  Thread* lanes[kLanes];
  // What the lanes deposit and what they get; two sets alternate, since a lane may enter the next collective
  // before another one has left the present one.
  alignas(64) unsigned char slots[2][kLanes * kSlotBytes];
  alignas(64) unsigned char results[2][kLanes * kSlotBytes];
};

struct Group {
  const Launch* launch;
  Worker* worker;
  uint32_t id[3], linear_id;
  uint32_t n_threads, n_simdgroups, n_live, n_waiting;
  const void* barrier_site;
  uint32_t barrier_flags;
  uint32_t epochs[2];  // threadgroup_barriers so far that ordered threadgroup and device memory
};

enum Operation : int {
  op_sum,
  op_product,
  op_min,
  op_max,
  op_and,
  op_or,
  op_xor,
  op_prefix_exclusive_sum,
  op_prefix_inclusive_sum,
  op_prefix_exclusive_product,
  op_prefix_inclusive_product,
  op_shuffle,
  op_shuffle_xor,
  op_shuffle_up,
  op_shuffle_down,
  op_shuffle_rotate_up,
  op_shuffle_rotate_down,
  op_fill_up,
  op_fill_down,
  op_broadcast,
  op_broadcast_first,
  op_quad,
  op_ballot,
  op_multiply_accumulate,
  op_matmul2d,
  op_barrier,
};

enum BarrierFlags : unsigned { barrier_device = 1, barrier_threadgroup = 2 };

// The running GPU thread; null outside of kernels. __thread rather than thread_local: no initialisation
// guard.
extern __thread Thread* current_thread;

using Combine = void (*)(Simdgroup& simdgroup, unsigned parity);

// Waits for all lanes of the simdgroup; the last one to arrive runs `combine`. Returns the set of slots in
// use. `site` is the caller's return address: lanes that meet at different sites have diverged. Convergent,
// since a compiler that duplicates the call would give one place in the source two sites.
LILY_CONVERGENT unsigned simd_collect(Operation operation, const void* site, Combine combine);
LILY_CONVERGENT void simdgroup_barrier(unsigned flags, const void* site);
LILY_CONVERGENT void threadgroup_barrier(unsigned flags, const void* site);

// Memory of a threadgroup variable, the same for all threads of the group; NaN when first asked for.
void* threadgroup_variable(uint32_t key, uint32_t bytes, uint32_t alignment);
void* threadgroup_argument(unsigned index);
// Memory of the emulator's own, shared by the threads of the group.
void* threadgroup_scratch(size_t bytes);

// Accesses that the shim performs itself, outside of the compiler's instrumentation.
void note_range(const volatile void* address, size_t bytes, bool write);
void note_atomic(const volatile void* address, size_t bytes, bool write);

// A misuse that the shim noticed; abandons the threadgroup.
[[noreturn]] void report_misuse(const char* message);
[[noreturn]] void report_inactive_lane(unsigned lane, int source);

// ---- Tables that the rewriter emits

struct ArgumentInfo {
  enum Kind : uint8_t { pointer, reference };
  uint8_t index;
  Kind kind;
  bool writable;
  bool optional;             // depends on a function constant
  uint32_t size, alignment;  // of the element or of the referenced object
};

struct CompiledKernel {
  const char* host_name;
  void (*body)();  // runs current_thread
  const ArgumentInfo* arguments;
  unsigned n_arguments;
};

struct FunctionConstantSlot {
  uint32_t index;
  uint32_t size;
  void* value;
  bool* defined;
  const char* name;
  char type;  // 'b', 'i', 'u', 'f' as in the variant of FunctionConstant, '?' for others
};

// One .metal file, compiled.
struct CompiledFile {
  const char* name;
  const CompiledKernel* kernels;
  unsigned n_kernels;
  const FunctionConstantSlot* constants;
  unsigned n_constants;
};

// One kernel library in one build.
struct CompiledLibrary {
  const char* name;
  const CompiledFile* const* files;
  unsigned n_files;
  bool traced;
};

}  // namespace lily::emulator
