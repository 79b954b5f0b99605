// The backend as a whole on the bundled model: the golden layer outputs, and what must not change a bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>

#include "backend/backend.h"
#include "backend/cpu/kernels/targets.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "model/checkpoint.h"
#include "model/synth.h"
#include "plan/plan.h"
#include "plan/sample.h"
#include "tests/support/cpu_backends.h"
#include "tests/support/golden.h"

namespace lily::backend {
namespace {

using plan::Ending;
using plan::KvType;
using plan::Mechanism;
using plan::Phase;
using plan::Policy;
using test::GoldenTensor;

// Activations enter a product with an error of at most 2^-16 of their group's peak, uniform: RMS 2^-16 /
// sqrt(3) of the peak, which is 3 times the group's RMS for normal values and 8 times for one outlier; 5
// here. A layer has 4 products one behind the other, the path through 8 layers 32, whose errors are
// independent: 2^-16 / sqrt(3) * 5 * sqrt(32).
constexpr double kTolerance = 2.5e-4;

double relative_error(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

plan::Fusions no_fusions() { return {}; }

class CpuBackend : public testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() {
    checkpoint_ = new model::Checkpoint(model::Checkpoint::open(test::kTinyModel));
    goldens_ = new auto(test::read_golden_tensors(std::string(test::kTinyGoldens) + "/layers.safetensors"));
  }
  static void TearDownTestSuite() {
    delete goldens_;
    delete checkpoint_;
  }

  static const model::Dims& dims() { return checkpoint_->dims(); }
  static const GoldenTensor& golden(const std::string& name) { return goldens_->at(name); }
  static std::vector<int32_t> prompt() {
    const auto& ids = golden("ids").data;
    return {ids.begin(), ids.end()};
  }
  static std::unique_ptr<Device> loaded_device(int threads) {
    auto device = make_device(GetParam(), {.threads = threads});
    device->load(*checkpoint_, {});
    return device;
  }
  static plan::Plan make_plan(int rows, int outputs, const Policy& policy, Ending ending = Ending::logits,
                              bool keep_values = true) {
    const plan::Shape shape{.phase = rows <= 8 ? Phase::decode : Phase::prefill,
                            .rows = rows,
                            .outputs = outputs,
                            .context = 1024,
                            .ending = ending};
    return plan::forward(dims(), shape, policy, {.keep_values = keep_values});
  }

  static model::Checkpoint* checkpoint_;
  static std::map<std::string, GoldenTensor>* goldens_;
};

model::Checkpoint* CpuBackend::checkpoint_ = nullptr;
std::map<std::string, GoldenTensor>* CpuBackend::goldens_ = nullptr;

INSTANTIATE_TEST_SUITE_P(InstructionSets, CpuBackend, testing::ValuesIn(test::cpu_backends()),
                         test::backend_test_name);

// One sequence on a device.
struct Sequence {
  Device& device;
  StateSlot slot{0};
  std::vector<int32_t> blocks = {2, 0, 3, 1, 5, 4, 9, 8, 7, 6};
  int32_t position = 0;
  int32_t n_tokens = 8000;  // the vocabulary's other rows are padding

  StepInputs inputs(std::span<const int32_t> tokens, int n_outputs) {
    segments = {{.n_rows = static_cast<int32_t>(tokens.size()),
                 .position = position,
                 .src = position == 0 ? kNoState : slot,
                 .dst = slot,
                 .token_in = TokenSlot{0},
                 .token_out = TokenSlot{1}}};
    output_rows.clear();
    for (int i = 0; i < n_outputs; ++i)
      output_rows.push_back(static_cast<int32_t>(tokens.size()) - n_outputs + i);
    return {.tokens = tokens,
            .segments = segments,
            .block_table = blocks,
            .output_rows = output_rows,
            .n_tokens = n_tokens};
  }
  StepOutputs run(Program& program, std::span<const int32_t> tokens, int n_outputs) {
    program.submit(inputs(tokens, n_outputs));
    position += static_cast<int32_t>(tokens.size());
    return program.wait();
  }

  std::vector<Segment> segments;
  std::vector<int32_t> output_rows;
};

TEST_P(CpuBackend, EveryLayerAgreesWithTheGoldens) {
  const auto device = loaded_device(2);
  Policy policy = device->policy(dims());
  policy.kv = KvType::f32;
  policy.prefill = policy.decode = no_fusions();
  device->reserve({.n_state_slots = 1, .n_kv_blocks = 6}, policy);
  Sequence sequence{*device};
  const std::pair<const char*, const char*> names[] = {
      {"input_norm", "input_norm"}, {"mixer_out", "mixer_out"},           {"post_norm", "post_norm"},
      {"router_ids", "router_ids"}, {"router_weights", "router_weights"}, {"out", "out"}};
  const auto check = [&](Program& program, const std::string& prefix) {
    int n_compared = 0;
    double worst = 0;
    for (size_t v = 0; v < program.plan().values.size(); ++v) {
      const std::string& name = program.plan().values[v].name;
      for (const auto& [ours, theirs] : names) {
        const size_t dot = name.rfind('.');
        if (dot == std::string::npos || name.substr(dot + 1) != ours) continue;
        const std::string layer = name.substr(name.find('.') + 1, dot - name.find('.') - 1);
        const auto& expected = golden(prefix + "layer." + layer + "." + theirs).data;
        const auto found = program.read(plan::ValueId{static_cast<int32_t>(v)});
        if (std::string_view(ours) == "router_ids") EXPECT_EQ(found, expected) << name;
        else EXPECT_LT(relative_error(found, expected), kTolerance) << name;
        worst = std::max(worst, relative_error(found, expected));
        ++n_compared;
      }
    }
    EXPECT_EQ(n_compared, 6 * dims().n_layers);
    RecordProperty(prefix + "worst_relative_error", std::to_string(worst));
    for (int layer = 0; layer < dims().n_layers; ++layer) {
      const std::string name = prefix + "layer." + std::to_string(layer) + ".";
      if (dims().mixer(layer) == model::Mixer::delta) {
        EXPECT_LT(relative_error(device->read_delta_state(StateSlot{0}, layer),
                                 golden(name + "recurrent_state").data),
                  kTolerance);
        // Golden: [channel][4 last inputs]; ours: [3 last rows][channel].
        const auto& expected = golden(name + "conv_state").data;
        const auto found = device->read_conv_state(StateSlot{0}, layer);
        const auto channels = static_cast<size_t>(dims().conv_channels());
        std::vector<float> transposed(3 * channels);
        for (size_t ch = 0; ch < channels; ++ch)
          for (size_t r = 0; r < 3; ++r) transposed[r * channels + ch] = expected[ch * 4 + r + 1];
        EXPECT_LT(relative_error(found, transposed), kTolerance);
      } else {
        for (const auto& [which, cache] :
             {std::pair{Device::Kv::k, "k_cache"}, std::pair{Device::Kv::v, "v_cache"}}) {
          std::vector<float> found;  // one KV head: [position][256] is both layouts
          for (int first = 0; first < sequence.position; first += kKvBlockTokens) {
            const auto part =
                device->read_kv(which, layer, sequence.blocks[static_cast<size_t>(first / kKvBlockTokens)],
                                std::min(kKvBlockTokens, sequence.position - first));
            found.insert(found.end(), part.begin(), part.end());
          }
          EXPECT_LT(relative_error(found, golden(name + cache).data), kTolerance) << name;
        }
      }
    }
  };
  const auto n = static_cast<int>(prompt().size());
  const auto prefill = device->compile(make_plan(n, n, policy));
  StepOutputs out = sequence.run(*prefill, prompt(), n);
  // Padding rows of the vocabulary are masked; compare the others.
  const auto real = [&](std::span<const float> rows) {
    std::vector<float> kept;
    for (size_t row = 0; row < rows.size(); row += static_cast<size_t>(dims().vocab))
      kept.insert(kept.end(), rows.begin() + static_cast<ptrdiff_t>(row),
                  rows.begin() + static_cast<ptrdiff_t>(row + 8000));
    return kept;
  };
  EXPECT_LT(relative_error(real(out.logits), real(golden("logits").data)), kTolerance);
  EXPECT_EQ(out.logits[8000], -INFINITY);
  check(*prefill, "");
  const auto decode = device->compile(make_plan(1, 1, policy));
  const std::vector<int32_t> token = {static_cast<int32_t>(golden("decode.token").data[0])};
  out = sequence.run(*decode, token, 1);
  EXPECT_LT(relative_error(real(out.logits), real(golden("decode.logits").data)), kTolerance);
  check(*decode, "decode.");
}

// All logits of a prompt read in chunks.
std::vector<float> logits_of(Device& device, const model::Dims& dims, const Policy& policy,
                             std::span<const int32_t> tokens, int chunk) {
  device.reserve({.n_state_slots = 1, .n_kv_blocks = 10}, policy);
  Sequence sequence{device};
  sequence.n_tokens = std::min(dims.vocab - 3, 8000);
  const plan::Shape shape{.phase = chunk <= 8 ? Phase::decode : Phase::prefill,
                          .rows = chunk,
                          .outputs = chunk,
                          .context = 1024,
                          .ending = Ending::logits};
  const auto program = device.compile(plan::forward(dims, shape, policy));
  std::vector<float> logits;
  for (size_t first = 0; first < tokens.size(); first += static_cast<size_t>(chunk)) {
    const size_t n = std::min(static_cast<size_t>(chunk), tokens.size() - first);
    const auto out = sequence.run(*program, tokens.subspan(first, n), static_cast<int>(n)).logits;
    logits.insert(logits.end(), out.begin(), out.end());
  }
  return logits;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_P(CpuBackend, ChunksThreadsFusionsAndStagesDoNotChangeABit) {
  const auto device = loaded_device(2);
  const Policy policy = device->policy(dims());
  const auto tokens = prompt();
  const auto expected = logits_of(*device, dims(), policy, tokens, static_cast<int>(tokens.size()));
  for (const int chunk : {1, 3, 8, 9, 33})
    EXPECT_TRUE(same_bits(logits_of(*device, dims(), policy, tokens, chunk), expected))
        << "chunks of " << chunk;
  EXPECT_TRUE(same_bits(logits_of(*device, dims(), policy, tokens, 72), expected)) << "a second run";
  Policy plain = policy;
  plain.prefill = plain.decode = no_fusions();
  for (const int chunk : {8, 72}) {
    EXPECT_TRUE(same_bits(logits_of(*device, dims(), plain, tokens, chunk), expected))
        << "no fusions, " << chunk;
    for (const Mechanism m : {Mechanism::d3, Mechanism::d4, Mechanism::d6, Mechanism::d7, Mechanism::p5})
      EXPECT_TRUE(same_bits(logits_of(*device, dims(), *plan::without(policy, m), tokens, chunk), expected))
          << plan::name(m) << ", " << chunk;
  }
  for (const int threads : {1, 3}) {
    const auto other = loaded_device(threads);
    for (const int chunk : {1, 72})
      EXPECT_TRUE(same_bits(logits_of(*other, dims(), other->policy(dims()), tokens, chunk), expected))
          << threads << " threads, chunks of " << chunk;
  }
}

TEST_P(CpuBackend, OtherArithmeticOfTheAblationsAgreesWithinTolerance) {
  const auto device = loaded_device(2);
  const Policy policy = device->policy(dims());
  const auto tokens = prompt();
  const auto expected = logits_of(*device, dims(), policy, tokens, 72);
  const auto real = [&](const std::vector<float>& rows) {
    std::vector<float> kept;
    for (size_t row = 0; row < rows.size(); row += static_cast<size_t>(dims().vocab))
      kept.insert(kept.end(), rows.begin() + static_cast<ptrdiff_t>(row),
                  rows.begin() + static_cast<ptrdiff_t>(row + 8000));
    return kept;
  };
  const auto blocks = logits_of(*device, dims(), *plan::without(policy, Mechanism::p4), tokens, 72);
  EXPECT_FALSE(same_bits(blocks, expected));
  EXPECT_LT(relative_error(real(blocks), real(expected)), kTolerance);
  // Weights rounded to bf16: 2^-9 relative at most, uniform, independent for each weight, in 3 products of a
  // layer.
  const auto expanded = logits_of(*device, dims(), *plan::without(policy, Mechanism::p1), tokens, 72);
  EXPECT_FALSE(same_bits(expanded, expected));
  EXPECT_LT(relative_error(real(expanded), real(expected)), 0x1p-9 * std::sqrt(3.0 * 8));
}

TEST_P(CpuBackend, SequencesOfOneStepDoNotTouchEachOther) {
  const auto device = loaded_device(2);
  const Policy policy = device->policy(dims());
  const auto tokens = prompt();
  // Two sequences, one after the other and then together in steps of 4 + 3 rows.
  const std::span<const int32_t> a(tokens.data(), 20), b(tokens.data() + 30, 15);
  const auto alone_a = logits_of(*device, dims(), policy, a, 4),
             alone_b = logits_of(*device, dims(), policy, b, 3);
  device->reserve({.n_state_slots = 3, .n_kv_blocks = 4}, policy);
  const auto program = device->compile(make_plan(7, 7, policy));
  const std::vector<int32_t> table = {3, 1}, rows = {0, 1, 2, 3, 4, 5, 6};
  for (int32_t i = 0; i < 5; ++i) {
    std::vector<int32_t> step_tokens(a.begin() + 4 * i, a.begin() + 4 * i + 4);
    step_tokens.insert(step_tokens.end(), b.begin() + 3 * i, b.begin() + 3 * i + 3);
    const std::vector<Segment> segments = {{.first_row = 0,
                                            .n_rows = 4,
                                            .position = 4 * i,
                                            .src = i == 0 ? kNoState : StateSlot{2},
                                            .dst = StateSlot{2},
                                            .first_block = 0},
                                           {.first_row = 4,
                                            .n_rows = 3,
                                            .position = 3 * i,
                                            .src = i == 0 ? kNoState : StateSlot{i % 2},
                                            .dst = StateSlot{1 - i % 2},
                                            .first_block = 1}};
    program->submit({.tokens = step_tokens,
                     .segments = segments,
                     .block_table = table,
                     .output_rows = rows,
                     .n_tokens = 8000});
    const auto out = program->wait().logits;
    const auto row_floats = static_cast<size_t>(dims().vocab);
    EXPECT_EQ(0, std::memcmp(out.data(), alone_a.data() + static_cast<size_t>(4 * i) * row_floats,
                             4 * row_floats * 4));
    EXPECT_EQ(0, std::memcmp(out.data() + 4 * row_floats,
                             alone_b.data() + static_cast<size_t>(3 * i) * row_floats, 3 * row_floats * 4));
  }
}

TEST_P(CpuBackend, EndingsFollowFromTheLogits) {
  const auto device = loaded_device(2);
  const Policy policy = device->policy(dims());
  const auto tokens = prompt();
  device->reserve({.n_state_slots = 1, .n_kv_blocks = 6, .n_token_slots = 2}, policy);
  const auto run = [&](Ending ending, std::span<const Sampling> sampling = {}) {
    const auto program = device->compile(make_plan(72, 1, policy, ending, false));
    Sequence sequence{*device};
    StepInputs in = sequence.inputs(tokens, ending == Ending::none ? 0 : 1);
    in.sampling = sampling;
    program->submit(in);
    const StepOutputs out = program->wait();
    return std::tuple(std::vector<float>(out.logits.begin(), out.logits.end()),
                      std::vector<int32_t>(out.tokens.begin(), out.tokens.end()),
                      std::vector<int32_t>(out.candidate_ids.begin(), out.candidate_ids.end()),
                      std::vector<float>(out.logsumexp.begin(), out.logsumexp.end()));
  };
  const auto logits = std::get<0>(run(Ending::logits));
  const std::span<const float> real(logits.data(), 8000);
  EXPECT_EQ(std::get<1>(run(Ending::greedy)), std::vector{plan::greedy_token(real)});
  const Sampling sampling{.temperature = 1, .top_p = 0.9f, .top_k = 40, .seed = 7, .sequence = 1, .step = 5};
  EXPECT_EQ(std::get<1>(run(Ending::sampled, {&sampling, 1})),
            std::vector{plan::sample_token(real, {1, 0.9f, 0, 40}, plan::uniform(7, 1, 5))});
  const auto [no_logits, no_tokens, ids, sums] = run(Ending::candidates);
  ASSERT_EQ(ids.size(), 64u);
  EXPECT_EQ(ids[0], plan::greedy_token(real));
  ASSERT_EQ(sums.size(), 1u);
  EXPECT_NEAR(sums[0], plan::logsumexp(real), 0x1p-20 + 0x1p-23 * std::abs(sums[0]));  // ending_test.cc
  EXPECT_TRUE(no_logits.empty() && no_tokens.empty());
}

TEST_P(CpuBackend, ATokenSlotCarriesTheTokenToTheNextStep) {
  const auto device = loaded_device(2);
  const Policy policy = device->policy(dims());
  const auto tokens = prompt();
  device->reserve({.n_state_slots = 1, .n_kv_blocks = 6, .n_token_slots = 2}, policy);
  const auto prefill = device->compile(make_plan(72, 1, policy, Ending::greedy, false));
  const auto decode = device->compile(make_plan(1, 1, policy, Ending::greedy, false));
  const auto generate = [&](bool through_slot) {
    Sequence sequence{*device};
    std::vector<int32_t> generated = {sequence.run(*prefill, tokens, 1).tokens[0]};
    int in = 1, out = 0;
    for (int i = 0; i < 6; ++i) {
      const std::vector<int32_t> token = {through_slot ? kTokenFromSlot : generated.back()};
      StepInputs inputs = sequence.inputs(token, 1);
      sequence.segments[0].token_in = TokenSlot{in};
      sequence.segments[0].token_out = TokenSlot{out};
      std::swap(in, out);
      decode->submit(inputs);
      ++sequence.position;
      generated.push_back(decode->wait().tokens[0]);
    }
    return generated;
  };
  EXPECT_EQ(generate(true), generate(false));
}

// A model whose dimensions share nothing with the bundled one: 6 query heads a KV head, odd numbers of heads
// and of tiles, a vocabulary that ends inside a tile.
TEST_P(CpuBackend, OtherDimensionsAgreeWithTheReference) {
  model::Dims other = dims();
  other.hidden = 192;
  other.n_layers = 4;
  other.vocab = 523;
  other.n_q_heads = 12;
  other.n_kv_heads = 2;
  other.n_key_heads = 3;
  other.n_value_heads = 6;
  other.n_experts = 23;
  other.expert_width = 64;
  other.shared_width = 192;
  const auto folder =
      std::filesystem::temp_directory_path() / fmt::format("lily_cpu_backend_test_{}", getpid());
  ThreadPool pool(2);
  model::write_synthetic(other, folder, {}, pool, {});
  const auto checkpoint = model::Checkpoint::open(folder);
  std::vector<int32_t> tokens(600);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i * 7 % 520);

  const auto device = make_device(GetParam(), {.threads = 2}),
             reference = make_device("reference", {.threads = 2});
  device->load(checkpoint, {});
  reference->load(checkpoint, {});
  std::filesystem::remove_all(folder);
  Policy policy = device->policy(other);
  policy.kv = KvType::f32;
  const std::span<const int32_t> few(tokens.data(), 40);
  const auto wanted = logits_of(*reference, other, reference->policy(other), few, 40);
  for (const int chunk : {1, 7, 40}) {
    const auto found = logits_of(*device, other, policy, few, chunk);
    for (size_t row = 0; row < 40; ++row) {
      const auto part = [&](const std::vector<float>& rows) {
        return std::span(rows).subspan(row * static_cast<size_t>(other.vocab), 520);
      };
      EXPECT_LT(relative_error(part(found), part(wanted)), kTolerance)
          << "row " << row << ", chunks of " << chunk;
    }
  }
  // Past the first split of the cache. With one plane of activations a row is still quantised alone.
  policy = device->policy(other);
  policy.activation_planes = 1;
  const auto coarse = logits_of(*device, other, policy, tokens, 600);
  for (const int chunk : {8, 128})
    EXPECT_TRUE(same_bits(logits_of(*device, other, policy, tokens, chunk), coarse));
  policy.activation_planes = 2;
  const auto whole = logits_of(*device, other, policy, tokens, 600);
  EXPECT_FALSE(same_bits(coarse, whole)) << "one plane changed nothing";
  for (const int chunk : {8, 128})
    EXPECT_TRUE(same_bits(logits_of(*device, other, policy, tokens, chunk), whole));
  const Policy unpacked = *plan::without(*plan::without(policy, Mechanism::d6), Mechanism::d7);
  for (const int chunk : {8, 600})
    EXPECT_TRUE(same_bits(logits_of(*device, other, unpacked, tokens, chunk), whole));
}

// Two devices of one process take turns, each on its own instruction set.
TEST_P(CpuBackend, StepsRunOnTheInstructionSetOfTheirDevice) {
  const auto program_of = [](Device& device) {
    const Policy policy = device.policy(dims());
    device.reserve({.n_state_slots = 1, .n_kv_blocks = 6}, policy);
    return device.compile(make_plan(9, 1, policy, Ending::greedy, false));
  };
  const std::vector<int32_t> tokens(9, 5);
  const auto target_of = [&](Device& device, Program& program) {
    Sequence{device}.run(program, tokens, 1);
    return cpu::current_target();
  };
  const auto device = loaded_device(1), best = make_device("cpu", {.threads = 1});
  best->load(*checkpoint_, {});
  const auto program = program_of(*device), best_program = program_of(*best);
  const cpu::SimdTarget own = GetParam() == "cpu" ? cpu::runnable_targets().front() : cpu::SimdTarget::avx2;
  EXPECT_TRUE(device->info().name.ends_with(cpu::to_string(own))) << device->info().name;
  EXPECT_EQ(device->info().backend, GetParam());
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(target_of(*best, *best_program), cpu::runnable_targets().front());
    EXPECT_EQ(target_of(*device, *program), own);
  }
}

// The edges of blocks, tiles and splits, and chunks that end on neither: what a chunk's own rows read is what
// later chunks read, so the logits are the same to the bit.
TEST_P(CpuBackend, AnInt8CacheGivesTheSameBitsForAnyChunks) {
  const auto device = loaded_device(1);
  Policy policy = device->policy(dims());
  policy.kv = KvType::int8;
  std::vector<int32_t> tokens = prompt();
  for (size_t i = 0; tokens.size() < 530; ++i) tokens.push_back(tokens[i]);
  for (const size_t n : {1, 31, 32, 33, 64, 65, 530}) {
    const std::span<const int32_t> text(tokens.data(), n);
    const auto whole = logits_of(*device, dims(), policy, text, static_cast<int>(n));
    for (const int chunk : {7, 33}) {
      if (n > 65 && chunk == 7) continue;
      EXPECT_TRUE(same_bits(logits_of(*device, dims(), policy, text, chunk), whole))
          << n << " tokens in chunks of " << chunk;
    }
  }
  const std::span<const int32_t> text(tokens.data(), 72);
  const auto expected = logits_of(*device, dims(), policy, text, 72);
  EXPECT_FALSE(same_bits(logits_of(*device, dims(), device->policy(dims()), text, 72), expected));
  for (const Mechanism m : {Mechanism::d4, Mechanism::d6, Mechanism::d7})
    EXPECT_TRUE(same_bits(logits_of(*device, dims(), *plan::without(policy, m), text, 8), expected))
        << plan::name(m);
  EXPECT_TRUE(same_bits(logits_of(*loaded_device(2), dims(), policy, text, 72), expected)) << "2 threads";
}

TEST_P(CpuBackend, AnInt8CacheIsCopiedAndReadBackWithoutAChange) {
  const auto device = loaded_device(1);
  Policy policy = device->policy(dims());
  policy.kv = KvType::int8;
  device->reserve({.n_state_slots = 1, .n_kv_blocks = 3}, policy);
  std::vector<float> kv(64 * static_cast<size_t>(dims().kv_width()));
  for (size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<float>(i % 997) * 0.37f - 150;
  for (const auto which : {Device::Kv::k, Device::Kv::v}) {
    device->write_kv(which, 7, 1, 64, kv);
    const auto held = device->read_kv(which, 7, 1, 64);
    EXPECT_LT(relative_error(held, kv), 0.01);
    device->write_kv(which, 3, 2, 64, held);
    EXPECT_EQ(device->read_kv(which, 3, 2, 64), held);
  }
}

TEST_P(CpuBackend, StatesAndCacheAreReadBackAsWritten) {
  const auto device = loaded_device(1);
  Policy policy = device->policy(dims());
  policy.kv = KvType::f32;
  device->reserve({.n_state_slots = 2, .n_kv_blocks = 2}, policy);
  std::vector<float> delta(static_cast<size_t>(dims().n_value_heads) * 128 * 128),
      conv(3 * static_cast<size_t>(dims().conv_channels()));
  for (size_t i = 0; i < delta.size(); ++i) delta[i] = static_cast<float>(i);
  for (size_t i = 0; i < conv.size(); ++i) conv[i] = -static_cast<float>(i);
  device->write_delta_state(StateSlot{0}, 4, delta);
  device->write_conv_state(StateSlot{0}, 4, conv);
  device->copy_state(StateSlot{0}, StateSlot{1});
  device->write_delta_state(StateSlot{0}, 4, std::vector<float>(delta.size(), 9.0f));
  EXPECT_EQ(device->read_delta_state(StateSlot{1}, 4), delta);
  EXPECT_EQ(device->read_conv_state(StateSlot{1}, 4), conv);
  std::vector<float> kv(40 * static_cast<size_t>(dims().kv_width()));
  for (size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<float>(i) * 0.5f;
  device->write_kv(Device::Kv::v, 7, 1, 40, kv);
  device->write_kv(Device::Kv::k, 7, 1, 40, std::vector<float>(kv.size(), 1.0f));
  EXPECT_EQ(device->read_kv(Device::Kv::v, 7, 1, 40), kv);
}

}  // namespace
}  // namespace lily::backend
