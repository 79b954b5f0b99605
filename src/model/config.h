// config.json and generation_config.json: the model's dimensions, how it is quantised, and what its authors
// recommend for sampling (docs/formats.md, "config.json").
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "model/dims.h"
#include "model/quantisation.h"

namespace lily::model {

// From generation_config.json; where that file or a value is missing, the real model's.
struct SamplingDefaults {
  bool do_sample = true;  // false: greedy
  double temperature = 1.0;
  int top_k = 20;
  double top_p = 0.95;
  bool operator==(const SamplingDefaults&) const = default;
};

struct Config {
  Dims dims;
  Quantisation quantisation;
  bool tied_embeddings = false;  // no lm_head: the embedding is used
  std::vector<int32_t>
      stop_ids;  // ascending: eos of all files, and the two stop tokens of the full vocabulary
  SamplingDefaults sampling;
};

inline constexpr uint64_t kMaxConfigBytes = uint64_t{4} << 20;

// Texts of the two files; an empty generation text means that there is no such file. Throws Fault::model
// naming the key, what was expected and what was found: every constant of dims.h and every range is checked
// here.
Config parse_config(std::string_view config_text, std::string_view generation_text = {});

// `raw`, if given, receives the text of config.json.
Config read_config(const std::filesystem::path& folder, std::string* raw = nullptr);

}  // namespace lily::model
