#include "emulator/runtime/trace.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "emulator/runtime/memory.h"

namespace lily::emulator {

namespace {

constexpr uintptr_t kPageShift = 12;

// "binary+0x1234", which addr2line -e binary 0x1234 turns into a line of the kernel.
std::string describe_site(int32_t site) {
  const char* pc = site_base() + site;
  Dl_info info;
  if (dladdr(pc, &info) == 0 || info.dli_fbase == nullptr) return "?";
  return fmt::format("{}+{:#x}", info.dli_fname, pc - static_cast<const char*>(info.dli_fbase));
}

const char* verb(bool is_write, bool is_atomic) {
  return is_atomic ? (is_write ? "atomic update" : "atomic load") : is_write ? "write" : "read";
}

bool any_contains(const std::vector<ByteRange>& ranges, const char* p, size_t size, ByteRange& which) {
  const auto it =
      std::partition_point(ranges.begin(), ranges.end(), [&](const ByteRange& r) { return r.end <= p; });
  if (it == ranges.end() || !it->contains(p, size)) return false;
  which = *it;
  return true;
}

}  // namespace

Trace::Trace(const FiberPool& fibers, const char* arena, size_t arena_bytes)
    : fibers_(fibers), arena_(arena), arena_bytes_(arena_bytes), arena_cells_(arena_bytes) {}

void Trace::begin_dispatch(Dispatch& dispatch) {
  dispatch_ = &dispatch;
  for (Hit& hit : hits_) hit = {};
  std::fill(std::begin(foreign_), std::end(foreign_), 0);
}

void Trace::end_dispatch() {
  for (int k = 0; k < 2; ++k) {
    dispatch_->bytes[k] += std::exchange(bytes_[k], 0);
    dispatch_->traffic[k] += std::exchange(traffic_[k], 0);
  }
  if (touched_.empty()) return;
  const std::lock_guard lock(dispatch_->touched_mutex);
  dispatch_->touched.insert(dispatch_->touched.end(), touched_.begin(), touched_.end());
  touched_.clear();
}

AccessRecord Trace::record(const Thread& thread, bool threadgroup_memory, bool is_atomic,
                           const void* site) const {
  const int memory = threadgroup_memory ? 0 : 1;
  AccessRecord r;
  r.dispatch = dispatch_->serial;
  r.group = thread.group->linear_id;
  r.epoch = thread.group->epochs[memory];
  r.simd_epoch = thread.simdgroup->epochs[memory];
  r.site = static_cast<int32_t>(static_cast<const char*>(site) - site_base());
  r.thread = thread.index;
  r.simdgroup = static_cast<uint8_t>(thread.simdgroup_index);
  r.is_set = true;
  r.is_atomic = is_atomic;
  return r;
}

void Trace::access(const Thread& thread, const volatile void* address, size_t size, bool is_write,
                   bool is_atomic, const void* site) {
  const char* p = const_cast<const char*>(static_cast<const volatile char*>(address));
  if (size == 0 || fibers_.contains(p)) return;
  if (static_cast<size_t>(p - arena_) < arena_bytes_) {
    access_threadgroup(thread, p, size, is_write, is_atomic, site);
    return;
  }
  if (!hits_[is_write].range.contains(p, size) && !allow(thread, p, size, is_write, site)) return;
  const BoundMemory& memory = *hits_[is_write].memory;
  if (memory.shadow == nullptr) return;
  traffic_[is_write] += size;
  const AccessRecord access = record(thread, false, is_atomic, site);
  AccessRecord other;
  Clash found = Clash::none;
  const auto offset = static_cast<size_t>(p - memory.range.begin);
  const uint32_t n_new = memory.shadow->add(offset, size, access, is_write, !memory.immutable,
                                            dispatch_->interval_start, found, other);
  bytes_[is_write] += n_new;
  if (n_new != 0 && dispatch_->keeps_accesses && !memory.immutable)
    touched_.push_back({memory.buffer, offset, offset + size, is_write});
  if (found != Clash::none)
    report_race(found, access, other, is_write, size, fmt::format("{}+{}", memory.label, offset));
}

// Sets hits_[is_write] if the access is one that the dispatch may make.
bool Trace::allow(const Thread& thread, const char* p, size_t size, bool is_write, const void* site) {
  for (const auto& [range, name] : dispatch_->undefined_constants)
    if (range.contains(p, size))
      report(thread, Finding::Kind::undefined_constant, site, fmt::format("use of {}", name));
  const uintptr_t page = reinterpret_cast<uintptr_t>(p) >> kPageShift;
  uintptr_t& foreign = foreign_[page % kForeign];
  if (foreign == page) return false;
  for (const BoundMemory& memory : dispatch_->memory) {
    if (p < memory.range.begin || p >= memory.range.end) continue;
    ByteRange range = memory.range;
    std::optional<Finding::Kind> problem;
    if (!range.contains(p, size)) problem = Finding::Kind::out_of_bounds;
    else if (is_write && memory.immutable) problem = Finding::Kind::immutable_write;
    else if (memory.declared && !any_contains(is_write ? memory.writable : memory.readable, p, size, range))
      problem = Finding::Kind::undeclared_access;
    if (!problem) {
      hits_[is_write] = {range, &memory};
      return true;
    }
    report(thread, *problem, site,
           fmt::format("{} of {} bytes at {}+{} (length {})", verb(is_write, false), size, memory.label,
                       p - memory.range.begin, memory.range.end - memory.range.begin));
    return false;
  }
  const std::string place = describe_address(p);
  if (place.empty()) {
    foreign = page;
    return false;
  }
  report(thread, is_device_memory(p, size) ? Finding::Kind::unbound_buffer : Finding::Kind::out_of_bounds,
         site, fmt::format("{} of {} bytes at {}", verb(is_write, false), size, place));
  return false;
}

void Trace::access_threadgroup(const Thread& thread, const char* p, size_t size, bool is_write,
                               bool is_atomic, const void* site) {
  const auto variable = std::find_if(variables_.rbegin(), variables_.rend(),
                                     [&](const ByteRange& v) { return p >= v.begin && p < v.end; });
  if (variable == variables_.rend() || !variable->contains(p, size)) {
    report(thread, Finding::Kind::out_of_bounds, site,
           fmt::format("{} of {} bytes of threadgroup memory outside of its variables",
                       verb(is_write, is_atomic), size));
    return;
  }
  const AccessRecord access = record(thread, true, is_atomic, site);
  AccessRecord other;
  const Clash found = arena_cells_.add(static_cast<size_t>(p - arena_), size, access, is_write, true,
                                       dispatch_->interval_start, other);
  if (found != Clash::none)
    report_race(
        found, access, other, is_write, size,
        fmt::format("threadgroup variable {}+{}", variables_.rend() - variable - 1, p - variable->begin));
}

void Trace::report(const Thread& thread, Finding::Kind kind, const void* site, const std::string& what) {
  const auto offset = static_cast<int32_t>(static_cast<const char*>(site) - site_base());
  dispatch_->findings->add(kind, dispatch_->kernel->host_name, static_cast<uint32_t>(offset),
                           fmt::format("{} by thread {} of threadgroup {} [{}]", what, thread.index,
                                       thread.group->linear_id, describe_site(offset)));
}

void Trace::report_race(Clash found, const AccessRecord& access, const AccessRecord& other, bool is_write,
                        size_t size, const std::string& place) {
  const Finding::Kind kind = found == Clash::in_threadgroup         ? Finding::Kind::race_in_threadgroup
                             : found == Clash::between_threadgroups ? Finding::Kind::race_between_threadgroups
                                                                    : Finding::Kind::missing_dispatch_barrier;
  const auto who = [&](const AccessRecord& r) {
    // Indirect arguments are read by the dispatch itself.
    const std::string thread = r.group == kNoGroup
                                   ? "the dispatch's arguments"
                                   : fmt::format("thread {} of threadgroup {}", r.thread, r.group);
    return fmt::format("{} in {} (dispatch {}) [{}]", thread, dispatch_->name(r.dispatch), r.dispatch,
                       describe_site(r.site));
  };
  dispatch_->findings->add(
      kind, dispatch_->kernel->host_name, static_cast<uint32_t>(access.site),
      fmt::format("{} of {} bytes at {} by {}, against {}", verb(is_write, access.is_atomic), size, place,
                  who(access), who(other)));
}

}  // namespace lily::emulator
