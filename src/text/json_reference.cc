#include "text/json_reference.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace lily::text {
namespace {

using nlohmann::ordered_json;

int digit_of(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                : -1;
}

std::string unescaped(std::string_view step) {
  std::string key;
  for (size_t i = 0; i < step.size(); ++i) {
    const bool is_code =
        step[i] == '%' && i + 2 < step.size() && digit_of(step[i + 1]) >= 0 && digit_of(step[i + 2]) >= 0;
    key += is_code ? static_cast<char>(digit_of(step[i + 1]) * 16 + digit_of(step[i + 2])) : step[i];
    if (is_code) i += 2;
  }
  for (size_t i = 0; (i = key.find('~', i)) != std::string::npos; ++i)
    key.replace(i, std::min<size_t>(2, key.size() - i), key.compare(i, 2, "~1") == 0 ? "/" : "~");
  return key;
}

const ordered_json* element(const ordered_json& list, const std::string& key) {
  const bool is_index = !key.empty() && key.size() < 7 &&
                        std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!is_index || std::stoul(key) >= list.size()) return nullptr;
  return &list[std::stoul(key)];
}

}  // namespace

bool is_local_reference(std::string_view reference) {
  return reference.starts_with('#') && (reference.size() == 1 || reference[1] == '/');
}

const ordered_json* resolve_reference(const ordered_json& root, std::string_view reference) {
  if (!is_local_reference(reference)) return nullptr;
  const ordered_json* at = &root;
  for (size_t i = 1; at != nullptr && i < reference.size();) {
    const size_t end = std::min(reference.find('/', i + 1), reference.size());
    const std::string key = unescaped(reference.substr(i + 1, end - i - 1));
    if (at->is_object()) {
      const auto found = at->find(key);
      at = found == at->end() ? nullptr : &*found;
    } else {
      at = at->is_array() ? element(*at, key) : nullptr;
    }
    i = end;
  }
  return at;
}

}  // namespace lily::text
