// Compares a prompt and one more token with golden outputs of every layer: hidden states, router, recurrent
// states and KV, each within the tolerance that its depth and types give (engine/tolerance.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/dims.h"
#include "plan/policy.h"

namespace lily::engine {

struct LayerCheck {
  std::string name;                 // as in the golden file: "layer.3.router_logits", "decode.logits"
  double error = 0, tolerance = 0;  // relative; the worst row's
  // Where the largest single difference is.
  int64_t row = 0, col = 0;
  float found = 0, expected = 0;
  int n_rows = 0, n_rows_skipped = 0;  // skipped: a near-tie of the router went the other way here or below
  bool good() const { return error <= tolerance; }
  std::string line() const;
};

// `file` is layers.safetensors. The device is loaded; its memory is reserved anew. A value that the policy's
// fusions do not leave in memory is not compared.
std::vector<LayerCheck> check_layers(backend::Device& device, const model::Dims& dims,
                                     const plan::Policy& policy, const std::filesystem::path& file);

}  // namespace lily::engine
