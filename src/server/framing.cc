#include "server/framing.h"

#include <algorithm>
#include <charconv>

#include "base/ascii.h"

namespace lily::server {
namespace {

std::optional<uint64_t> length_of(const std::string& digits) {
  uint64_t length = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), length);
  if (error != std::errc() || end != digits.data() + digits.size()) return {};
  return length;
}

}  // namespace

bool is_header_name(std::string_view name) {
  constexpr std::string_view kSeparators = "\"(),/:;<=>?@[\\]{}";
  return !name.empty() && std::all_of(name.begin(), name.end(), [&](char c) {
    return c > ' ' && c <= '~' && kSeparators.find(c) == kSeparators.npos;
  });
}

std::optional<Framing> framing_of(const std::vector<std::string>& lengths,
                                  const std::vector<std::string>& encodings) {
  if (!encodings.empty()) {
    if (encodings.size() > 1 || !lengths.empty() || ascii_lower(encodings[0]) != "chunked") return {};
    return Framing{.is_chunked = true};
  }
  if (lengths.empty()) return Framing{};
  for (const std::string& other : lengths)
    if (other != lengths[0]) return {};
  const auto length = length_of(lengths[0]);
  if (!length) return {};
  return Framing{.length = *length};
}

}  // namespace lily::server
