#include "text/content_gate.h"

#include "base/ascii.h"
#include "text/unicode.h"

namespace lily::text {
namespace {

constexpr size_t kMaxTagBytes = 64;

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == ':' || c == '.' || c == '|';
}

}  // namespace

void ContentGate::open(std::string& out) {
  out += keep_newlines_ ? std::string_view(held_) : strip_leading_newlines(held_);
  out += tag_;
  held_.clear();
  tag_.clear();
  keep_newlines_ = true;
  mode_ = Mode::open;
}

bool ContentGate::extend_tag(char c) {
  if (tag_.size() == 1 ? c == '/' : is_name(c) && tag_.size() < kMaxTagBytes) {
    tag_ += c;
    return true;
  }
  if (c != '>' || tag_.size() < 3) return false;
  held_ += tag_;
  held_ += c;
  tag_.clear();
  return true;
}

void ContentGate::push(std::string_view text, std::string& out) {
  for (size_t i = 0; i < text.size() && mode_ != Mode::open;) {
    const char c = text[i];
    if (!tag_.empty()) {
      if (!extend_tag(c)) {
        open(out);
        text.remove_prefix(i);
        break;
      }
    } else if (is_ascii_space(c)) {
      held_ += c;
    } else if (c == '<' && mode_ == Mode::after_call) {
      tag_ = c;
    } else {
      open(out);
      text.remove_prefix(i);
      break;
    }
    ++i;
    if (i == text.size()) return;
  }
  out += text;
}

void ContentGate::push_closing_tag(std::string_view tag, std::string& out) {
  if (mode_ == Mode::after_call && tag_.empty()) {
    held_ += tag;
    return;
  }
  if (mode_ != Mode::open) open(out);
  out += tag;
}

void ContentGate::drop_held() {
  held_.clear();
  tag_.clear();
}

void ContentGate::call_ended() {
  drop_held();
  mode_ = Mode::after_call;
}

void ContentGate::finish(std::string& out) {
  if (mode_ == Mode::leading || tag_ == "<") open(out);
  drop_held();
}

}  // namespace lily::text
