#include "text/json_text.h"

#include <fmt/format.h>

#include <cmath>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lily::text {
namespace {

constexpr uint8_t kBigInteger = 1;  // subtype of the binary value that holds an integer's digits

// Builds the document bottom up without recursion. The library's own builder looks for each key among all
// keys of its object, which is quadratic.
class Builder final : public nlohmann::json_sax<ordered_json> {
 public:
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& text) override {
    if (text.find_first_of(".eE") != std::string::npos) return add(value);
    return add(ordered_json::binary({text.begin(), text.end()}, kBigInteger));
  }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool key(string_t& name) override {
    open_.back().key = std::move(name);
    return true;
  }
  bool start_object(size_t) override { return open(ordered_json::object()); }
  bool start_array(size_t) override { return open(ordered_json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

  ordered_json document;

 private:
  struct Open {
    ordered_json value;
    std::string key;
    std::unordered_map<std::string, size_t> index_of;  // of keys, for objects
  };

  bool open(ordered_json value) {
    open_.push_back({std::move(value), {}, {}});
    return true;
  }
  bool close() {
    ordered_json value = std::move(open_.back().value);
    open_.pop_back();
    return add(std::move(value));
  }
  bool add(ordered_json value) {
    if (open_.empty()) {
      document = std::move(value);
      return true;
    }
    Open& parent = open_.back();
    if (parent.value.is_array()) {
      parent.value.push_back(std::move(value));
      return true;
    }
    auto& members = parent.value.get_ref<ordered_json::object_t&>();  // a vector of pairs
    const auto [at, is_new] = parent.index_of.emplace(parent.key, members.size());
    if (is_new) members.emplace_back(parent.key, std::move(value));
    else members.begin()[static_cast<ptrdiff_t>(at->second)].second = std::move(value);
    return true;
  }

  std::vector<Open> open_;
};

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

std::optional<ordered_json> parse_json(std::string_view text) {
  Builder builder;
  if (!ordered_json::sax_parse(text.begin(), text.end(), &builder)) return std::nullopt;
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
