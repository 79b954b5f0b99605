// Evaluation over the scripted executor, and the readers of golden files.
#include "engine/evaluate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "engine/npz.h"
#include "engine/tolerance.h"
#include "tests/engine/scripted_executor.h"

namespace lily::engine {
namespace {

std::vector<int32_t> some_text(int n) {
  std::vector<int32_t> ids;
  for (int i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(mix(static_cast<uint64_t>(i) + 99) % 100));
  return ids;
}

TEST(Score, IsTheSameForEveryChunkSize) {
  const std::vector<int32_t> ids = some_text(150);
  const std::vector<int32_t> positions = {0, 63, 64, 148};
  std::vector<double> expected;
  for (size_t p = 0; p + 1 < ids.size(); ++p) {
    const auto logits = logits_of(std::span(ids).first(p + 1), 100);
    double sum = 0;
    for (const float z : logits) sum += std::exp(static_cast<double>(z));
    expected.push_back(std::log(sum) - static_cast<double>(logits[static_cast<size_t>(ids[p + 1])]));
  }
  for (const int chunk : {1, 2, 63, 64, 0}) {
    ScriptedExecutor executor(ScriptedExecutor::small());
    int64_t last = 0;
    const ForcedScore result = score(executor, ids, positions, chunk, [&](int64_t done, int64_t total) {
      EXPECT_EQ(done, last + 1);
      EXPECT_EQ(total, 149);
      last = done;
    });
    ASSERT_EQ(result.nll.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(result.nll[i], expected[i], 1e-9) << chunk;
    ASSERT_EQ(result.rows.size(), 4u);
    EXPECT_EQ(result.rows[1][7], logits_of(std::span(ids).first(64), 100)[7]);
    const double mean = std::accumulate(expected.begin(), expected.end(), 0.0) / 149;
    EXPECT_NEAR(result.perplexity(), std::exp(mean), 1e-9);
  }
}

TEST(Score, RefusesWhatDoesNotFit) {
  ScriptedExecutor executor(ScriptedExecutor::small());
  EXPECT_THROW(score(executor, some_text(1), {}), Error);
  EXPECT_THROW(score(executor, some_text(600), {}), Error);
}

TEST(Compare, CountsAgreementAndTheLargestError) {
  ForcedScore a{.nll = {1, 2}, .positions = {0, 1}, .rows = {{1, 5, 2}, {3, 1, 2}}};
  ForcedScore b{.nll = {1, 2}, .positions = {0, 1}, .rows = {{1, 4.5f, 2}, {1, 3, 2}}};
  const ForcedReport report = compare(a, b, 3);
  EXPECT_EQ(report.top1_agreement, 1);
  EXPECT_DOUBLE_EQ(report.max_abs_logit_error, 2);
  EXPECT_DOUBLE_EQ(report.perplexity_ratio(), 1);
  EXPECT_EQ(compare(a, b, 1).top1_agreement, 2) << "padding does not count";
  const GoldenForced golden{.positions = {0, 1},
                            .n_top = 2,
                            .top_ids = {1, 2, 1, 0},
                            .top_logits = {5, 2, 1, 3.25f},
                            .perplexity = std::exp(1.0)};
  const ForcedReport against = compare(a, golden);
  EXPECT_EQ(against.top1_agreement, 1);
  EXPECT_DOUBLE_EQ(against.max_abs_logit_error, 0.25);
  EXPECT_NEAR(against.perplexity_ratio(), std::exp(0.5), 1e-12);
}

TEST(Compare, AnswersPartAtTheFirstDifference) {
  const GoldenPrompt golden{.prompt = {1}, .output = {4, 5, 6}, .margins = {1, 0.01f, 2}};
  EXPECT_TRUE(compare(std::vector<int32_t>{4, 5, 6}, golden).exact);
  const GreedyComparison parted = compare(std::vector<int32_t>{4, 9}, golden);
  EXPECT_FALSE(parted.exact);
  EXPECT_EQ(parted.n_agreed, 1);
  EXPECT_FLOAT_EQ(parted.divergence_margin, 0.01f);
  EXPECT_FLOAT_EQ(compare(std::vector<int32_t>{4, 5}, golden).divergence_margin, 2) << "too short";
  EXPECT_TRUE(std::isinf(compare(std::vector<int32_t>{4, 5, 6, 7}, golden).divergence_margin)) << "too long";
}

TEST(Greedy, EveryPromptIsAnsweredThroughTheEngine) {
  Engine engine(std::make_unique<ScriptedExecutor>(ScriptedExecutor::pipelined()), {.queue_capacity = 20});
  std::vector<GoldenPrompt> prompts;
  for (int i = 0; i < 50; ++i) {
    GoldenPrompt p{.prompt = some_text(3 + i)};
    std::vector<int32_t> tokens = p.prompt;
    for (int step = 0; step < 5; ++step) {
      p.output.push_back(plan::greedy_token(logits_of(tokens, 100)));
      p.margins.push_back(1);
      tokens.push_back(p.output.back());
    }
    prompts.push_back(p);
  }
  prompts[7].output[3] = (prompts[7].output[3] + 1) % 100;
  const GreedyReport report = run_greedy(engine, prompts, {});
  EXPECT_EQ(report.prompts, 50);
  EXPECT_EQ(report.exact, 49);
  EXPECT_EQ(report.each[7].n_agreed, 3);
  EXPECT_FLOAT_EQ(report.first_divergence_margin_max, 1);
}

// ---- Files

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string little(uint32_t value, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += static_cast<char>(value >> (8 * i) & 255);
  return out;
}

// A zip file of one stored .npy, as numpy.savez lays it out.
std::string npz_of(const std::string& header, const std::string& data, uint32_t method = 0) {
  std::string padded = header;
  while ((10 + padded.size() + 1) % 64 != 0) padded += ' ';
  padded += '\n';
  const std::string npy =
      std::string("\x93NUMPY\x01\x00", 8) + little(static_cast<uint32_t>(padded.size()), 2) + padded + data;
  const auto n = static_cast<uint32_t>(npy.size());
  const std::string name = "x.npy";
  const std::string sizes = little(0, 4) + little(n, 4) + little(n, 4);  // checksum, stored, original
  const std::string local = little(0x04034b50, 4) + little(20, 2) + little(0, 2) + little(method, 2) +
                            little(0, 4) + sizes + little(5, 2) + little(0, 2) + name + npy;
  const std::string central = little(0x02014b50, 4) + little(20, 2) + little(20, 2) + little(0, 2) +
                              little(method, 2) + little(0, 4) + sizes + little(5, 2) + little(0, 2) +
                              little(0, 2) + little(0, 2) + little(0, 2) + little(0, 4) + little(0, 4) + name;
  return local + central + little(0x06054b50, 4) + little(0, 4) + little(1, 2) + little(1, 2) +
         little(static_cast<uint32_t>(central.size()), 4) + little(static_cast<uint32_t>(local.size()), 4) +
         little(0, 2);
}

TEST(Npz, ReadsWhatNumpyWrites) {
  const std::string data = little(7, 4) + little(0xfffffffe, 4);
  const auto arrays = parse_npz(
      bytes_of(npz_of("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1), }", data)), "test.npz");
  ASSERT_TRUE(arrays.contains("x"));
  EXPECT_EQ(arrays.at("x").shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(arrays.at("x").ints(), (std::vector<int32_t>{7, -2}));
  const auto scalar = parse_npz(bytes_of(npz_of("{'descr': '<f8', 'fortran_order': False, 'shape': (), }",
                                                std::string(6, '\0') + "\xf8\x3f")),
                                "test.npz");
  EXPECT_EQ(scalar.at("x").data, std::vector<double>{1.5});
}

TEST(Npz, RefusesEverythingElseInOneLine) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  const std::string data(8, '\0');
  const auto message = [](const std::string& file) -> std::string {
    try {
      parse_npz(bytes_of(file), "test.npz");
    } catch (const Error& e) {
      EXPECT_EQ(e.fault(), Fault::model);
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message(npz_of(good, data)), "accepted");
  EXPECT_NE(message(npz_of(good, data, 8)).find("compressed"), std::string::npos);
  EXPECT_NE(message(npz_of("{'descr': '<c8', 'fortran_order': False, 'shape': (2,), }", data)).find("<c8"),
            std::string::npos);
  EXPECT_NE(message(npz_of("{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }", data)).find("Fortran"),
            std::string::npos);
  EXPECT_NE(message(npz_of("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", data)), "accepted");
  EXPECT_NE(
      message(npz_of("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", data)),
      "accepted");
  EXPECT_NE(message(""), "accepted");
}

// Whatever happens to a file, reading ends with an array or with an error.
TEST(Npz, SurvivesDamage) {
  const std::string good =
      npz_of("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", std::string(24, 'a'));
  std::mt19937 random(1);
  int refused = 0;
  const auto read = [&](const std::string& file) {
    try {
      parse_npz(bytes_of(file), "damaged");
    } catch (const Error&) {
      ++refused;
    }
  };
  for (size_t n = 0; n < good.size(); ++n) read(good.substr(0, n));
  EXPECT_EQ(refused, static_cast<int>(good.size()));
  for (int i = 0; i < 20000; ++i) {
    std::string bad = good;
    for (int flips = 0; flips < 3; ++flips)
      bad[random() % bad.size()] ^= static_cast<char>(1u << random() % 8);
    read(bad);
  }
}

TEST(Goldens, SayWhatIsMissing) {
  try {
    load_goldens("tests/engine", 8161);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.fault(), Fault::user);
    EXPECT_NE(std::string(e.what()).find("prompts.jsonl"), std::string::npos);
  }
  const Goldens goldens = load_goldens("tests/golden/lily-tiny", 8161);
  EXPECT_EQ(goldens.prompts.size(), 29u);
  EXPECT_EQ(goldens.forced->ids.size(), 2048u);
  EXPECT_NEAR(goldens.forced->perplexity, 8.9367, 1e-4);
  EXPECT_EQ(goldens.long_prompt->prompt.size(), 5764u);
}

// ---- Tolerances

TEST(Tolerance, GrowsWithLengthDepthAndCoarserTypes) {
  plan::Policy f32, bf16;
  f32.kv = plan::KvType::f32;
  bf16.activation = bf16.residual = plan::FloatType::bf16;
  const Precision reference = precision_of("reference", f32), cpu = precision_of("cpu", f32),
                  gpu = precision_of("metal", bf16);
  const model::Dims dims = model::lily_tiny();
  EXPECT_LT(network_tolerance(reference, dims, 8), network_tolerance(cpu, dims, 8));
  EXPECT_LT(network_tolerance(cpu, dims, 8), network_tolerance(gpu, dims, 8));
  EXPECT_LT(network_tolerance(gpu, dims, 1), network_tolerance(gpu, dims, 8));
  EXPECT_LT(network_tolerance(reference, dims, 8), 1e-4) << "fp32 paths can be held to 1e-4";
  EXPECT_LT(network_tolerance(gpu, dims, 8), 0.3) << "a tolerance that lets a wrong layer pass is none";
  const OpSize small{.n_terms = 64, .n_stages = 1, .dots = true},
      large{.n_terms = 4096, .n_stages = 3, .dots = true};
  EXPECT_LT(op_tolerance(cpu, small, 1, 1), op_tolerance(cpu, large, 1, 1));
  EXPECT_DOUBLE_EQ(op_tolerance(cpu, small, 0, 0), 0);
  EXPECT_LT(op_tolerance(cpu, small, 1, 1), 1e-3);
}

TEST(Tolerance, SizesComeFromThePlan) {
  plan::Policy policy;
  policy.decode.gate_up = policy.decode.down_combine = true;
  const model::Dims dims = model::qwen36_35b_a3b();
  const plan::Plan plan = plan::forward(dims, {.ending = plan::Ending::logits}, policy);
  int n_seen = 0;
  for (const plan::Op& op : plan.ops) {
    const OpSize size = op_size(plan, op);
    EXPECT_GE(size.n_stages, 1);
    if (std::holds_alternative<plan::ExpertsGateUp>(op)) {
      EXPECT_EQ(size.n_terms, dims.hidden);
      EXPECT_EQ(size.n_stages, 3);
      EXPECT_TRUE(size.dots);
      ++n_seen;
    }
    if (std::holds_alternative<plan::Add>(op)) EXPECT_FALSE(size.dots);
  }
  EXPECT_EQ(n_seen, dims.n_layers);
}

}  // namespace
}  // namespace lily::engine
