#include "text/json_text.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"
#include "text/json_builder.h"

namespace lily::text {
namespace {

void append_float(double value, std::string& out) {
  if (std::isnan(value)) {
    out += "NaN";
  } else if (std::isinf(value)) {
    out += value > 0 ? "Infinity" : "-Infinity";
  } else {
    // The shortest digits that read back alike, with an exponent below 1e-4 and from 1e16 on, as in Python;
    // only the
    // ".0" of whole numbers is missing.
    const size_t begin = out.size();
    fmt::format_to(std::back_inserter(out), "{}", value);
    if (out.find_first_of(".e", begin) == std::string::npos) out += ".0";
  }
}

void append_scalar(const ordered_json& value, std::string& out) {
  switch (value.type()) {
    case ordered_json::value_t::null:
      out += "null";
      break;
    case ordered_json::value_t::boolean:
      out += value.get<bool>() ? "true" : "false";
      break;
    case ordered_json::value_t::number_integer:
      out += std::to_string(value.get<int64_t>());
      break;
    case ordered_json::value_t::number_unsigned:
      out += std::to_string(value.get<uint64_t>());
      break;
    case ordered_json::value_t::number_float:
      append_float(value.get<double>(), out);
      break;
    case ordered_json::value_t::string:
      out += '"';
      escape_json_append(value.get_ref<const std::string&>(), out);
      out += '"';
      break;
    case ordered_json::value_t::binary: {
      const auto& digits = value.get_binary();
      out.append(digits.begin(), digits.end());
      break;
    }
    default:
      LILY_CHECK(false, "JSON value of type {}", value.type_name());
  }
}

}  // namespace

std::optional<ordered_json> parse_json(std::string_view text, size_t max_depth) {
  JsonBuilder builder(max_depth);
  if (!builder.read(text)) return std::nullopt;
  return std::move(builder.document);
}

void escape_json_append(std::string_view text, std::string& out) {
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20)
          fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<int>(c));
        else out += c;
    }
  }
}

void dump_json_append(const ordered_json& value, std::string& out) {
  struct Level {
    ordered_json::const_iterator next, end;
    bool is_object, is_first;
  };
  std::vector<Level> levels;
  const auto begin = [&](const ordered_json& item) {
    if (!item.is_structured()) return append_scalar(item, out);
    out += item.is_object() ? '{' : '[';
    levels.push_back({item.begin(), item.end(), item.is_object(), true});
  };
  begin(value);
  while (!levels.empty()) {
    Level& level = levels.back();
    if (level.next == level.end) {
      out += level.is_object ? '}' : ']';
      levels.pop_back();
      continue;
    }
    if (!level.is_first) out += ", ";
    level.is_first = false;
    const auto item = level.next++;
    if (level.is_object) {
      out += '"';
      escape_json_append(item.key(), out);
      out += "\": ";
    }
    begin(*item);
  }
}

std::string dump_json(const ordered_json& value) {
  std::string out;
  dump_json_append(value, out);
  return out;
}

}  // namespace lily::text
