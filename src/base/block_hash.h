// What SHA-1 and SHA-256 have in common: blocks of 64 bytes, 32-bit words with the high byte first, and an
// end that tells the length.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace lily {

// `Hash` has mix(words), which brings a block of 16 words into state_, and starts with the state it hands
// over.
template <typename Hash, size_t n_state_words>
class BlockHash {
 public:
  void update(std::string_view bytes) {
    while (!bytes.empty()) {
      const size_t filled = n_bytes_ % 64, n = std::min(bytes.size(), 64 - filled);
      std::memcpy(buffer_.data() + filled, bytes.data(), n);
      n_bytes_ += n;
      bytes.remove_prefix(n);
      if (filled + n == 64) static_cast<Hash*>(this)->mix(words());
    }
  }
  // Lower-case hexadecimal digits, eight a word of the state. Ends the computation: nothing may be added
  // afterwards.
  std::string finish_hex() {
    const uint64_t n_bits = 8 * n_bytes_;
    update("\x80");
    while (n_bytes_ % 64 != 56) update(std::string_view("\0", 1));
    std::string length;
    for (int shift = 56; shift >= 0; shift -= 8) length.push_back(static_cast<char>(n_bits >> shift));
    update(length);
    std::string hex;
    for (const uint32_t word : state_) hex += fmt::format("{:08x}", word);
    return hex;
  }

 protected:
  std::array<uint32_t, n_state_words> state_;

 private:
  friend Hash;  // no other class may call itself its base
  explicit BlockHash(const std::array<uint32_t, n_state_words>& state) : state_(state) {}
  std::array<uint32_t, 16> words() const {
    std::array<uint32_t, 16> w;
    for (size_t i = 0; i < 16; ++i)
      w[i] = static_cast<uint32_t>(buffer_[4 * i]) << 24 | static_cast<uint32_t>(buffer_[4 * i + 1]) << 16 |
             static_cast<uint32_t>(buffer_[4 * i + 2]) << 8 | buffer_[4 * i + 3];
    return w;
  }

  std::array<uint8_t, 64> buffer_{};
  uint64_t n_bytes_ = 0;
};

}  // namespace lily
