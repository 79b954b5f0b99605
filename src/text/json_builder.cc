#include "text/json_builder.h"

namespace lily::text {

// The parser is slow to compile: it stands here once, over the interface.
bool JsonBuilder::read(std::string_view text) {
  return Json::sax_parse(text.begin(), text.end(), static_cast<nlohmann::json_sax<Json>*>(this));
}

bool JsonBuilder::number_float(number_float_t value, const string_t& text) {
  if (text.find_first_of(".eE") != std::string::npos) return add(value);
  return add(Json::binary({text.begin(), text.end()}, kBigInteger));
}

bool JsonBuilder::key(string_t& name) {
  open_.back().key = std::move(name);
  return true;
}

bool JsonBuilder::open(Json value) {
  if (open_.size() >= max_depth_) return false;
  open_.push_back({std::move(value), {}, {}});
  return true;
}

bool JsonBuilder::close() {
  Json value = std::move(open_.back().value);
  open_.pop_back();
  return add(std::move(value));
}

bool JsonBuilder::add(Json value) {
  if (open_.empty()) {
    document = std::move(value);
    return true;
  }
  Open& parent = open_.back();
  if (parent.value.is_array()) {
    parent.value.push_back(std::move(value));
    return true;
  }
  auto& members = parent.value.get_ref<Json::object_t&>();  // a vector of pairs
  const auto [at, is_new] = parent.index_of.emplace(parent.key, members.size());
  if (is_new) members.emplace_back(parent.key, std::move(value));
  else members.begin()[static_cast<ptrdiff_t>(at->second)].second = std::move(value);
  return true;
}

}  // namespace lily::text
