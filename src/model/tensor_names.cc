#include "model/tensor_names.h"

namespace lily::model {
namespace {

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

}  // namespace

NameClass name_class(std::string_view name) {
  for (const std::string_view prefix : {"vision_tower.", "model.visual.", "visual.", "model.vision_tower."})
    if (starts_with(name, prefix)) return NameClass::vision;
  // "mtp." as a component: at the start or after a dot.
  for (size_t at = name.find("mtp."); at != std::string_view::npos; at = name.find("mtp.", at + 1))
    if (at == 0 || name[at - 1] == '.') return NameClass::mtp;
  return NameClass::text;
}

std::string normalised_name(std::string_view name) {
  constexpr std::string_view kOuter = "language_model.", kInner = "model.language_model.";
  if (starts_with(name, kInner)) return "model." + std::string(name.substr(kInner.size()));
  if (starts_with(name, kOuter)) {
    const std::string_view rest = name.substr(kOuter.size());
    if (starts_with(rest, "model.") || starts_with(rest, "lm_head")) return std::string(rest);
  }
  return std::string(name);
}

}  // namespace lily::model
