// Metal's answers to `lily plan`, which needs no GPU for them.
#include "backend/planner.h"

#include "backend/metal/lower.h"

namespace lily::backend {

Planner metal_planner() {
  return {.backend = "metal",
          .policy =
              [](const model::Dims&, const DeviceOptions& options) {
                plan::Policy policy = metal::default_policy();
                if (options.tensor_ops) policy.matrix_unit = plan::MatrixUnit::tensor;
                return policy;
              },
          .launches =
              [](const plan::Plan& plan, const metal::StorageOf& storage) {
                const metal::Counts counts = metal::dispatches(plan, storage);
                return Launches{counts.launches, counts.stages, counts.barriers};
              }};
}

}  // namespace lily::backend
