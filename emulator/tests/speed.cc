// emulator_speed: what the emulator reaches on this machine, plain and traced. Not a test.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <string>
#include <vector>

#include "emulator/emulated_device.h"
#include "emulator_kernels.h"
#include "emulator_kernels_emulated.h"

namespace {

using namespace lily;

struct LinearParams {
  uint32_t rows, outputs, inputs;
};

// Median processor seconds, of all threads, of five runs of one dispatch: other load on the machine does not
// count.
double seconds(emulator::EmulatedDevice& device, const metal::Pipeline& pipeline, const LinearParams& p,
               metal::Size3 groups, metal::Size3 threads) {
  const size_t weights = size_t{p.outputs} * p.inputs;
  const std::pair<const char*, size_t> sizes[] = {{"codes", weights / 2},
                                                  {"scales", weights / 32},
                                                  {"biases", weights / 32},
                                                  {"x", size_t{p.rows} * p.inputs * 2},
                                                  {"y", size_t{p.rows} * p.outputs * 2}};
  std::vector<std::unique_ptr<metal::Buffer>> buffers;
  for (const auto& [label, bytes] : sizes) {
    buffers.push_back(device.make_buffer(
        bytes, buffers.size() < 3 ? metal::BufferUse::weights : metal::BufferUse::mutable_data, label));
    auto contents = buffers.back()->contents();
    for (size_t i = 0; i < bytes; ++i)
      contents[i] = static_cast<std::byte>(i * 7 % 61);  // small finite numbers
  }
  std::vector<double> times;
  for (int run = 0; run < 5; ++run) {
    auto command_buffer = device.make_command_buffer("speed");
    metal::Encoder& e = command_buffer->make_encoder();
    e.set_pipeline(pipeline);
    for (size_t i = 0; i < buffers.size(); ++i) e.set_buffer(static_cast<int>(i), *buffers[i]);
    e.set_value(5, p);
    e.dispatch_threadgroups(groups, threads, {});
    e.end();
    const std::clock_t start = std::clock();
    command_buffer->commit();
    command_buffer->wait_until_completed(600000);
    times.push_back(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main() {
  const metal::FunctionConstant store[] = {{0, false}};
  for (const auto* library : {&emulator::emulator_kernels_plain, &emulator::emulator_kernels_traced}) {
    const auto device = emulator::make_emulated_device({.libraries = {library}, .n_threads = 1});
    const auto kernels = device->make_library(metal::emulator_kernels);
    const char* build = library->traced ? "traced" : "plain";
    const uint32_t scale = library->traced ? 8 : 1;
    const LinearParams gemv{1, 4096 / scale, 2048};
    const double t = seconds(*device, *kernels->make_pipeline("gemv_q4_bfloat", store), gemv,
                             {gemv.outputs / 8, 1, 1}, {256, 1, 1});
    fmt::print("{}: 4-bit GEMV {} x {}: {:.2f} ms, {:.3f} G weights/s a core\n", build, gemv.outputs,
               gemv.inputs, t * 1e3, double(gemv.outputs) * gemv.inputs / t * 1e-9);
    const LinearParams gemm{64, 1024 / scale, 2048};
    const double u =
        seconds(*device, *kernels->make_pipeline("gemm_q4"), gemm, {gemm.outputs / 32, 2, 1}, {128, 1, 1});
    fmt::print("{}: 4-bit GEMM {} x {} x {}: {:.1f} ms, {:.2f} GFLOP/s a core\n", build, gemm.rows,
               gemm.outputs, gemm.inputs, u * 1e3, 2.0 * gemm.rows * gemm.outputs * gemm.inputs / u * 1e-9);
  }
}
