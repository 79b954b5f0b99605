#include "plan/builder.h"

#include <fmt/format.h>

namespace lily::plan {

ValueId Builder::value(int layer, const std::string& name, RowSpace rows, int64_t cols, Type type) {
  plan_.values.push_back({.name = layer == model::kNoLayer ? name : fmt::format("layers.{}.{}", layer, name),
                          .rows = rows,
                          .cols = cols,
                          .type = type});
  return static_cast<ValueId>(plan_.values.size() - 1);
}

ValueId Builder::next_residual(int layer, const std::string& name, ValueId residual) {
  if (!plan_.options.keep_values) return residual;
  return value(layer, name, RowSpace::tokens, dims().hidden, type_of(policy().residual));
}

}  // namespace lily::plan
