// The quantisation block of config.json: one rule for all modules, and overrides for single ones.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace lily::model {

struct QuantRule {
  bool quantised = true;        // false: an override says that the module is not
  std::string mode = "affine";  // as in the file; only affine is supported
  int bits = 4;
  int group_size = 64;
  bool operator==(const QuantRule&) const = default;
};

struct Quantisation {
  bool present = false;  // config.json has a block
  QuantRule global;
  std::map<std::string, QuantRule, std::less<>> overrides;  // by normalised module path

  // What the config says of a module; nothing (nullptr) if it has no override. The global rule then holds if
  // the module has scales.
  const QuantRule* override_for(std::string_view module) const;
};

// `root` is config.json's document. Throws for methods other than MLX's and for values out of range.
Quantisation parse_quantisation(const nlohmann::json& root);

}  // namespace lily::model
