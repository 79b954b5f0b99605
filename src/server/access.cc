#include "server/access.h"

#include "base/ascii.h"

namespace lily::server {

bool is_loopback(const std::string& host) {
  const std::string name = ascii_lower(host);
  const bool is_address = name.find_first_not_of("0123456789.") == std::string::npos;
  return name == "localhost" || name == "::1" || name == "[::1]" || (is_address && name.starts_with("127."));
}

std::string authority_of(const std::string& origin) {
  const size_t at = origin.find("://");
  return at == std::string::npos ? origin : origin.substr(at + 3);
}

std::string host_of(const std::string& authority) {
  if (authority.starts_with('[')) return authority.substr(1, authority.find(']') - 1);
  return authority.substr(0, authority.find(':'));
}

bool is_same_key(const std::string& given, const std::string& wanted) {
  if (wanted.empty()) return given.empty();
  size_t difference = given.size() ^ wanted.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i] ^ wanted[i % wanted.size()]);
  return difference == 0;
}

}  // namespace lily::server
