// Who touched a piece of memory last: the race detector's memory of accesses.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace lily::emulator {

// One access. Numbers grow: dispatches with the order of encoding, epochs with the barriers that the thread
// passed.
struct AccessRecord {
  uint32_t dispatch = 0;
  uint32_t group = 0;
  uint32_t epoch = 0;       // threadgroup_barriers that ordered this kind of memory
  uint32_t simd_epoch = 0;  // simdgroup_barriers that did
  int32_t site = 0;         // of the instruction, relative to site_base()
  uint16_t thread = 0;
  uint8_t simdgroup = 0;
  bool is_set : 1 = false, is_atomic : 1 = false;

  bool operator==(const AccessRecord&) const = default;
};
static_assert(sizeof(AccessRecord) == 24);

enum class Clash : uint8_t { none, in_threadgroup, between_threadgroups, between_dispatches };

// What orders two accesses, one of them a write. `interval_start` is the first dispatch after the last memory
// barrier. Threadgroup memory lives for one threadgroup of one dispatch.
Clash clash(const AccessRecord& older, const AccessRecord& newer, bool threadgroup_memory,
            uint32_t interval_start);

// The last write, and those reads of which at least one clashes with a later write if any read does: the
// latest of all, and the latest by another thread of its simdgroup, another simdgroup of its threadgroup,
// another threadgroup.
struct Cell {
  AccessRecord writer;
  AccessRecord readers[4];

  // The clash of a new access, with the older one; then the access is recorded. Accesses by one thread do not
  // clash.
  Clash add(const AccessRecord& access, bool is_write, bool threadgroup_memory, uint32_t interval_start,
            AccessRecord& other);
};

// Cells for some memory, one for 4, 2 or 1 bytes: split when a smaller access comes.
class Cells {
 public:
  explicit Cells(size_t bytes) : bytes_(bytes) {}
  // Accesses [offset, offset + size); stops at the first clash.
  Clash add(size_t offset, size_t size, const AccessRecord& access, bool is_write, bool threadgroup_memory,
            uint32_t interval_start, AccessRecord& other);

 private:
  void split(unsigned shift);

  size_t bytes_;
  unsigned shift_ = 2;
  std::vector<Cell> cells_;  // empty until first used
};

// Shadow of a buffer, by pages that exist once touched. Any thread.
class BufferShadow {
 public:
  explicit BufferShadow(size_t length);
  ~BufferShadow();
  BufferShadow(const BufferShadow&) = delete;
  BufferShadow& operator=(const BufferShadow&) = delete;

  // Returns how many of the bytes this dispatch had not yet read (written). `races`: look for them too.
  uint32_t add(size_t offset, size_t size, const AccessRecord& access, bool is_write, bool races,
               uint32_t interval_start, Clash& found, AccessRecord& other);

 private:
  static constexpr size_t kPageBytes = 4096;
  struct Page {
    std::atomic_flag busy = ATOMIC_FLAG_INIT;
    Cells cells{kPageBytes};
    // For each 4 bytes: the dispatch that touched them last (upper 28 bits) and which of them (lower 4).
    uint32_t touched[2][kPageBytes / 4] = {};  // reads, writes
  };
  Page& page(size_t index);

  std::vector<std::atomic<Page*>> pages_;
};

}  // namespace lily::emulator
