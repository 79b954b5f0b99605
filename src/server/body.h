// A JSON object of a request, read field by field. Each error is a 400 that names the field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "server/api_error.h"

namespace lily::server {

using Json = nlohmann::ordered_json;

inline constexpr int kMaxRequestDepth = 64;  // of nested objects and arrays

// Strict UTF-8, at most kMaxRequestDepth deep, each key once in its object; the text is not repeated in
// errors. Integers beyond 64 bits are kept as text::parse_json keeps them, so that tools are rendered as they
// came.
Json parse_json(std::string_view text);
// Never throws: what is no UTF-8 becomes U+FFFD.
std::string to_text(const Json& json);
// With numbers that every JSON writer knows, for what is echoed to a client.
Json plain_numbers(const Json& json);

class Body {
 public:
  // `path` is put before the names of fields in errors: "reasoning."
  explicit Body(const Json& object, std::string path = "");

  // Null where the field is absent or null.
  const Json* find(const char* name);
  bool boolean(const char* name, bool otherwise);
  std::optional<int64_t> integer(const char* name, int64_t least, int64_t most);
  std::optional<double> number(const char* name, double least, double most);
  std::optional<std::string> text(const char* name);
  std::optional<Body> object(const char* name);
  const Json* array(const char* name);

  // 400 if the field is there (and neither null nor `harmless`).
  void refuse(const char* name, const char* why, const Json& harmless = nullptr);
  [[noreturn]] void fail(const char* name, const std::string& message) const;
  // Paths of the fields that nobody has asked for.
  std::vector<std::string> unknown() const;
  std::string path_of(const char* name) const { return path_ + name; }

 private:
  const Json& object_;
  std::string path_;
  std::set<std::string, std::less<>> seen_;
};

}  // namespace lily::server
