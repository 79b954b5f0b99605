// Does this device compute what the model needs? Each op of the plans that it would run, at the model's true
// widths, against the reference backend on the same inputs, with computed tolerances: `lily selftest`.
//
// What is reduced: four layers, few experts, a short vocabulary and few rows, so that it takes seconds.
// Weights are synthetic (model/synth.h), states and caches random.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "engine/diff.h"

namespace lily::engine {

struct SelfTestResult {
  std::string step;  // "decode, 1 row at context 33"
  std::string op;    // "gated_attention"
  OpReport report;
};

// The dimensions that are tested: the real model's, reduced as said above.
model::Dims self_test_dims();

// Writes the synthetic checkpoint into `folder`, which is empty or does not exist: about 110 MB.
void write_self_test_checkpoint(const std::filesystem::path& folder);

// Both devices are loaded with the same checkpoint of at least four layers; their memory is reserved anew.
// `between_ops` may throw, which ends it all. Throws Error(Fault::user) for a device that cannot show the
// values between its ops.
std::vector<SelfTestResult> self_test(backend::Device& device, backend::Device& reference, model::Dims dims,
                                      const std::function<void()>& between_ops = {});

}  // namespace lily::engine
