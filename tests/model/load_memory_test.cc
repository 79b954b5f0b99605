// Loading needs the weights' memory and little more. A program of its own, so that nothing else uses memory.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "model/weight_store.h"
#include "model/weight_stream.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/peak_memory.h"
#include "tests/support/temp_folder.h"

namespace lily::model {
namespace {

constexpr int64_t kAllowedExtra = 256'000'000;

using test::reset_peak;
using test::status_bytes;

class LoadMemory : public testing::Test {
 protected:
  // 300 MB, most of it experts and embedding as in the real model.
  static void SetUpTestSuite() {
    folder_ = new test::TempFolder;
    test::CheckpointWriter writer({.dims = {.hidden = 1024,
                                            .n_layers = 8,
                                            .attention_interval = 4,
                                            .vocab = 65536,
                                            .n_q_heads = 4,
                                            .n_kv_heads = 1,
                                            .n_key_heads = 4,
                                            .n_value_heads = 8,
                                            .n_experts = 64,
                                            .expert_width = 256,
                                            .shared_width = 256,
                                            .rope_theta = 1e7,
                                            .max_positions = 4096},
                                   .n_shards = 3});
    writer.write(folder_->path());
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  static test::TempFolder* folder_;
};
test::TempFolder* LoadMemory::folder_ = nullptr;

TEST_F(LoadMemory, GrowsByTheWeightsAndLittleMore) {
  const Checkpoint checkpoint = Checkpoint::open(folder_->path());
  const int64_t text_bytes = checkpoint.report().text_bytes;
  EXPECT_GT(text_bytes, 280'000'000);
  if (!reset_peak() || !status_bytes("VmHWM")) GTEST_SKIP() << "this system does not tell peak memory";
  std::vector<WeightId> ids;
  for (const WeightSpec& spec : catalogue(checkpoint.dims())) ids.push_back(spec.id);
  ThreadPool pool(8);
  const int64_t before = *status_bytes("VmRSS");
  const WeightStore store = WeightStore::load(checkpoint, ids, pool);
  const int64_t peak_growth = *status_bytes("VmHWM") - before;
  std::printf("weights %lld bytes, peak growth %lld\n", static_cast<long long>(store.n_bytes()),
              static_cast<long long>(peak_growth));
  EXPECT_GE(peak_growth, text_bytes * 9 / 10);  // otherwise this measures nothing
  EXPECT_LE(peak_growth, text_bytes + kAllowedExtra);
}

TEST_F(LoadMemory, StreamingNeedsSlabsOnly) {
  const Checkpoint checkpoint = Checkpoint::open(folder_->path());
  if (!reset_peak() || !status_bytes("VmHWM")) GTEST_SKIP() << "this system does not tell peak memory";
  ThreadPool pool(4);
  WeightStream stream(checkpoint, pool);
  const int64_t before = *status_bytes("VmRSS");
  for (const WeightSpec& spec : catalogue(checkpoint.dims()))
    if (spec.quantisable) stream.for_each_slab(spec.id, 256, [](int, const LinearSlab&) {});
  // Four slabs of 256 rows of 8-bit codes at most, and what threads need.
  EXPECT_LE(*status_bytes("VmHWM") - before, 32'000'000);
}

}  // namespace
}  // namespace lily::model
