// The Metal backend on the emulated GPU: an oracle for tests, never a default.
#include "backend/metal/metal_device.h"
#include "emulator/emulated_device.h"
#include "lily_metal_kernels.h"
#include "lily_metal_kernels_emulated.h"
#include "lily_metal_tensor_kernels.h"
#include "lily_metal_tensor_kernels_emulated.h"

namespace lily::backend {
namespace {

constexpr int64_t kTimeoutMs = 1'800'000;  // the emulator is slow, and may share its machine

}  // namespace

std::unique_ptr<Device> make_metal_emulated_device(const DeviceOptions& options) {
  auto gpu = emulator::make_emulated_device(
      {.libraries = {&emulator::lily_metal_kernels_plain, &emulator::lily_metal_tensor_kernels_plain},
       .n_threads = options.threads,
       .limits = {.apple_family = options.tensor_ops ? 10 : 9,
                  .tensor_ops = options.tensor_ops,
                  .max_buffer_length = size_t{4} << 30,
                  .recommended_working_set = size_t{64} << 30}});
  return std::make_unique<metal::MetalDevice>(std::move(gpu), "metal-emulated", metal::lily_metal_kernels,
                                              metal::lily_metal_tensor_kernels, options.tensor_ops,
                                              kTimeoutMs);
}

bool metal_emulated_device_present() { return true; }

}  // namespace lily::backend
