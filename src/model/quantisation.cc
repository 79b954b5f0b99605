#include "model/quantisation.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/printable.h"
#include "model/tensor_names.h"

namespace lily::model {
namespace {

using Json = nlohmann::json;

// The parameters that a mode has when the file names only the mode. A mode that is not known keeps affine's:
// the error about it names the tensor, and comes when a tensor needs the rule.
QuantRule defaults_of(std::string mode) {
  QuantRule rule;
  if (mode == "mxfp4") rule = {.bits = 4, .group_size = 32};
  if (mode == "nvfp4") rule = {.bits = 4, .group_size = 16};
  if (mode == "mxfp8") rule = {.bits = 8, .group_size = 32};
  rule.mode = std::move(mode);
  return rule;
}

int small_integer(const Json& value, const std::string& key, int max) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 ||
      value.get<uint64_t>() > static_cast<uint64_t>(max))
    fail(Fault::model, "config.json: {}: expected an integer from 1 to {}, found {}", key, max,
         printable(value.dump(-1, ' ', true)));
  return value.get<int>();
}

QuantRule parse_rule(const Json& object, const std::string& key) {
  std::string mode = "affine";
  if (const auto it = object.find("mode"); it != object.end() && !it->is_null()) {
    if (!it->is_string())
      fail(Fault::model, "config.json: {}.mode: expected a string, found {}", key,
           printable(it->dump(-1, ' ', true)));
    mode = it->get<std::string>();
  }
  QuantRule rule = defaults_of(std::move(mode));
  if (const auto it = object.find("bits"); it != object.end() && !it->is_null())
    rule.bits = small_integer(*it, key + ".bits", 32);
  if (const auto it = object.find("group_size"); it != object.end() && !it->is_null())
    rule.group_size = small_integer(*it, key + ".group_size", 1 << 20);
  return rule;
}

}  // namespace

const QuantRule* Quantisation::override_for(std::string_view module) const {
  const auto it = overrides.find(module);
  return it == overrides.end() ? nullptr : &it->second;
}

Quantisation parse_quantisation(const Json& root) {
  // Some other tool's method stands in quantization_config, or beside the text model's keys.
  const auto text = root.find("text_config");
  for (const char* name : {"quantization", "quantization_config"}) {
    for (const Json* holder : {&root, text != root.end() && text->is_object() ? &*text : nullptr}) {
      if (!holder) continue;
      const auto block = holder->find(name);
      if (block == holder->end() || !block->is_object()) continue;
      if (const auto method = block->find("quant_method"); method != block->end() && !method->is_null())
        fail(Fault::model,
             "config.json: {}.quant_method {} is not supported; lily reads MLX affine 4-bit checkpoints such "
             "as "
             "mlx-community/Qwen3.6-35B-A3B-4bit",
             name, printable(method->dump(-1, ' ', true)));
    }
  }

  Quantisation quantisation;
  for (const char* name : {"quantization", "quantization_config"}) {
    const auto block = root.find(name);
    if (block == root.end() || block->is_null()) continue;
    if (!block->is_object()) fail(Fault::model, "config.json: {}: expected an object", name);
    quantisation.present = true;
    quantisation.global = parse_rule(*block, name);
    for (const auto& [path, value] : block->items()) {
      const bool is_flag = value.is_boolean();
      if (!is_flag && !value.is_object()) continue;  // the global rule's own values
      QuantRule rule = quantisation.global;
      if (value.is_object()) rule = parse_rule(value, fmt::format("{}.{}", name, printable(path)));
      if (is_flag && !value.get<bool>()) rule.quantised = false;
      const auto [it, is_new] = quantisation.overrides.emplace(normalised_name(path), rule);
      if (!is_new && it->second != rule)
        fail(Fault::model, "config.json: {} has two different entries for {}", name, printable(it->first));
    }
    break;  // the second block is a copy of the first
  }
  return quantisation;
}

}  // namespace lily::model
