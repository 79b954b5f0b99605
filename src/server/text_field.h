// Reads one string member of a JSON object while the object is being written.
#pragma once

#include <string>
#include <string_view>

namespace lily::server {

class TextField {
 public:
  // The member must come first in its object; others after it are passed over.
  explicit TextField(std::string_view name) : head_(std::string("{\"") + std::string(name) + "\":\"") {}

  // What has become of the string's text by this fragment of the object.
  std::string push(std::string_view fragment);
  // True once the string has begun. False at the end of the object: there is no such member at its place.
  bool has_begun() const { return state_ != State::head; }

 private:
  enum class State { head, text, done };

  bool read_head(char c);  // false: this is another object
  void read_escape(char c, std::string& out);

  const std::string head_;  // without white space
  size_t n_head_ = 0;       // characters of it that were read
  bool is_other_ = false;
  std::string escape_;  // begun, not complete
  State state_ = State::head;
};

}  // namespace lily::server
