#include "emulator/device/host_order.h"

#include <fmt/format.h>

#include "emulator/device/objects.h"

namespace lily::emulator {

bool BufferUseRange::overlaps(size_t from, size_t to) const {
  if (stride == 0 || from < end) return from < end && begin < to;
  const size_t i = (from - end) / stride + 1;  // the first range that ends behind `from`
  return i < count && begin + i * stride < to;
}

void HostOrder::committed(uint64_t sequence, std::vector<BufferUseRange> uses) {
  const std::lock_guard lock(mutex_);
  in_flight_.push_back({sequence, std::move(uses)});
}

void HostOrder::learnt_of(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty() && in_flight_.front().sequence <= sequence) in_flight_.pop_front();
}

void HostOrder::check(const EmulatedBuffer& buffer, size_t begin, size_t end, CpuAccess access) {
  static constexpr const char* kVerbs[] = {"reads", "writes", "destroys"};
  const std::lock_guard lock(mutex_);
  for (const InFlight& f : in_flight_)
    for (const BufferUseRange& use : f.uses) {
      if (use.buffer != &buffer || !use.overlaps(begin, end)) continue;
      if (access == CpuAccess::read && !use.written) continue;
      findings_.add(Finding::Kind::host_race, "", reinterpret_cast<uintptr_t>(&buffer),
                    fmt::format("CPU {} {} [{}, {}), which command buffer {} {}; wait for its event first",
                                kVerbs[static_cast<int>(access)], buffer.label(), begin, end, f.sequence,
                                use.written ? "writes" : "reads"));
      return;
    }
}

}  // namespace lily::emulator
