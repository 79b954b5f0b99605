// Headers of a request, one a line, "Name: value": what framing_of() makes of their lengths and encodings
// must be what a reader that takes RFC 9112 at its word makes of them, or nothing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ascii.h"
#include "base/error.h"
#include "server/framing.h"

namespace {

using namespace lily;
using namespace lily::server;

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

std::string without_zeros(const std::string& digits) {
  const size_t first = digits.find_first_not_of('0');
  return first == std::string::npos ? "0" : digits.substr(first);
}

void check(const std::vector<std::string>& lengths, const std::vector<std::string>& encodings) {
  const std::optional<Framing> framing = framing_of(lengths, encodings);
  if (!framing) return;
  LILY_CHECK(lengths.empty() || encodings.empty(), "a length and an encoding");
  LILY_CHECK(framing->is_chunked == !encodings.empty());
  for (const std::string& encoding : encodings) LILY_CHECK(ascii_lower(encoding) == "chunked");
  for (const std::string& length : lengths)
    LILY_CHECK(is_number(length) && without_zeros(length) == std::to_string(framing->length), "{}", length);
  LILY_CHECK(framing->has_body() == (framing->is_chunked || framing->length > 0));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view head(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> lengths, encodings;
  while (!head.empty()) {
    const std::string_view line = head.substr(0, head.find('\n'));
    head.remove_prefix(std::min(line.size() + 1, head.size()));
    const size_t colon = line.find(": ");
    if (colon == std::string_view::npos) continue;
    const std::string_view name = line.substr(0, colon);
    if (is_header_name(name))
      for (const char c : name) LILY_CHECK(c > ' ' && c < '\x7f' && c != ':', "in a name: {}", int{c});
    const std::string value(line.substr(colon + 2));
    if (ascii_lower(std::string(name)) == "content-length") lengths.push_back(value);
    if (ascii_lower(std::string(name)) == "transfer-encoding") encodings.push_back(value);
  }
  check(lengths, encodings);
  return 0;
}
