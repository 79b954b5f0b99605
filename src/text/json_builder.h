// Builds a JSON document from the library's events, bottom up: nesting costs no stack, and equal keys are
// found without looking through all keys of their object, as the library's own builder does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lily::text {

// Subtype of the binary value that holds the digits of an integer beyond 64 bits.
inline constexpr uint8_t kBigInteger = 1;

// Keys keep their order; of equal keys the last value counts, at the place of the first. Who derives from it
// may refuse more.
class JsonBuilder : public nlohmann::json_sax<nlohmann::ordered_json> {
 public:
  using Json = nlohmann::ordered_json;

  explicit JsonBuilder(size_t max_depth = SIZE_MAX) : max_depth_(max_depth) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& text) override;
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool key(string_t& name) override;
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

  // Reads a text; false where it is not one JSON document and parse_error() says no more.
  bool read(std::string_view text);
  Json document;

 protected:
  struct Open {
    Json value;
    std::string key;
    std::unordered_map<std::string, size_t> index_of;  // of keys, for objects
  };
  std::vector<Open> open_;  // the outermost first

 private:
  bool open(Json value);  // false where it would be too deep
  bool close();
  bool add(Json value);

  const size_t max_depth_;
};

}  // namespace lily::text
