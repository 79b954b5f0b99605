#include "text/arguments_writer.h"

#include "text/json_text.h"

namespace lily::text {

bool ArgumentsWriter::begin_value(std::string_view name, std::string& out) {
  discarded_ = !is_unused(name);
  at_start_ = true;
  newline_held_ = false;
  buffered_.clear();
  types_ = kUntyped;
  if (discarded_) return false;
  key_ = used_.empty() ? "{\"" : ", \"";
  escape_json_append(name, key_);
  key_ += "\": ";
  used_.emplace(name);
  if (declares(name)) types_ = parameters_->find(name)->second;
  if (is_plain_string(types_)) {
    out += key_;
    out += '"';
  }
  return true;
}

void ArgumentsWriter::write(std::string_view text, std::string& out) {
  if (discarded_) return;
  if (is_plain_string(types_)) escape_json_append(text, out);
  else buffered_ += text;
}

void ArgumentsWriter::append(std::string_view text, std::string& out) {
  if (text.empty()) return;
  if (at_start_) {
    at_start_ = false;
    if (text[0] == '\n') text.remove_prefix(1);
    if (text.empty()) return;
  }
  if (newline_held_) write("\n", out);
  newline_held_ = text.ends_with('\n');
  if (newline_held_) text.remove_suffix(1);
  write(text, out);
}

void ArgumentsWriter::end_value(std::string& out) {
  if (discarded_) return;
  if (is_plain_string(types_)) {
    out += '"';
  } else {
    out += key_;
    append_typed_value(buffered_, types_, out);
  }
}

void ArgumentsWriter::close(std::string& out) { out += used_.empty() ? "{}" : "}"; }

}  // namespace lily::text
