#include "base/page_block.h"

#include <sys/mman.h>

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
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PageBlock& PageBlock::operator=(PageBlock&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PageBlock::~PageBlock() {
  if (data_) ::munmap(data_, size_);
}

}  // namespace lily
