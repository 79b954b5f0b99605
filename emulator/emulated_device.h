// The emulated GPU: a metal::Device that executes Metal kernels on Linux and verifies how they are used.
//
// Kernels come compiled, in two builds (metal_kernel_library() of cmake/MetalKernels.cmake makes both): the
// plain one runs fast and finds divergence, deadlocks, faults and wrong results under shuffled schedules; the
// traced one records every memory access and finds races, missing barriers, accesses out of bounds or outside
// of what a dispatch declared, and writes to weights. docs/emulator.md has the whole list.
//
// Threads: command buffers run on a thread of the device, threadgroups on all cores. The functions added here
// may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/metal/device.h"

namespace lily::emulator {

struct CompiledLibrary;

struct Finding {
  enum class Kind : uint8_t {
    race_in_threadgroup,        // two threads, no threadgroup_barrier between them
    race_between_threadgroups,  // of one dispatch
    missing_dispatch_barrier,   // two dispatches, no memory_barrier between them
    divergent_collective,       // lanes at different simdgroup functions or calls
    divergent_barrier,          // threads at different threadgroup_barriers
    early_return,               // a thread returned before a collective or barrier of its peers
    deadlock,                   // threads wait for one another
    inactive_lane,              // a value was taken from a lane that does not exist
    out_of_bounds,              // of a buffer or of threadgroup memory
    unbound_buffer,             // access to a buffer that the dispatch does not bind
    immutable_write,            // kernel wrote to weights
    undeclared_access,          // outside of the ranges that the dispatch declared
    host_race,                  // CPU access to memory that a command buffer in flight uses
    bad_argument,               // missing, too small or misaligned argument
    limit,                      // of threads, threadgroup memory or grid size
    undefined_constant,         // a function constant was used that the pipeline gives no value
    misuse,                     // of a language facility, with a message of its own
  };
  Kind kind;
  std::string kernel;   // host name; empty for host_race
  std::string message;  // one line: buffers, threads, dispatches, instructions
};
const char* to_string(Finding::Kind kind);

// Bytes of a buffer that kernels may write, which a dispatch read or wrote.
struct Touched {
  const metal::Buffer* buffer = nullptr;
  size_t begin = 0, end = 0;
  bool is_write = false;
};

// One executed dispatch. Bytes are of device memory and 0 in the plain build.
struct DispatchCounters {
  std::string kernel;
  uint32_t command_buffer = 0;  // order of commit, from 0
  uint32_t stage = 0;           // memory barriers and encoder ends before it in its command buffer
  bool indirect = false;
  uint64_t n_threadgroups = 0, n_threads = 0;
  uint64_t n_threadgroup_barriers = 0;             // executed, summed over threadgroups
  uint64_t bytes_read = 0, bytes_written = 0;      // distinct
  uint64_t traffic_read = 0, traffic_written = 0;  // with repetitions
  // With Options::keep_accesses: sorted by buffer, kind and place; the arguments of an indirect dispatch too.
  std::vector<Touched> touched;
};

struct Options {
  // Where make_library() looks for kernels, by library name. Plain and traced ones do not mix in a device.
  std::vector<const CompiledLibrary*> libraries = {};
  uint64_t seed = 0;
  bool shuffle = false;  // order of lanes, threadgroups, and dispatches between barriers, from the seed
  int max_delay_us = 0;  // random delays before command buffers start and before events are signalled
  int n_threads = 0;     // 0: all cores
  bool keep_counters = false;
  bool keep_accesses = false;  // DispatchCounters::touched; traced libraries only
  // This command buffer (order of commit, from 0) ends in error without executing, as after a GPU's fault;
  // -1: none.
  int64_t failing_command_buffer = -1;
  // What a finding does besides being listed.
  enum class OnFinding : uint8_t {
    nothing,
    fail,   // the command buffer ends in error
    abort,  // prints it and stops the process, for a debugger
  };
  OnFinding on_finding = OnFinding::fail;
  metal::Limits limits = {
      .apple_family = 9, .max_buffer_length = size_t{4} << 30, .recommended_working_set = size_t{16} << 30};
};

class EmulatedDevice : public metal::Device {
 public:
  virtual std::vector<Finding> findings() const = 0;  // at most 100 are kept, one a place and kind
  virtual void clear_findings() = 0;
  // Of command buffers completed so far; needs Options::keep_counters. Empties the list.
  virtual std::vector<DispatchCounters> take_counters() = 0;
};

// Throws Error(Fault::user) if the options do not fit together.
std::unique_ptr<EmulatedDevice> make_emulated_device(Options options);

}  // namespace lily::emulator
