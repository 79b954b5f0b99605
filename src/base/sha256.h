// SHA-256, for telling known files apart and for checking downloads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lily {

class Sha256 {
 public:
  void update(std::string_view bytes);
  // 64 lower-case hexadecimal digits. Ends the computation: nothing may be added afterwards.
  std::string finish_hex();

 private:
  void block(const uint8_t* bytes);  // 64 of them

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> buffer_{};
  uint64_t n_bytes_ = 0;
};

std::string sha256_hex(std::string_view bytes);

}  // namespace lily
