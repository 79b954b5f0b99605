#include "model/json_strict.h"

#include "base/error.h"
#include "base/printable.h"

namespace lily::model {
namespace {

// Keeps the document that StrictJson reports.
class Document final : public StrictJson {
 public:
  using StrictJson::StrictJson;
  explicit Document(std::string what) : StrictJson(std::move(what)) {}
  Json take() { return std::move(root_); }

 private:
  Json& place(Json value) {
    if (open_.empty()) return root_ = std::move(value);
    Json& parent = *open_.back();
    if (parent.is_object()) return parent[key_] = std::move(value);
    parent.push_back(std::move(value));
    return parent.back();
  }

  // A parent does not change while one of its children is open, so the pointers stay good.
  void on_begin(Container container) override {
    open_.push_back(&place(container == Container::object ? Json::object() : Json::array()));
  }
  void on_key(std::string& key) override { key_ = std::move(key); }
  void on_end() override { open_.pop_back(); }
  void on_scalar(Json value) override { place(std::move(value)); }

  Json root_;
  std::vector<Json*> open_;
  std::string key_;
};

}  // namespace

void StrictJson::read(std::string_view text) {
  open_.clear();
  // The library takes a NUL for the end of the text and would not look behind it.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    fail(Fault::model, "{}: not valid JSON: byte {} is zero", what_, nul);
  Json::sax_parse(text.begin(), text.end(), static_cast<nlohmann::json_sax<Json>*>(this));
}

bool StrictJson::begin(Container container) {
  if (depth() == max_depth_)
    fail(Fault::model, "{}: JSON is nested deeper than {} levels", what_, max_depth_);
  open_.push_back({container, {}});
  on_begin(container);
  return true;
}

bool StrictJson::end() {
  open_.pop_back();
  on_end();
  return true;
}

bool StrictJson::scalar(Json value) {
  on_scalar(std::move(value));
  return true;
}

bool StrictJson::key(string_t& name) {
  if (!open_.back().keys.insert(name).second)
    fail(Fault::model, "{}: key \"{}\" appears twice in one object", what_, printable(name));
  on_key(name);
  return true;
}

bool StrictJson::parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ...": keep what follows.
  std::string_view reason = error.what();
  if (const size_t colon = reason.find(": "); colon != std::string_view::npos)
    reason.remove_prefix(colon + 2);
  fail(Fault::model, "{}: not valid JSON at byte {}: {}", what_, position, printable(reason));
}

nlohmann::json parse_json_strict(std::string_view text, std::string_view what, size_t max_bytes) {
  if (text.size() > max_bytes)
    fail(Fault::model, "{}: has {} bytes, more than the {} allowed", what, text.size(), max_bytes);
  Document document{std::string(what)};
  document.read(text);
  return document.take();
}

}  // namespace lily::model
