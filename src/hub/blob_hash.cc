#include "hub/blob_hash.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>
#include <vector>

#include "base/file.h"

namespace lily::hub {

Sha1::Sha1() : BlockHash({0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0}) {}

void Sha1::mix(const std::array<uint32_t, 16>& words) {
  std::array<uint32_t, 80> w;
  std::copy(words.begin(), words.end(), w.begin());
  for (size_t i = 16; i < 80; ++i) w[i] = std::rotl(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
  auto [a, b, c, d, e] = state_;
  for (size_t i = 0; i < 80; ++i) {
    uint32_t mixed = 0;
    if (i < 20) mixed = ((b & c) | (~b & d)) + 0x5a827999;
    else if (i < 40) mixed = (b ^ c ^ d) + 0x6ed9eba1;
    else if (i < 60) mixed = ((b & c) | (b & d) | (c & d)) + 0x8f1bbcdc;
    else mixed = (b ^ c ^ d) + 0xca62c1d6;
    const uint32_t next = std::rotl(a, 5) + mixed + e + w[i];
    e = d, d = c, c = std::rotl(b, 30), b = a, a = next;
  }
  const std::array<uint32_t, 5> sum = {a, b, c, d, e};
  for (size_t i = 0; i < 5; ++i) state_[i] += sum[i];
}

namespace {

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace

bool is_blob_id(std::string_view id) { return (id.size() == 64 || id.size() == 40) && is_hex(id); }
bool is_commit(std::string_view text) { return text.size() == 40 && is_hex(text); }

BlobHash::BlobHash(std::string_view like, uint64_t n_bytes) {
  if (like.size() == 64) sha256_.emplace();
  else sha1_.update(fmt::format("blob {}", n_bytes) + '\0');
}

void BlobHash::update(std::string_view bytes) {
  if (sha256_) sha256_->update(bytes);
  else sha1_.update(bytes);
}

std::string BlobHash::finish_hex() { return sha256_ ? sha256_->finish_hex() : sha1_.finish_hex(); }

std::string blob_hash_of(std::string_view like, std::string_view bytes) {
  BlobHash hash(like, bytes.size());
  hash.update(bytes);
  return hash.finish_hex();
}

std::optional<std::string> blob_hash_of_file(std::string_view like, const std::filesystem::path& path,
                                             const std::function<bool(uint64_t)>& on_bytes) {
  const File file = File::open(path);
  file.expect_one_pass();
  BlobHash hash(like, file.size());
  std::vector<std::byte> buffer(size_t{1} << 20);
  for (uint64_t at = 0; at < file.size();) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(buffer.size(), file.size() - at));
    file.read_at(at, std::span(buffer).first(n));
    hash.update({reinterpret_cast<const char*>(buffer.data()), n});
    at += n;
    if (!on_bytes(n)) return std::nullopt;
  }
  return hash.finish_hex();
}

}  // namespace lily::hub
