// Where the body of a request ends, by what its head says (RFC 9112, 6.3). Strictly: what can be read in two
// ways is refused, since a proxy in front of this server might read it in the other one, and take the rest of
// one request for the beginning of another (request smuggling).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lily::server {

struct Framing {
  bool is_chunked = false;
  uint64_t length = 0;  // bytes, where it is not chunked
  bool has_body() const { return is_chunked || length > 0; }
};

// `lengths`, `encodings`: the values of all Content-Length and Transfer-Encoding headers. Nothing where they
// contradict one another, or are no length and not "chunked".
std::optional<Framing> framing_of(const std::vector<std::string>& lengths,
                                  const std::vector<std::string>& encodings);

// Letters, digits and the like; a space before the colon, or at the start of a line that continues another
// one, hides a header from some readers and shows it to others.
bool is_header_name(std::string_view name);

}  // namespace lily::server
