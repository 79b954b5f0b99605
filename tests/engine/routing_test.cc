#include "engine/routing.h"

#include <gtest/gtest.h>

#include <numeric>

#include "backend/backend.h"
#include "base/error.h"
#include "model/checkpoint.h"
#include "tests/support/golden.h"

namespace lily::engine {
namespace {

std::vector<int32_t> prompt(int n) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i * 7 % 7999);
  return tokens;
}

// The whole model in one step, its router read layer by layer.
std::vector<std::vector<int64_t>> loads_of_one_step(const std::vector<int32_t>& tokens) {
  const auto checkpoint = model::Checkpoint::open(test::kTinyModel);
  const model::Dims& dims = checkpoint.dims();
  const auto device = backend::make_device("cpu", {.threads = 2});
  device->load(checkpoint, {});
  const plan::Policy policy = device->policy(dims);
  const auto n = static_cast<int>(tokens.size());
  std::vector<int32_t> blocks(tokens.size() / 64 + 1);
  std::iota(blocks.begin(), blocks.end(), 0);
  device->reserve({.n_state_slots = 1, .n_kv_blocks = static_cast<int>(blocks.size()), .max_rows = n},
                  policy);
  const auto program = device->compile(plan::forward(
      dims,
      {.phase = plan::Phase::prefill, .rows = n, .outputs = 0, .context = n, .ending = plan::Ending::none},
      policy, {.keep_values = true}));
  const std::vector<backend::Segment> segments = {{.n_rows = n}};
  program->submit({.tokens = tokens, .segments = segments, .block_table = blocks, .n_tokens = dims.vocab});
  program->wait();
  std::vector<std::vector<int64_t>> loads(static_cast<size_t>(dims.n_layers),
                                          std::vector<int64_t>(static_cast<size_t>(dims.n_experts)));
  const auto& values = program->plan().values;
  for (size_t v = 0; v < values.size(); ++v)
    for (int layer = 0; layer < dims.n_layers; ++layer)
      if (values[v].name == fmt::format("layers.{}.router_ids", layer))
        for (const float id : program->read(static_cast<plan::ValueId>(v)))
          ++loads[static_cast<size_t>(layer)][static_cast<size_t>(id)];
  return loads;
}

// Two lots of four layers, two chunks of rows: the second lot goes on from what the first one left.
TEST(Routing, ALotAtATimeIsTheWholeModel) {
  const auto tokens = prompt(300);
  int64_t last = -1;
  const auto layers =
      count_routing(test::kTinyModel, tokens, {.threads = 2}, [&](int64_t done, int64_t total) {
        EXPECT_GE(done, last);
        EXPECT_EQ(total, 8);
        last = done;
        return true;
      });
  EXPECT_EQ(last, 8);
  const auto wanted = loads_of_one_step(tokens);
  ASSERT_EQ(layers.size(), wanted.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(layers[i].layer, static_cast<int>(i));
    EXPECT_EQ(layers[i].loads, wanted[i]) << "layer " << i;
  }
}

TEST(Routing, CanBeInterrupted) {
  const auto tokens = prompt(10);
  EXPECT_THROW(count_routing(test::kTinyModel, tokens, {.threads = 1},
                             [](int64_t done, int64_t) { return done == 0; }),
               Error);
}

TEST(Routing, CountsExpertsByTheirShareOfTheMeanLoad) {
  const LayerRouting layer{.layer = 0, .loads = {0, 1, 5, 10, 11, 20, 33, 0}};  // mean 10
  EXPECT_DOUBLE_EQ(layer.heaviest(), 3.3);
  EXPECT_DOUBLE_EQ(layer.share_used(), 0.75);
  EXPECT_EQ(layer.histogram(), (std::array<int, 7>{2, 1, 1, 1, 2, 1, 0}));
}

}  // namespace
}  // namespace lily::engine
