// Memory straight from the system, for weights: page-aligned, huge pages where they are granted, and returned
// at once.
#pragma once

#include <cstddef>

namespace lily {

class PageBlock {
 public:
  PageBlock() = default;
  // Zeroed memory of at least n_bytes, whole pages; touched, and so paid for, only when it is written. Throws
  // Fault::device if the system has none.
  explicit PageBlock(size_t n_bytes);
  PageBlock(PageBlock&& other) noexcept;
  PageBlock& operator=(PageBlock&& other) noexcept;
  PageBlock(const PageBlock&) = delete;
  PageBlock& operator=(const PageBlock&) = delete;
  ~PageBlock();

  // The whole pages among these bytes go back to the system; they are zero when they are read again.
  void give_back(size_t at, size_t n_bytes);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }  // a multiple of kAlignment

  // Apple's page, a multiple of all others; Metal wants both ends of a shared buffer on one.
  static constexpr size_t kAlignment = 16384;

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool has_gaps_ = false;  // something was given back
};

}  // namespace lily
