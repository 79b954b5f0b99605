// How evenly the router spreads a prompt over the experts, layer by layer: what shows that a synthetic
// checkpoint routes as a trained model does (docs/formats.md, "Synthetic checkpoints").
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace lily::engine {

// Upper bounds of the histogram's classes: an expert's load relative to the mean. The first class holds the
// experts that nothing was sent to, the last one what exceeds all bounds.
inline constexpr std::array<double, 6> kLoadBounds = {0, 0.25, 0.5, 1, 2, 4};

struct LayerRouting {
  int layer = 0;
  std::vector<int64_t> loads;  // [experts]: rows sent there

  double heaviest() const;    // relative to the mean load
  double share_used() const;  // of the experts
  std::array<int, kLoadBounds.size() + 1> histogram() const;
};

struct RoutingOptions {
  std::string backend = "cpu";  // one that keeps values
  int threads = 0;              // 0: physical cores
};

// Reads a prompt by the model in `folder`. The layers come a few at a time (an attention interval), each lot
// with its weights in memory alone, so that a model is read that has no room as a whole. `progress` is called
// with layers; returning false throws Error "interrupted".
std::vector<LayerRouting> count_routing(const std::filesystem::path& folder, std::span<const int32_t> prompt,
                                        const RoutingOptions& options,
                                        const std::function<bool(int64_t done, int64_t total)>& progress);

}  // namespace lily::engine
