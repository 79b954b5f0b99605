// Every op of the plan at the real model's shapes against the reference, with computed tolerances: layers of
// both kinds with synthetic weights, all experts, the whole vocabulary, random states and caches
// (engine/selftest.h). What chunks of a prompt take where no value is kept, the matrix kernels, is in
// cuda_prefill_test at the same widths.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "backend/backend.h"
#include "base/thread_pool.h"
#include "engine/selftest.h"
#include "model/checkpoint.h"
#include "model/synth.h"

namespace lily::backend {

std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);
bool cuda_device_present();
std::unique_ptr<Device> make_reference_device(const DeviceOptions& options);

namespace {

model::Dims dims() {
  model::Dims d = engine::self_test_dims();
  d.n_experts = model::qwen36_35b_a3b().n_experts;
  d.vocab = model::qwen36_35b_a3b().vocab;
  return d;
}

TEST(CudaFullSize, EveryOpIsTheReferences) {
  if (!cuda_device_present()) GTEST_SKIP() << "no CUDA device that the backend runs on";
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("lily-full-size-{}", getpid());
  ThreadPool pool(physical_cores());
  model::write_synthetic(dims(), folder, {}, pool, {});
  const auto cuda = make_cuda_device({}), reference = make_reference_device({});
  {
    const auto checkpoint = model::Checkpoint::open(folder.string());
    cuda->load(checkpoint, {});
    reference->load(checkpoint, {});
    std::filesystem::remove_all(folder);
  }
  const auto results = engine::self_test(*cuda, *reference, dims());
  int64_t n_values = 0;
  for (const engine::SelfTestResult& r : results) {
    n_values += r.report.n_values;
    EXPECT_FALSE(r.report.first) << r.step << ": " << r.report.first->line();
    if (r.report.worst)
      fmt::print("{}, {}: {} values, worst {:.2f} of its tolerance\n", r.step, r.op, r.report.n_values,
                 r.report.worst->share());
  }
  EXPECT_GT(n_values, 1000000);
}

}  // namespace
}  // namespace lily::backend
