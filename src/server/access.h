// Who may call the server: names of this machine, keys, and where a browser page comes from.
#pragma once

#include <string>

namespace lily::server {

// Names and addresses of this machine that no other can reach. A name that only looks like an address of it
// (127.example.org) is none: whoever owns it says where it points.
bool is_loopback(const std::string& host);

// "http://localhost:8080" -> "localhost:8080"
std::string authority_of(const std::string& origin);
// "localhost:8080" -> "localhost", "[::1]:8080" -> "::1"
std::string host_of(const std::string& authority);

// In time that does not depend on how much of the key is right.
bool is_same_key(const std::string& given, const std::string& wanted);

}  // namespace lily::server
