#include "model/weight_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <set>
#include <thread>

#include "model/weight_stream.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::model {
namespace {

using test::CheckpointWriter;
using test::Tensor;
using testing::AllOf;
using testing::HasSubstr;

std::vector<WeightId> all_ids(const Dims& dims) {
  std::vector<WeightId> ids;
  for (const WeightSpec& spec : catalogue(dims)) ids.push_back(spec.id);
  return ids;
}

// Row `row`, counted over all matrices, from its definition; single products and sums are exact in double.
std::vector<double> row_of(const LinearView& view, int64_t row) {
  std::vector<double> out;
  for (int64_t j = 0; j < view.in; ++j) {
    if (view.storage == Storage::bf16) {
      out.push_back(to_float(view.values[row * view.in + j]));
      continue;
    }
    const int code = view.storage == Storage::q8 ? view.codes[row * view.in + j]
                     : j % 2 == 0                ? view.codes[(row * view.in + j) / 2] & 15
                                                 : view.codes[(row * view.in + j) / 2] >> 4;
    const int64_t group = row * (view.in / kQuantGroup) + j / kQuantGroup;
    out.push_back(static_cast<double>(to_float(view.scales[group])) * code + to_float(view.biases[group]));
  }
  return out;
}

class WeightStoreTest : public testing::Test {
 protected:
  Checkpoint open(const CheckpointWriter& writer) {
    writer.write(folder_.path());
    return Checkpoint::open(folder_.path());
  }

  // The module's name in the file.
  static std::string stored_name(const WeightSpec& spec) { return "language_model." + spec.name; }

  test::TempFolder folder_;
  ThreadPool pool_{3};
};

TEST_F(WeightStoreTest, EveryWeightHasItsValues) {
  CheckpointWriter writer({.n_shards = 2});
  const Checkpoint checkpoint = open(writer);
  const WeightStore store = WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_);
  for (const WeightSpec& spec : catalogue(checkpoint.dims())) {
    ASSERT_TRUE(store.has(spec.id)) << spec.name;
    if (!spec.quantisable) {
      const bool is_bare = spec.id.weight == Weight::a_log || spec.id.weight == Weight::dt_bias;
      const std::vector<double> expected =
          test::values_of(writer.tensor(stored_name(spec) + (is_bare ? "" : ".weight")));
      const std::span<const float> found = store.vector(spec.id);
      ASSERT_EQ(found.size(), expected.size()) << spec.name;
      EXPECT_TRUE(std::equal(found.begin(), found.end(), expected.begin())) << spec.name;
      continue;
    }
    const LinearView view = store.linear(spec.id);
    EXPECT_EQ(view.n_matrices * view.out * view.in, spec.n_elements());
    EXPECT_EQ(view.in, spec.shape.back());
    EXPECT_EQ(view.n_matrices, spec.shape.size() == 3 ? spec.shape[0] : 1);
    for (const void* pointer : {static_cast<const void*>(view.codes), static_cast<const void*>(view.scales),
                                static_cast<const void*>(view.biases)})
      EXPECT_EQ(reinterpret_cast<uintptr_t>(pointer) % 64, 0u);
    for (const int64_t row : {int64_t{0}, view.n_matrices * view.out / 2, view.n_matrices * view.out - 1})
      EXPECT_EQ(row_of(view, row), test::dequantised_row(writer.tensors, stored_name(spec),
                                                         view.storage == Storage::q8 ? 8 : 4, row))
          << spec.name;
  }
}

TEST_F(WeightStoreTest, OnlyWhatIsAskedForIsLoaded) {
  CheckpointWriter writer({});
  const Checkpoint checkpoint = open(writer);
  // In any order, and a repetition counts once.
  const WeightStore store = WeightStore::load(
      checkpoint, {{Weight::router, 3}, {Weight::embed, kNoLayer}, {Weight::router, 3}}, pool_);
  EXPECT_TRUE(store.has({Weight::router, 3}));
  EXPECT_FALSE(store.has({Weight::router, 2}));
  EXPECT_FALSE(store.has({Weight::lm_head, kNoLayer}));
  EXPECT_FALSE(store.has({Weight::router, 1000}));
  EXPECT_EQ(store.n_bytes(), storage_bytes(8 * 64, Storage::q8) + storage_bytes(128 * 64, Storage::q4));
  EXPECT_LT(store.linear({Weight::embed, kNoLayer}).codes,
            store.linear({Weight::router, 3}).codes);  // order of execution
  EXPECT_DEATH(store.linear({Weight::router, 2}), "layers.2.router was not loaded");
  EXPECT_DEATH(store.vector({Weight::router, 3}), "is a linear weight");
  EXPECT_DEATH(WeightStore::load(checkpoint, {{Weight::q_proj, 0}}, pool_),
               "not in the catalogue");  // a delta layer
  EXPECT_EQ(WeightStore::load(checkpoint, {}, pool_).n_bytes(), 0);
}

TEST_F(WeightStoreTest, BlocksAreCutBetweenWeights) {
  CheckpointWriter writer({});
  const Checkpoint checkpoint = open(writer);
  const std::vector<WeightId> ids = all_ids(checkpoint.dims());
  const WeightStore whole = WeightStore::load(checkpoint, ids, pool_);
  EXPECT_EQ(whole.blocks().size(), 1u);
  // Most weights fit into 40,000 bytes and share blocks; larger ones stand alone.
  const int64_t limit = 40'000;
  const WeightStore store = WeightStore::load(checkpoint, ids, pool_, {}, limit);
  EXPECT_GT(store.blocks().size(), 10u);
  const auto block_of = [&](const void* pointer) {
    for (size_t i = 0; i < store.blocks().size(); ++i) {
      const PageBlock& block = store.blocks()[i];
      if (pointer >= block.data() && pointer < block.data() + block.size()) return static_cast<int>(i);
    }
    return -1;
  };
  std::vector<int64_t> bytes(store.blocks().size()), n_weights(store.blocks().size());
  int last = 0;
  for (const WeightSpec& spec : catalogue(checkpoint.dims())) {
    int block = -1;
    int64_t n_bytes = 0;
    if (spec.quantisable) {
      const LinearView view = store.linear(spec.id);
      n_bytes = storage_bytes(spec.n_elements(), view.storage);
      block = block_of(view.codes);
      EXPECT_EQ(block_of(view.biases + view.n_matrices * view.out * view.in / 64 - 1), block);
      EXPECT_EQ(row_of(view, 1 % (view.n_matrices * view.out)),
                row_of(whole.linear(spec.id), 1 % (view.n_matrices * view.out)));
    } else {
      n_bytes = spec.n_elements() * 4;
      block = block_of(store.vector(spec.id).data());
    }
    ASSERT_GE(block, last);
    last = block;
    bytes[block] += n_bytes;
    ++n_weights[block];
  }
  for (size_t i = 0; i < bytes.size(); ++i) EXPECT_TRUE(bytes[i] <= limit || n_weights[i] == 1) << i;
}

TEST_F(WeightStoreTest, TheTiedHeadIsTheEmbedding) {
  const Checkpoint checkpoint = open(CheckpointWriter({.is_tied = true}));
  const WeightId embed{Weight::embed, kNoLayer}, head{Weight::lm_head, kNoLayer};
  const WeightStore both = WeightStore::load(checkpoint, {embed, head}, pool_);
  EXPECT_EQ(both.linear(embed).codes, both.linear(head).codes);
  EXPECT_EQ(both.n_bytes(), storage_bytes(128 * 64, Storage::q4));
  EXPECT_EQ(WeightStore::load(checkpoint, {head}, pool_).linear(head).out, 128);
}

TEST_F(WeightStoreTest, OtherTypesAreRoundedOnce) {
  for (const char* dtype : {"F16", "F32"}) {
    const auto storage = [](WeightId id) {
      return id.weight == Weight::embed ? Storage::bf16 : published_storage(id.weight);
    };
    CheckpointWriter writer({.storage = storage, .scale_dtype = dtype, .value_dtype = dtype});
    const Checkpoint checkpoint = open(writer);
    const WeightStore store = WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_);

    const std::vector<double> scales =
        test::values_of(writer.tensor("language_model.model.layers.0.mlp.gate.scales"));
    const LinearView router = store.linear({Weight::router, 0});
    for (size_t i = 0; i < scales.size(); ++i)
      EXPECT_EQ(to_float(router.scales[i]), bf16_rounded(static_cast<float>(scales[i])));
    const std::vector<double> embed =
        test::values_of(writer.tensor("language_model.model.embed_tokens.weight"));
    const LinearView view = store.linear({Weight::embed, kNoLayer});
    EXPECT_EQ(view.storage, Storage::bf16);
    EXPECT_EQ(view.codes, nullptr);
    for (size_t i = 0; i < embed.size(); ++i)
      EXPECT_EQ(to_float(view.values[i]), bf16_rounded(static_cast<float>(embed[i])));
    // Vectors keep every bit.
    const std::vector<double> norm = test::values_of(writer.tensor("language_model.model.norm.weight"));
    const std::span<const float> found = store.vector({Weight::final_norm, kNoLayer});
    EXPECT_TRUE(std::equal(found.begin(), found.end(), norm.begin(), norm.end()));
  }
}

// 8 to 24 MB a tensor: several pieces of reading, and of conversion within them.
TEST_F(WeightStoreTest, LargeTensorsArriveWhole) {
  Dims dims = test::small_dims();
  dims.vocab = 100'003;
  const WeightId embed{Weight::embed, kNoLayer}, head{Weight::lm_head, kNoLayer};
  const auto storage = [&](WeightId id) {
    return id == embed ? Storage::bf16 : id == head ? Storage::q8 : published_storage(id.weight);
  };
  for (const char* dtype : {"BF16", "F16", "F32"}) {
    CheckpointWriter writer({.dims = dims, .storage = storage, .value_dtype = dtype});
    writer.config["quantization"]["lm_head"] = {{"bits", 8}};
    const Checkpoint checkpoint = open(writer);
    const WeightStore store = WeightStore::load(checkpoint, {embed, head}, pool_);
    const std::vector<std::byte>& codes = writer.tensor("language_model.lm_head.weight").data;
    EXPECT_EQ(std::memcmp(store.linear(head).codes, codes.data(), codes.size()), 0);
    const std::vector<double> expected =
        test::values_of(writer.tensor("language_model.model.embed_tokens.weight"));
    const Bf16* found = store.linear(embed).values;
    int64_t n_wrong = 0;
    for (size_t i = 0; i < expected.size(); ++i)
      n_wrong += to_float(found[i]) != bf16_rounded(static_cast<float>(expected[i]));
    EXPECT_EQ(n_wrong, 0) << dtype;
  }
}

TEST_F(WeightStoreTest, ValuesThatAreNotFiniteAreNamed) {
  const std::string layer = "language_model.model.layers.0.";
  for (const std::string name :
       {"mlp.gate.scales", "mlp.switch_mlp.down_proj.biases", "input_layernorm.weight", "linear_attn.A_log",
        "linear_attn.dt_bias", "linear_attn.norm.weight", "linear_attn.conv1d.weight"}) {
    for (const uint16_t bits : {0x7f80, 0xff80, 0x7fc0, 0x7f81}) {  // infinities, quiet and signalling NaN
      CheckpointWriter writer({});
      Tensor& tensor = writer.tensor(layer + name);
      const size_t last = tensor.data.size() / 2 - 1;
      std::memcpy(tensor.data.data() + 2 * last, &bits, 2);
      const Checkpoint checkpoint = open(writer);
      EXPECT_THAT(test::error_of([&] { WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_); }),
                  AllOf(HasSubstr(layer + name), HasSubstr(fmt::format("element {} ", last)),
                        HasSubstr("not a finite")));
    }
  }
}

TEST_F(WeightStoreTest, ValuesThatOverflowBfloat16AreNamed) {
  CheckpointWriter writer({.scale_dtype = "F32"});
  const float huge = std::numeric_limits<float>::max();  // finite, but rounds to infinity
  std::memcpy(writer.tensor("language_model.lm_head.scales").data.data() + 4 * 5, &huge, 4);
  const Checkpoint checkpoint = open(writer);
  EXPECT_THAT(test::error_of([&] { WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_); }),
              HasSubstr("lm_head.scales: element 5 is not a finite bfloat16 number"));
}

TEST_F(WeightStoreTest, ProgressRisesOnTheCallingThread) {
  const Checkpoint checkpoint = open(CheckpointWriter({}));
  const auto caller = std::this_thread::get_id();
  int64_t last = -1, total = 0;
  WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_,
                    [&](int64_t done_bytes, int64_t total_bytes) {
                      EXPECT_EQ(std::this_thread::get_id(), caller);
                      EXPECT_GE(done_bytes, last);
                      EXPECT_LE(done_bytes, total_bytes);
                      last = done_bytes;
                      total = total_bytes;
                      return true;
                    });
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, checkpoint.report().text_bytes);
}

TEST_F(WeightStoreTest, LoadingCanBeCancelledAtAnyStep) {
  const Checkpoint checkpoint = open(CheckpointWriter({}));
  for (int n_steps = 0; n_steps < 4; ++n_steps) {
    int step = 0;
    try {
      WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_,
                        [&](int64_t, int64_t) { return step++ < n_steps; });
      // All other threads may have been quicker, then there are few steps.
      EXPECT_LE(step, n_steps);
    } catch (const Error& error) {
      EXPECT_EQ(error.fault(), Fault::user);
      EXPECT_EQ(step, n_steps + 1);
    }
  }
  EXPECT_THAT(test::error_of([&] {
                WeightStore::load(checkpoint, {{Weight::embed, kNoLayer}}, pool_,
                                  [](int64_t, int64_t) { return false; });
              }),
              HasSubstr("cancelled"));
}

TEST_F(WeightStoreTest, AFileThatShrinksWhileLoadingIsAnError) {
  const Checkpoint checkpoint = open(CheckpointWriter({}));
  std::filesystem::resize_file(folder_.path() / "model.safetensors", 30'000);
  EXPECT_THAT(test::error_of([&] { WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_); }),
              HasSubstr("when opened"));
  // The pool is as good as new.
  std::atomic<int> n_calls{0};
  pool_.run([&](int thread) { n_calls += thread == 0; });
  EXPECT_EQ(n_calls, 1);
}

TEST_F(WeightStoreTest, SlabsCoverEveryRowOnceWithTheSameBytes) {
  const auto storage = [](WeightId id) {
    return id.weight == Weight::o_proj ? Storage::bf16 : published_storage(id.weight);
  };
  const Checkpoint checkpoint = open(CheckpointWriter({.storage = storage, .scale_dtype = "F16"}));
  const WeightStore store = WeightStore::load(checkpoint, all_ids(checkpoint.dims()), pool_);
  WeightStream stream(checkpoint, pool_);
  for (const WeightSpec& spec : catalogue(checkpoint.dims())) {
    if (!spec.quantisable) {
      const std::vector<float> found = stream.vector(spec.id);
      EXPECT_TRUE(
          std::equal(found.begin(), found.end(), store.vector(spec.id).begin(), store.vector(spec.id).end()));
      continue;
    }
    const LinearView view = store.linear(spec.id);
    for (const int64_t rows_per_slab : {1, 7, 64, 100'000}) {
      if (rows_per_slab == 1 && view.n_matrices > 1) continue;  // slow, and nothing new
      std::vector<std::atomic<int>> seen(static_cast<size_t>(view.n_matrices * view.out));
      std::atomic<int> n_wrong{0};
      stream.for_each_slab(spec.id, rows_per_slab, [&](int thread, const LinearSlab& slab) {
        n_wrong +=
            thread < 0 || thread >= pool_.n_threads() || slab.in != view.in || slab.storage != view.storage;
        n_wrong += slab.first_row % std::min(rows_per_slab, view.out) != 0 ||
                   slab.first_row + slab.n_rows > view.out;
        const int64_t row = slab.matrix * view.out + slab.first_row;
        for (int64_t r = 0; r < slab.n_rows; ++r) ++seen[static_cast<size_t>(row + r)];
        const auto differs = [](const void* a, const void* b, int64_t n) {
          return std::memcmp(a, b, static_cast<size_t>(n)) != 0;
        };
        if (slab.storage == Storage::bf16) {
          n_wrong += differs(slab.values, view.values + row * view.in, slab.n_rows * view.in * 2);
          return;
        }
        const int64_t row_bytes = view.storage == Storage::q4 ? view.in / 2 : view.in,
                      n_groups = view.in / kQuantGroup;
        n_wrong += differs(slab.codes, view.codes + row * row_bytes, slab.n_rows * row_bytes);
        n_wrong += differs(slab.scales, view.scales + row * n_groups, slab.n_rows * n_groups * 2);
        n_wrong += differs(slab.biases, view.biases + row * n_groups, slab.n_rows * n_groups * 2);
        for (const void* pointer :
             {static_cast<const void*>(slab.codes), static_cast<const void*>(slab.scales),
              static_cast<const void*>(slab.biases)})
          n_wrong += reinterpret_cast<uintptr_t>(pointer) % 64 != 0;
      });
      EXPECT_EQ(n_wrong, 0) << spec.name;
      for (const auto& count : seen) ASSERT_EQ(count, 1) << spec.name;
    }
  }
}

TEST_F(WeightStoreTest, AnExceptionEndsTheSlabs) {
  CheckpointWriter writer({});
  const uint16_t nan = 0x7fc0;
  std::memcpy(writer.tensor("language_model.lm_head.biases").data.data(), &nan, 2);
  const Checkpoint checkpoint = open(writer);
  WeightStream stream(checkpoint, pool_);
  EXPECT_THAT(test::error_of([&] {
                stream.for_each_slab({Weight::lm_head, kNoLayer}, 16, [](int, const LinearSlab&) {});
              }),
              HasSubstr("lm_head.biases: element 0"));
  EXPECT_THROW(stream.for_each_slab({Weight::embed, kNoLayer}, 16,
                                    [](int, const LinearSlab&) { throw std::runtime_error("full"); }),
               std::runtime_error);
}

}  // namespace
}  // namespace lily::model
