// What the traced build does with each memory access of a kernel: is it allowed, is it ordered with the
// others'.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/runtime/dispatch.h"
#include "emulator/runtime/fiber.h"
#include "emulator/runtime/shadow.h"

namespace lily::emulator {

// Stands for the group of a dispatch that reads its indirect arguments.
inline constexpr uint32_t kNoGroup = ~0u;

// Sites of instructions are kept relative to this address.
const char* site_base();

// One a worker.
class Trace {
 public:
  Trace(const FiberPool& fibers, const char* arena, size_t arena_bytes);

  void begin_dispatch(Dispatch& dispatch);
  void end_dispatch();
  void begin_group() { variables_.clear(); }
  void add_variable(const char* begin, size_t bytes) { variables_.push_back({begin, begin + bytes}); }

  void access(const Thread& thread, const volatile void* address, size_t size, bool is_write, bool is_atomic,
              const void* site);

 private:
  void access_threadgroup(const Thread& thread, const char* p, size_t size, bool is_write, bool is_atomic,
                          const void* site);
  bool allow(const Thread& thread, const char* p, size_t size, bool is_write, const void* site);
  void report(const Thread& thread, Finding::Kind kind, const void* site, const std::string& what);
  void report_race(Clash found, const AccessRecord& access, const AccessRecord& other, bool is_write,
                   size_t size, const std::string& place);
  AccessRecord record(const Thread& thread, bool threadgroup_memory, bool is_atomic, const void* site) const;

  const FiberPool& fibers_;
  const char* const arena_;
  const size_t arena_bytes_;
  Dispatch* dispatch_ = nullptr;
  std::vector<ByteRange> variables_;  // of the running threadgroup
  Cells arena_cells_;

  // The range that allowed the last read (write), most of the time also the next one's.
  struct Hit {
    ByteRange range;
    const BoundMemory* memory = nullptr;
  };
  Hit hits_[2];
  uint64_t bytes_[2] = {}, traffic_[2] = {};
  std::vector<Touched> touched_;
  // Pages with none of the GPU's memory, such as the kernel's constants.
  static constexpr size_t kForeign = 16;
  uintptr_t foreign_[kForeign] = {};
};

}  // namespace lily::emulator
