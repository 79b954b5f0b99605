// Text from the content parts of requests: strings, null, or lists of {"type": "text", "text"} and its kin.
#pragma once

#include <string>

#include "server/body.h"

namespace lily::server {

// The text of one part; a 400 that names `path` for anything but text.
std::string part_text(const Json& part, const std::string& path);
// Of a string, of null (none) or of a list of parts, joined.
std::string content_text(const Json* content, const std::string& path);

}  // namespace lily::server
