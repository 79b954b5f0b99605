// Real kernels against plain C++ in double, over many schedules, plain and traced.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/half.h"
#include "emulator/tests/test_device.h"
#include "emulator_broken.h"
#include "emulator_broken_emulated.h"
#include "emulator_kernels.h"
#include "emulator_kernels_emulated.h"
#include "emulator_tensor_kernels.h"
#include "emulator_tensor_kernels_emulated.h"

namespace lily::emulator {
namespace {

using metal::Access;
using Rng = std::mt19937;

struct LinearParams {
  uint32_t rows, outputs, inputs;
};

// 4-bit weights as the kernels take them, on the host.
struct Weights {
  uint32_t outputs, inputs;
  std::vector<uint32_t> codes;           // [outputs, inputs / 8]
  std::vector<uint16_t> scales, biases;  // [outputs, inputs / 64] bf16

  Weights(uint32_t outputs_, uint32_t inputs_, Rng& rng)
      : outputs(outputs_),
        inputs(inputs_),
        codes(outputs * inputs / 8),
        scales(outputs * inputs / 64),
        biases(scales.size()) {
    for (auto& word : codes) word = static_cast<uint32_t>(rng());
    std::uniform_real_distribution<float> scale(0.001f, 0.02f);
    for (size_t i = 0; i < scales.size(); ++i) {
      const float s = scale(rng);
      scales[i] = to_bf16(s).bits;
      biases[i] = to_bf16(-8 * s).bits;
    }
  }
  double at(size_t n, size_t k) const {
    const uint32_t code = codes[(n * inputs + k) / 8] >> (4 * (k % 8)) & 15;
    const size_t group = (n * inputs + k) / 64;
    return static_cast<double>(to_float(Bf16{scales[group]})) * code + to_float(Bf16{biases[group]});
  }
};

std::vector<uint16_t> normal_bf16(size_t n, Rng& rng) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(n);
  for (auto& v : x) v = to_bf16(normal(rng)).bits;
  return x;
}

struct LinearBuffers {
  std::unique_ptr<metal::Buffer> codes, scales, biases, x, y;

  LinearBuffers(TestDevice& device, const Weights& w, const std::vector<uint16_t>& x_data, size_t y_count)
      : codes(device.buffer("codes", w.codes, metal::BufferUse::weights)),
        scales(device.buffer("scales", w.scales, metal::BufferUse::weights)),
        biases(device.buffer("biases", w.biases, metal::BufferUse::weights)),
        x(device.buffer("x", x_data)),
        y(device->make_buffer(y_count * 2, metal::BufferUse::mutable_data, "y")) {}

  void encode(metal::Encoder& e, const metal::Pipeline& pipeline, const LinearParams& p, metal::Size3 groups,
              metal::Size3 threads) const {
    const Access accesses[] = {{codes.get(), 0, codes->length(), Access::Kind::read},
                               {scales.get(), 0, scales->length(), Access::Kind::read},
                               {biases.get(), 0, biases->length(), Access::Kind::read},
                               {x.get(), 0, size_t{p.rows} * p.inputs * 2, Access::Kind::read},
                               {y.get(), 0, size_t{p.rows} * p.outputs * 2, Access::Kind::write}};
    e.set_pipeline(pipeline);
    e.set_buffer(0, *codes);
    e.set_buffer(1, *scales);
    e.set_buffer(2, *biases);
    e.set_buffer(3, *x);
    e.set_buffer(4, *y);
    e.set_value(5, p);
    e.dispatch_threadgroups(groups, threads, accesses);
  }
};

// The result rounded to bf16, and a float sum over the inputs; the GEMMs round each weight to bf16 as well.
void expect_product(const std::vector<uint16_t>& y, const Weights& w, const std::vector<uint16_t>& x,
                    uint32_t rows, bool weights_are_rounded) {
  constexpr double kBf16 = 1.0 / 256, kFloat = 1.0 / (1 << 24);
  for (uint32_t m = 0; m < rows; ++m)
    for (uint32_t n = 0; n < w.outputs; ++n) {
      double sum = 0, magnitude = 0;
      for (uint32_t k = 0; k < w.inputs; ++k) {
        double weight = w.at(n, k);
        if (weights_are_rounded) weight = bf16_rounded(static_cast<float>(weight));
        const double product = weight * to_float(Bf16{x[size_t{m} * w.inputs + k]});
        sum += product;
        magnitude += std::fabs(product);
      }
      // A code times its scale plus its bias cancels: both parts count with their own size, at most 15 times
      // as large.
      const double tolerance =
          std::fabs(sum) * kBf16 + magnitude * kFloat * w.inputs * (weights_are_rounded ? 1 : 16);
      ASSERT_NEAR(to_float(Bf16{y[size_t{m} * w.outputs + n]}), sum, tolerance)
          << "row " << m << " output " << n;
    }
}

class Kernels : public testing::TestWithParam<bool> {
 protected:
  Options options(uint64_t seed, const CompiledLibrary& plain, const CompiledLibrary& traced) const {
    return {.libraries = {GetParam() ? &traced : &plain}, .seed = seed, .shuffle = seed != 0};
  }
  uint64_t n_seeds() const { return GetParam() ? 4 : 12; }
};

TEST_P(Kernels, Gemv) {
  Rng rng(1);
  const Weights w(150, 512, rng);
  const auto x = normal_bf16(w.inputs, rng);
  const metal::FunctionConstant store[] = {{0, false}};
  std::vector<uint16_t> first;
  for (uint64_t seed = 0; seed < n_seeds(); ++seed) {
    TestDevice device(metal::emulator_kernels,
                      options(seed, emulator_kernels_plain, emulator_kernels_traced));
    LinearBuffers b(device, w, x, w.outputs);
    const auto& pipeline = device.pipeline("gemv_q4_bfloat", store);
    EXPECT_EQ(device.run([&](metal::Encoder& e) {
      b.encode(e, pipeline, {1, w.outputs, w.inputs}, {(w.outputs + 7) / 8, 1, 1}, {256, 1, 1});
    }),
              "");
    EXPECT_TRUE(device->findings().empty()) << device.report();
    const auto y = device.values<uint16_t>(*b.y);
    if (seed == 0) {
      expect_product(y, w, x, 1, false);
      first = y;
    }
    EXPECT_EQ(y, first) << "the order of execution may not show, seed " << seed;
  }
}

TEST_P(Kernels, GemmWithSimdgroupMatrices) {
  Rng rng(2);
  const uint32_t rows = 45;  // a full tile and a part of one
  const Weights w(72, 192, rng);
  const auto x = normal_bf16(size_t{rows} * w.inputs, rng);
  std::vector<uint16_t> first;
  for (uint64_t seed = 0; seed < n_seeds(); ++seed) {
    TestDevice device(metal::emulator_kernels,
                      options(seed, emulator_kernels_plain, emulator_kernels_traced));
    LinearBuffers b(device, w, x, size_t{rows} * w.outputs);
    const auto& pipeline = device.pipeline("gemm_q4");
    EXPECT_EQ(device.run([&](metal::Encoder& e) {
      b.encode(e, pipeline, {rows, w.outputs, w.inputs}, {(w.outputs + 31) / 32, (rows + 31) / 32, 1},
               {128, 1, 1});
    }),
              "");
    EXPECT_TRUE(device->findings().empty()) << device.report();
    const auto y = device.values<uint16_t>(*b.y);
    if (seed == 0) {
      expect_product(y, w, x, rows, true);
      first = y;
    }
    EXPECT_EQ(y, first) << "seed " << seed;
  }
}

TEST_P(Kernels, GemmWithTensorOperations) {
  Rng rng(3);
  const uint32_t rows = 70;
  const Weights w(64, 128, rng);
  const auto x = normal_bf16(size_t{rows} * w.inputs, rng);
  TestDevice device(metal::emulator_tensor_kernels,
                    options(5, emulator_tensor_kernels_plain, emulator_tensor_kernels_traced));
  LinearBuffers b(device, w, x, size_t{rows} * w.outputs);
  EXPECT_EQ(device.run([&](metal::Encoder& e) {
    b.encode(e, device.pipeline("gemm_q4_tensor"), {rows, w.outputs, w.inputs},
             {(w.outputs + 31) / 32, (rows + 63) / 64, 1}, {128, 1, 1});
  }),
            "");
  EXPECT_TRUE(device->findings().empty()) << device.report();
  expect_product(device.values<uint16_t>(*b.y), w, x, rows, true);
}

// ---- Routing: four dispatches, the last one with a grid that the GPU decides

struct RouteParams {
  uint32_t pairs, experts, block;
};
struct Route {
  RouteParams p{64 * 8, 256, 16};
  std::vector<uint32_t> expert = std::vector<uint32_t>(p.pairs);
  std::vector<float> values = std::vector<float>(p.pairs);
  std::vector<uint32_t> offsets, block_map, pair_of, arguments;
  std::vector<float> sums;

  Route() {
    Rng rng(4);
    for (auto& e : expert) e = static_cast<uint32_t>(rng() % 16 == 0 ? rng() % 256 : rng() % 40);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  }

  // `skip`: the memory barrier that is left out, 0 for none.
  std::string run(TestDevice& device, int skip = 0) {
    auto b_expert = device.buffer("expert", expert),
         count = device.buffer("count", std::vector<uint32_t>(p.experts)),
         b_offsets = device.buffer("offsets", std::vector<uint32_t>(p.experts + 1)),
         cursor = device.buffer("cursor", std::vector<uint32_t>(p.experts)),
         map = device.buffer("block_map", std::vector<uint32_t>(2 * (p.pairs + p.experts))),
         indirect = device.buffer("indirect", std::vector<uint32_t>(3, 1)),
         b_pair_of = device.buffer("pair_of", std::vector<uint32_t>(p.pairs)),
         b_values = device.buffer("values", values),
         b_sums = device.buffer("sums", std::vector<float>(p.pairs + p.experts));
    const auto barrier = [&](metal::Encoder& e, int which) {
      if (which != skip) e.memory_barrier();
    };
    const auto bind = [&](metal::Encoder& e, const char* kernel, std::vector<const metal::Buffer*> buffers) {
      e.set_pipeline(device.pipeline(kernel));
      for (size_t i = 0; i < buffers.size(); ++i) e.set_buffer(static_cast<int>(i), *buffers[i]);
      e.set_value(static_cast<int>(buffers.size()), p);
    };
    const std::string error = device.run([&](metal::Encoder& e) {
      bind(e, "route_histogram", {b_expert.get(), count.get()});
      e.dispatch_threadgroups({p.pairs / 128, 1, 1}, {128, 1, 1}, {});
      barrier(e, 1);
      bind(e, "route_scan", {count.get(), b_offsets.get(), cursor.get(), map.get(), indirect.get()});
      e.dispatch_threadgroups({1, 1, 1}, {256, 1, 1}, {});
      barrier(e, 2);
      bind(e, "route_scatter", {b_expert.get(), cursor.get(), b_pair_of.get()});
      e.dispatch_threadgroups({p.pairs / 128, 1, 1}, {128, 1, 1}, {});
      barrier(e, 3);
      bind(e, "route_block_sum", {map.get(), b_offsets.get(), b_pair_of.get(), b_values.get(), b_sums.get()});
      e.dispatch_indirect(*indirect, 0, {32, 1, 1}, {});
    });
    offsets = device.values<uint32_t>(*b_offsets);
    block_map = device.values<uint32_t>(*map);
    pair_of = device.values<uint32_t>(*b_pair_of);
    arguments = device.values<uint32_t>(*indirect);
    sums = device.values<float>(*b_sums);
    return error;
  }

  void expect_right() const {
    std::vector<uint32_t> want(p.experts + 1);
    for (uint32_t e : expert) ++want[e + 1];
    for (size_t e = 0; e < p.experts; ++e) want[e + 1] += want[e];
    EXPECT_EQ(offsets, want);
    std::vector<bool> seen(p.pairs);
    uint32_t block = 0;
    for (uint32_t e = 0; e < p.experts; ++e) {
      for (uint32_t i = want[e]; i < want[e + 1]; ++i) {
        ASSERT_LT(pair_of[i], p.pairs);
        EXPECT_EQ(expert[pair_of[i]], e);
        EXPECT_FALSE(seen[pair_of[i]]);
        seen[pair_of[i]] = true;
      }
      for (uint32_t first = want[e]; first < want[e + 1]; first += p.block, ++block) {
        EXPECT_EQ(block_map[2 * block], e);
        EXPECT_EQ(block_map[2 * block + 1], first);
        float sum = 0;
        for (uint32_t i = first; i < std::min(first + p.block, want[e + 1]); ++i) sum += values[pair_of[i]];
        EXPECT_EQ(sums[block], sum);
      }
    }
    EXPECT_EQ(arguments, (std::vector<uint32_t>{block, 1, 1}));
  }
};

TEST_P(Kernels, RoutingWithAnIndirectGrid) {
  for (uint64_t seed = 0; seed < n_seeds(); ++seed) {
    TestDevice device(metal::emulator_kernels,
                      options(seed, emulator_kernels_plain, emulator_kernels_traced));
    Route route;
    EXPECT_EQ(route.run(device), "");
    EXPECT_TRUE(device->findings().empty()) << device.report();
    route.expect_right();
  }
}

INSTANTIATE_TEST_SUITE_P(Builds, Kernels, testing::Bool(),
                         [](const auto& build) { return build.param ? "traced" : "plain"; });

// ---- The same kernels with a barrier removed

TEST(RemovedBarrier, BetweenDispatchesIsFound) {
  for (int barrier : {1, 2, 3})
    for (uint64_t seed = 0; seed < 4; ++seed) {
      TestDevice device(metal::emulator_kernels,
                        {.libraries = {&emulator_kernels_traced}, .seed = seed, .shuffle = seed != 0});
      Route route;
      EXPECT_NE(route.run(device, barrier), "");
      EXPECT_TRUE(device.found(Finding::Kind::missing_dispatch_barrier))
          << "barrier " << barrier << " seed " << seed << ": " << device.report();
    }
}
TEST(RemovedBarrier, InAThreadgroupIsFound) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    TestDevice device(metal::emulator_broken,
                      {.libraries = {&emulator_broken_traced}, .seed = seed, .shuffle = seed != 0});
    Route route;
    EXPECT_NE(route.run(device), "");
    // Some schedules use the missing counts as an index before the other thread writes them.
    EXPECT_TRUE(device.found(Finding::Kind::race_in_threadgroup) ||
                device.found(Finding::Kind::out_of_bounds))
        << device.report();

    device->clear_findings();
    Rng rng(5);
    const Weights w(32, 64, rng);
    const auto x = normal_bf16(32 * 64, rng);
    LinearBuffers b(device, w, x, 32 * 32);
    EXPECT_NE(device.run([&](metal::Encoder& e) {
      b.encode(e, device.pipeline("gemm_q4"), {32, 32, 64}, {1, 1, 1}, {128, 1, 1});
    }),
              "");
    EXPECT_TRUE(device.found(Finding::Kind::race_in_threadgroup)) << device.report();
  }
}

TEST(EmbeddedText, HasEachHeaderOnceAndInPlace) {
  for (const metal::KernelFile& file : metal::emulator_kernels.files) {
    const size_t first = file.text.find("struct LinearParams");
    EXPECT_EQ(first != std::string_view::npos, file.name != "route.metal") << file.name;
    EXPECT_EQ(file.text.find("struct LinearParams", first + 1), std::string_view::npos) << file.name;
    EXPECT_EQ(file.text.find("#include \""), std::string_view::npos) << file.name;
    EXPECT_EQ(file.text.find("#pragma once"), std::string_view::npos) << file.name;
  }
}

// Distinct bytes of a GEMV are its operands, once; x is read again for each output.
TEST(Counters, OfAGemvAreItsOperands) {
  TestDevice device(metal::emulator_kernels,
                    {.libraries = {&emulator_kernels_traced}, .keep_counters = true});
  Rng rng(6);
  const Weights w(64, 256, rng);
  const auto x = normal_bf16(w.inputs, rng);
  LinearBuffers b(device, w, x, w.outputs);
  const metal::FunctionConstant store[] = {{0, false}};
  device.run([&](metal::Encoder& e) {
    b.encode(e, device.pipeline("gemv_q4_bfloat", store), {1, 64, 256}, {8, 1, 1}, {256, 1, 1});
  });
  const auto counters = device->take_counters();
  ASSERT_EQ(counters.size(), 1u);
  const uint64_t weight_bytes = 64 * 256 / 2 + 2 * 64 * 256 / 64 * 2;
  EXPECT_EQ(counters[0].bytes_read, weight_bytes + 256 * 2);
  EXPECT_EQ(counters[0].bytes_written, 64u * 2);
  EXPECT_GE(counters[0].traffic_read, weight_bytes + 64 * 256 * 2);
}

}  // namespace
}  // namespace lily::emulator
