// The description of all endpoints in OpenAPI 3.1, as GET /openapi.json gives it.
#pragma once

#include <string_view>

namespace lily::server {

std::string_view openapi_json();

}  // namespace lily::server
