// A dispatch while it executes: shared by the workers, which take threadgroups from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emulator/emulated_device.h"
#include "emulator/runtime/findings.h"
#include "emulator/shim/msl_runtime.h"

namespace lily::emulator {

class BufferShadow;

struct ByteRange {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool contains(const char* p, size_t size) const { return p >= begin && p + size <= end; }
};

// Memory that the dispatch may touch: a buffer, or the copy of what set_bytes was given.
struct BoundMemory {
  ByteRange range;
  std::string label;
  bool immutable = false;
  BufferShadow* shadow = nullptr;  // null: neither races nor bytes are counted
  const metal::Buffer* buffer = nullptr;
  // If the dispatch declared anything: what of this memory, sorted and without overlaps.
  bool declared = false;
  std::vector<ByteRange> readable, writable;
};

struct Dispatch {
  const CompiledKernel* kernel = nullptr;
  Launch launch{};
  size_t max_threadgroup_memory = 0;
  uint32_t serial = 0;          // of the device, from 1
  uint32_t interval_start = 0;  // serial of the first dispatch after the last memory barrier
  uint64_t seed = 0;
  bool shuffle = false;
  bool traced = false;
  std::vector<BoundMemory> memory;
  std::vector<std::pair<ByteRange, const char*>> undefined_constants;  // and their names
  std::vector<uint32_t> order;                                         // of threadgroups; empty: rising
  const std::vector<std::string>* names = nullptr;  // kernels of the dispatches from interval_start on
  Findings* findings = nullptr;

  std::atomic<uint32_t> next{0};  // threadgroup to be taken, an index into `order`
  std::atomic<bool> failed{false};
  std::atomic<uint64_t> n_barriers{0};
  std::atomic<uint64_t> bytes[2] = {}, traffic[2] = {};  // read, written
  bool keeps_accesses = false;
  std::mutex touched_mutex;
  std::vector<Touched> touched;

  uint32_t n_groups() const { return launch.groups[0] * launch.groups[1] * launch.groups[2]; }
  uint32_t n_threads() const { return launch.threads[0] * launch.threads[1] * launch.threads[2]; }
  const std::string& name(uint32_t dispatch) const { return names->at(dispatch - interval_start); }
};

}  // namespace lily::emulator
