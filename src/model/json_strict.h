// JSON from files that nobody vouches for: depth is limited, a key that appears twice in an object is refused
// at every level, and the text must be strict UTF-8. Include it in .cc files only (it brings in the JSON
// library).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace lily::model {

inline constexpr int kMaxJsonDepth = 8;

// Reads one JSON text and calls the on_... members in the order of the text. Every error is one line of
// Fault::model that starts with `what`. A subclass may throw as well.
class StrictJson : public nlohmann::json_sax<nlohmann::json> {
 public:
  void read(std::string_view text);

 protected:
  using Json = nlohmann::json;
  enum class Container { object, array };

  explicit StrictJson(std::string what, int max_depth = kMaxJsonDepth)
      : what_(std::move(what)), max_depth_(max_depth) {}

  const std::string& what() const { return what_; }
  int depth() const {
    return static_cast<int>(open_.size());
  }  // containers open, the one just begun included

  virtual void on_begin(Container container) = 0;
  virtual void on_key(std::string& key) = 0;
  virtual void on_end() = 0;  // depth() no longer counts the container
  virtual void on_scalar(Json value) = 0;

 private:
  struct Level {
    Container container;
    std::unordered_set<std::string> keys;  // of an object, so far
  };

  bool begin(Container container);
  bool end();
  bool scalar(Json value);

  bool null() final { return scalar(nullptr); }
  bool boolean(bool value) final { return scalar(value); }
  bool number_integer(number_integer_t value) final { return scalar(value); }
  bool number_unsigned(number_unsigned_t value) final { return scalar(value); }
  bool number_float(number_float_t value, const string_t&) final { return scalar(value); }
  bool string(string_t& value) final { return scalar(std::move(value)); }
  bool binary(binary_t&) final { return false; }
  bool start_object(size_t) final { return begin(Container::object); }
  bool key(string_t& name) final;
  bool end_object() final { return end(); }
  bool start_array(size_t) final { return begin(Container::array); }
  bool end_array() final { return end(); }
  bool parse_error(size_t position, const std::string& last_token,
                   const nlohmann::detail::exception& error) final;

  const std::string what_;
  const int max_depth_;
  std::vector<Level> open_;
};

// The whole text as a document, under the rules above; larger texts than max_bytes are refused unread.
nlohmann::json parse_json_strict(std::string_view text, std::string_view what, size_t max_bytes);

}  // namespace lily::model
