// The two names the hub gives to content: SHA-256 for large files, and for small ones the id of their git
// object, which is the SHA-1 of "blob SIZE", a zero byte and the content.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/block_hash.h"
#include "base/sha256.h"

namespace lily::hub {

class Sha1 : public BlockHash<Sha1, 5> {
 public:
  Sha1();

 private:
  friend BlockHash;
  void mix(const std::array<uint32_t, 16>& words);
};

// Whether this is the name of a blob: 64 or 40 lower-case hexadecimal digits. A name that passes is a safe
// file name.
bool is_blob_id(std::string_view id);
bool is_commit(std::string_view text);  // 40 of them

// The name that content of this size has, in the form that `like` has.
class BlobHash {
 public:
  BlobHash(std::string_view like, uint64_t n_bytes);
  void update(std::string_view bytes);
  std::string finish_hex();

 private:
  std::optional<Sha256> sha256_;
  Sha1 sha1_;
};

std::string blob_hash_of(std::string_view like, std::string_view bytes);

// Of a file's content; nothing if `on_bytes` (called after each piece, with its length) returned false.
std::optional<std::string> blob_hash_of_file(std::string_view like, const std::filesystem::path& path,
                                             const std::function<bool(uint64_t)>& on_bytes);

}  // namespace lily::hub
