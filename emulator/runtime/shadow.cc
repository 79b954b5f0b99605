#include "emulator/runtime/shadow.h"

#include <algorithm>
#include <bit>

namespace lily::emulator {

namespace {

bool same_thread(const AccessRecord& a, const AccessRecord& b) {
  return a.dispatch == b.dispatch && a.group == b.group && a.thread == b.thread;
}

}  // namespace

Clash clash(const AccessRecord& older, const AccessRecord& newer, bool threadgroup_memory,
            uint32_t interval_start) {
  if (!older.is_set || (older.is_atomic && newer.is_atomic)) return Clash::none;
  const bool same_dispatch = older.dispatch == newer.dispatch;
  if (threadgroup_memory && (!same_dispatch || older.group != newer.group)) return Clash::none;
  if (!same_dispatch) return older.dispatch >= interval_start ? Clash::between_dispatches : Clash::none;
  if (older.group != newer.group) return Clash::between_threadgroups;
  if (older.thread == newer.thread || older.epoch != newer.epoch) return Clash::none;
  if (older.simdgroup == newer.simdgroup && older.simd_epoch != newer.simd_epoch) return Clash::none;
  return Clash::in_threadgroup;
}

Clash Cell::add(const AccessRecord& access, bool is_write, bool threadgroup_memory, uint32_t interval_start,
                AccessRecord& other) {
  // Loops touch the same place again and again.
  if (is_write ? writer == access : readers[0] == access) return Clash::none;
  Clash found = clash(writer, access, threadgroup_memory, interval_start);
  if (found != Clash::none) other = writer;
  if (is_write) {
    for (const AccessRecord& reader : readers) {
      if (found != Clash::none) break;
      found = clash(reader, access, threadgroup_memory, interval_start);
      if (found != Clash::none) other = reader;
    }
    writer = access;
    return found;
  }
  AccessRecord& latest = readers[0];
  if (latest.is_set && !same_thread(latest, access)) {
    if (latest.dispatch != access.dispatch || latest.group != access.group) readers[3] = latest;
    else if (latest.simdgroup != access.simdgroup) readers[2] = latest;
    else readers[1] = latest;
  }
  latest = access;
  return found;
}

Clash Cells::add(size_t offset, size_t size, const AccessRecord& access, bool is_write,
                 bool threadgroup_memory, uint32_t interval_start, AccessRecord& other) {
  if (cells_.empty()) cells_.resize(bytes_ >> shift_);
  const auto shift = static_cast<unsigned>(std::countr_zero(offset | size | 4));
  if (shift < shift_) split(shift);
  for (size_t i = offset >> shift_; i < (offset + size) >> shift_; ++i) {
    const Clash found = cells_[i].add(access, is_write, threadgroup_memory, interval_start, other);
    if (found != Clash::none) return found;
  }
  return Clash::none;
}

void Cells::split(unsigned shift) {
  std::vector<Cell> finer(bytes_ >> shift);
  for (size_t i = 0; i < finer.size(); ++i) finer[i] = cells_[i >> (shift_ - shift)];
  cells_ = std::move(finer);
  shift_ = shift;
}

BufferShadow::BufferShadow(size_t length) : pages_((length + kPageBytes - 1) / kPageBytes) {}

BufferShadow::~BufferShadow() {
  for (auto& page : pages_) delete page.load();
}

BufferShadow::Page& BufferShadow::page(size_t index) {
  Page* page = pages_[index].load(std::memory_order_acquire);
  if (page != nullptr) return *page;
  auto fresh = std::make_unique<Page>();
  if (pages_[index].compare_exchange_strong(page, fresh.get(), std::memory_order_acq_rel))
    return *fresh.release();
  return *page;
}

uint32_t BufferShadow::add(size_t offset, size_t size, const AccessRecord& access, bool is_write, bool races,
                           uint32_t interval_start, Clash& found, AccessRecord& other) {
  uint32_t n_new = 0;
  while (size != 0) {
    const size_t within = offset % kPageBytes;
    const size_t part = std::min(size, kPageBytes - within);
    Page& p = page(offset / kPageBytes);
    while (p.busy.test_and_set(std::memory_order_acquire)) {
    }
    for (size_t at = within; at < within + part;) {
      uint32_t& touched = p.touched[is_write][at / 4];
      if (touched >> 4 != (access.dispatch & 0x0fffffff)) touched = access.dispatch << 4;
      const size_t first = at % 4, n = std::min<size_t>(4 - first, within + part - at);
      const uint32_t bytes = ((1u << n) - 1) << first;
      n_new += static_cast<uint32_t>(std::popcount(bytes & ~touched));
      touched |= bytes;
      at += n;
    }
    if (races && found == Clash::none)
      found = p.cells.add(within, part, access, is_write, false, interval_start, other);
    p.busy.clear(std::memory_order_release);
    offset += part;
    size -= part;
  }
  return n_new;
}

}  // namespace lily::emulator
