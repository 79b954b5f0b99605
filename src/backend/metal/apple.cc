// The Metal backend on the GPU of this Mac.
#include "backend/metal/metal_device.h"
#include "lily_metal_kernels.h"
#include "lily_metal_tensor_kernels.h"

namespace lily::backend {
namespace {

// Longer than any step takes; the system stops a command buffer that hangs sooner.
constexpr int64_t kTimeoutMs = 60'000;

}  // namespace

std::unique_ptr<Device> make_metal_device(const DeviceOptions& options) {
  return std::make_unique<metal::MetalDevice>(metal::make_apple_device(), "metal", metal::lily_metal_kernels,
                                              metal::lily_metal_tensor_kernels, options.tensor_ops,
                                              kTimeoutMs);
}

bool metal_device_present() { return metal::apple_device_present(); }

}  // namespace lily::backend
