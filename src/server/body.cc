#include "server/body.h"

#include <cmath>
#include <cstdlib>
#include <utility>

#include "base/printable.h"
#include "text/json_builder.h"

namespace lily::server {
namespace {

std::string shown(const Json& value) {
  constexpr size_t kMost = 60;
  if (value.is_binary()) return "an integer of more than 64 bits";
  if (value.is_structured()) return value.is_object() ? "an object" : "an array";
  std::string text = to_text(value);
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

// Refuses what text::JsonBuilder would take: depth, and equal keys.
class Builder final : public text::JsonBuilder {
 public:
  bool key(string_t& name) override {
    if (open_.back().index_of.contains(name)) {
      const std::string at = path(name);
      throw ApiError::bad_field(at, fmt::format("{}: the key appears twice in one object", printable(at)));
    }
    return JsonBuilder::key(name);
  }
  bool start_object(size_t n) override {
    check_depth();
    return JsonBuilder::start_object(n);
  }
  bool start_array(size_t n) override {
    check_depth();
    return JsonBuilder::start_array(n);
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    if (dynamic_cast<const nlohmann::json::out_of_range*>(&error) != nullptr)
      throw ApiError::bad_request("the body is not valid JSON: a number is out of range");
    throw ApiError::bad_request(fmt::format("the body is not valid JSON: error at byte {}", position));
  }

 private:
  void check_depth() const {
    if (open_.size() == kMaxRequestDepth)
      throw ApiError::bad_request(
          fmt::format("the body is nested more than {} levels deep", kMaxRequestDepth));
  }
  // messages[2].content
  std::string path(std::string_view key) const {
    std::string out;
    for (size_t i = 0; i + 1 < open_.size(); ++i) {
      if (open_[i].value.is_array()) {
        out += fmt::format("[{}]", open_[i].value.size());
        continue;
      }
      if (!out.empty()) out += '.';
      out += open_[i].key;
    }
    if (!out.empty()) out += '.';
    return out.append(key);
  }
};

}  // namespace

Json parse_json(std::string_view text) {
  // The library takes a NUL for the end of the text and would not look behind it.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    throw ApiError::bad_request(fmt::format("the body is not valid JSON: byte {} is zero", nul));
  Builder builder;
  builder.read(text);
  return std::move(builder.document);
}

Json plain_numbers(const Json& json) {
  if (json.is_binary()) {
    const auto& digits = json.get_binary();
    return std::strtod(std::string(digits.begin(), digits.end()).c_str(), nullptr);
  }
  if (!json.is_structured()) return json;
  Json out = json;
  for (Json& item : out) item = plain_numbers(item);
  return out;
}

std::string to_text(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

Body::Body(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (object.is_object()) return;
  std::string name = path_.empty() ? "" : path_.substr(0, path_.size() - 1);
  const std::string what = name.empty() ? "the body" : name;
  throw ApiError::bad_field(std::move(name), what + ": a JSON object is needed");
}

const Json* Body::find(const char* name) {
  seen_.insert(name);
  const auto at = object_.find(name);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

void Body::fail(const char* name, const std::string& message) const {
  throw ApiError::bad_field(path_ + name, fmt::format("{}{}: {}", path_, name, message));
}

bool Body::boolean(const char* name, bool otherwise) {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) fail(name, "true or false is needed, found " + shown(*value));
  return value->get<bool>();
}

std::optional<int64_t> Body::integer(const char* name, int64_t least, int64_t most) {
  const Json* value = find(name);
  if (value == nullptr) return {};
  // 100.0 is an integer too: some clients know no others.
  const bool is_whole = value->is_number_float() &&
                        std::trunc(value->get<double>()) == value->get<double>() &&
                        std::abs(value->get<double>()) < 0x1p53;
  if (!value->is_number_integer() && !is_whole) fail(name, "an integer is needed, found " + shown(*value));
  const bool too_large = value->is_number_unsigned() && value->get<uint64_t>() > uint64_t{INT64_MAX};
  const int64_t number = too_large  ? INT64_MAX
                         : is_whole ? static_cast<int64_t>(value->get<double>())
                                    : value->get<int64_t>();
  if (too_large || number < least || number > most)
    fail(name, fmt::format("{} is out of range; from {} to {} is possible", shown(*value), least, most));
  return number;
}

std::optional<double> Body::number(const char* name, double least, double most) {
  const Json* value = find(name);
  if (value == nullptr) return {};
  if (!value->is_number()) fail(name, "a number is needed, found " + shown(*value));
  const auto number = value->get<double>();
  if (!(number >= least && number <= most))
    fail(name, fmt::format("{} is out of range; from {} to {} is possible", shown(*value), least, most));
  return number;
}

std::optional<std::string> Body::text(const char* name) {
  const Json* value = find(name);
  if (value == nullptr) return {};
  if (!value->is_string()) fail(name, "a string is needed, found " + shown(*value));
  return value->get<std::string>();
}

std::optional<Body> Body::object(const char* name) {
  const Json* value = find(name);
  if (value == nullptr) return {};
  return Body(*value, path_ + name + ".");
}

const Json* Body::array(const char* name) {
  const Json* value = find(name);
  if (value == nullptr) return nullptr;
  if (!value->is_array()) fail(name, "an array is needed, found " + shown(*value));
  return value;
}

void Body::refuse(const char* name, const char* why, const Json& harmless) {
  const Json* value = find(name);
  if (value != nullptr && *value != harmless) fail(name, why);
}

std::vector<std::string> Body::unknown() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : object_.items())
    if (!seen_.contains(name)) names.push_back(path_ + printable(name, 64));
  return names;
}

}  // namespace lily::server
