#include "base/page_block.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace lily {

PageBlock::PageBlock(size_t n_bytes) {
  if (n_bytes > std::numeric_limits<size_t>::max() - kAlignment)
    fail(Fault::device, "{} bytes of memory are more than an address can reach", n_bytes);
  const size_t size = (n_bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (size == 0) return;
  // The kernel aligns a large mapping to huge pages by itself only since Linux 6.7, so take more and cut it.
#if defined(__linux__)
  constexpr size_t kHuge = size_t{2} << 20;
#else
  constexpr size_t kHuge = kAlignment;
#endif
  const size_t alignment = size >= kHuge ? kHuge : kAlignment;
  void* mapped = ::mmap(nullptr, size + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (mapped == MAP_FAILED)
    fail(Fault::device, "{} bytes of memory were refused: {}", size, std::generic_category().message(errno));
  auto* const begin = static_cast<std::byte*>(mapped);
  const size_t head = (alignment - reinterpret_cast<uintptr_t>(begin) % alignment) % alignment;
  if (head > 0) ::munmap(begin, head);
  ::munmap(begin + head + size, alignment - head);
  data_ = begin + head;
  size_ = size;
#if defined(__linux__)
  ::madvise(data_, size_, MADV_HUGEPAGE);  // a hint: 4 KiB pages cost about 7 % of the read rate
#endif
}

PageBlock::PageBlock(PageBlock&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      has_gaps_(std::exchange(other.has_gaps_, false)) {}

PageBlock& PageBlock::operator=(PageBlock&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(has_gaps_, other.has_gaps_);
  return *this;
}

PageBlock::~PageBlock() {
  if (data_) ::munmap(data_, size_);
}

void PageBlock::give_back(size_t at, size_t n_bytes) {
  LILY_CHECK(at <= size_ && n_bytes <= size_ - at, "{} bytes at {} of {}", n_bytes, at, size_);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t first = (at + page - 1) / page * page, end = (at + n_bytes) / page * page;
  if (first >= end) return;
#if defined(__linux__)
  // Or the system would fill the gaps again by making huge pages of what is left.
  if (!has_gaps_) ::madvise(data_, size_, MADV_NOHUGEPAGE);
  ::madvise(data_ + first, end - first, MADV_DONTNEED);
#else
  // A hint would be followed only when memory is short, and counted as ours until then. Where it fails, the
  // old pages stay.
  ::mmap(data_ + first, end - first, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0);
#endif
  has_gaps_ = true;
}

}  // namespace lily
