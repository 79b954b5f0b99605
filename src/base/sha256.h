// SHA-256, for telling known files apart and for checking downloads.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/block_hash.h"

namespace lily {

class Sha256 : public BlockHash<Sha256, 8> {
 public:
  Sha256();

 private:
  friend BlockHash;
  void mix(const std::array<uint32_t, 16>& words);
};

std::string sha256_hex(std::string_view bytes);

}  // namespace lily
