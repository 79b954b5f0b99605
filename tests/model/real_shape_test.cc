// The real model's shapes, without its data: a sparse checkpoint has the real headers and sizes and takes no
// room.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/checkpoint.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/temp_folder.h"

namespace lily::model {
namespace {

using testing::IsEmpty;

TEST(RealShape, TheCatalogueHasThePublishedTotals) {
  int64_t n_tensors = 0, n_bytes = 0, n_parameters = 0;
  for (const WeightSpec& spec : catalogue(qwen36_35b_a3b())) {
    n_tensors += spec.quantisable ? 3 : 1;
    n_bytes += storage_bytes(spec.n_elements(), published_storage(spec.id.weight));
    n_parameters += spec.n_elements();
  }
  EXPECT_EQ(n_tensors, 1757);
  EXPECT_EQ(n_bytes, 19'508'787'456);
  EXPECT_EQ(n_parameters, 34'660'610'688);
}

TEST(RealShape, ACheckpointOfTheRealSizeOpens) {
  const test::TempFolder folder;
  test::CheckpointWriter writer({.dims = qwen36_35b_a3b(), .n_shards = 4, .is_sparse = true});
  // 333 vision tensors of 893,142,496 bytes in all: one that makes up the sum, and small ones.
  for (int i = 0; i < 332; ++i)
    writer.tensors.push_back({"vision_tower.blocks." + std::to_string(i), "BF16", {1}, {}});
  writer.tensors.push_back({"vision_tower.patch_embed", "BF16", {893'142'496 / 2 - 332}, {}});
  writer.write(folder.path());

  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(checkpoint.dims(), qwen36_35b_a3b());
  const CheckpointReport& report = checkpoint.report();
  EXPECT_THAT(report.notices, IsEmpty());
  EXPECT_EQ(report.tensors.size(), 2090u);
  EXPECT_EQ(report.n_text_tensors, 1757);
  EXPECT_EQ(report.text_bytes, 19'508'787'456);
  int64_t sum = 0;
  for (const int64_t n_bytes : report.bytes_by_class) sum += n_bytes;
  EXPECT_EQ(sum, 20'401'929'952);

  const auto bytes = [&](TensorClass c) { return report.bytes_by_class[static_cast<size_t>(c)]; };
  EXPECT_EQ(bytes(TensorClass::vision), 893'142'496);
  EXPECT_EQ(bytes(TensorClass::experts), int64_t{40} * 256 * 1'769'472);
  EXPECT_EQ(bytes(TensorClass::shared_expert), 70'778'880);
  EXPECT_EQ(bytes(TensorClass::delta), 568'442'880 + 1'977'600);
  EXPECT_EQ(bytes(TensorClass::attention), 153'354'240);
  EXPECT_EQ(bytes(TensorClass::router), 22'369'280);
  EXPECT_EQ(bytes(TensorClass::norms), 342'016);
  EXPECT_EQ(bytes(TensorClass::head), 286'064'640);
  EXPECT_EQ(bytes(TensorClass::embedding), 286'064'640);

  EXPECT_EQ(checkpoint.weight({Weight::expert_down, 39}).codes.n_bytes, int64_t{256} * 2048 * 64 * 4);
  EXPECT_EQ(checkpoint.weight({Weight::router, 0}).storage, Storage::q8);
  EXPECT_EQ(checkpoint.weight({Weight::conv, 0}).shape, (std::vector<int64_t>{8192, 4}));
  EXPECT_EQ(checkpoint.id(), Checkpoint::open(folder.path()).id());
}

}  // namespace
}  // namespace lily::model
