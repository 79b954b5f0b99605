// What the CPU may touch: which command buffers are in flight, and what they use.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "emulator/runtime/findings.h"

namespace lily::emulator {

class EmulatedBuffer;

struct BufferUseRange {
  const EmulatedBuffer* buffer;
  size_t begin, end;  // of the first range
  bool written;
  size_t stride = 0, count = 1;  // of metal::Access

  bool overlaps(size_t from, size_t to) const;
};

// A command buffer is in flight from its commit until the CPU has learnt of its end: by waiting for an event
// that it or a later one signalled, or for its completion. That it has ended meanwhile does not help. Any
// thread.
class HostOrder {
 public:
  explicit HostOrder(Findings& findings) : findings_(findings) {}

  void committed(uint64_t sequence, std::vector<BufferUseRange> uses);
  void learnt_of(uint64_t sequence);  // this one and all before it have ended
  // Lists a finding if a command buffer in flight writes the range or, unless the CPU only reads, uses it.
  enum class CpuAccess : uint8_t { read, write, destroy };
  void check(const EmulatedBuffer& buffer, size_t begin, size_t end, CpuAccess access);

 private:
  struct InFlight {
    uint64_t sequence;
    std::vector<BufferUseRange> uses;
  };
  Findings& findings_;
  std::mutex mutex_;
  std::deque<InFlight> in_flight_;
};

}  // namespace lily::emulator
