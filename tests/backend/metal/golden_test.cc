// The whole model on the emulated GPU against the outputs of an independent implementation.
//
// The bounds are those of a bf16 engine that works: perplexity within 0.5 %, the same top token at 184 of 192
// positions, greedy answers equal up to the first step at which the golden margin is below 0.5.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "backend/metal/lower.h"
#include "tests/backend/metal/rig.h"
#include "tests/support/golden.h"

namespace lily {
namespace {

using backend::StateSlot;
using plan::Ending;
using plan::Phase;

// One array of an uncompressed .npz: a stored zip whose members are .npy files.
template <typename T>
std::vector<T> npz_array(const std::string& path, const std::string& name) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  const size_t member = bytes.find(name + ".npy");
  const size_t magic = bytes.find("\x93NUMPY", member);
  if (member == std::string::npos || magic == std::string::npos)
    throw std::runtime_error(path + ": no " + name);
  uint16_t header = 0;
  std::memcpy(&header, &bytes[magic + 8], 2);
  const std::string description = bytes.substr(magic + 10, header);
  const size_t open = description.find('('), close = description.find(')');
  size_t n = 1;
  for (size_t i = open + 1; i < close;) {
    n *= std::stoul(description.substr(i));
    i = description.find(',', i);
    if (i >= close) break;
    ++i;
    while (i < close && description[i] == ' ') ++i;
  }
  std::vector<T> values(n);
  std::memcpy(values.data(), &bytes[magic + 10 + header], n * sizeof(T));
  return values;
}

plan::Plan make_plan(Phase phase, int rows, int outputs, Ending ending, const plan::Policy& policy,
                     int64_t context = 2048) {
  return plan::forward(
      test::tiny_checkpoint().dims(),
      {.phase = phase, .rows = rows, .outputs = outputs, .context = context, .ending = ending}, policy);
}

struct TeacherForced {
  double perplexity = 0;
  int same_top = 0;
};

TeacherForced teacher_forced(metal::MetalDevice& device, const plan::Policy& policy, int chunk) {
  const std::string path = std::string(test::kTinyGoldens) + "/teacher_forced.npz";
  const auto ids = npz_array<int32_t>(path, "ids");
  const auto positions = npz_array<int32_t>(path, "positions");
  const auto top_ids = npz_array<int32_t>(path, "top_ids");
  const int vocab = test::tiny_checkpoint().dims().vocab;
  const auto program = device.compile(make_plan(Phase::prefill, chunk, chunk, Ending::logits, policy));
  double nll = 0;
  TeacherForced result;
  for (int first = 0; first < static_cast<int>(ids.size()); first += chunk) {
    const int n = std::min(chunk, static_cast<int>(ids.size()) - first);
    const test::Inputs inputs({{.tokens = {ids.begin() + first, ids.begin() + first + n},
                                .position = first,
                                .src = first == 0 ? backend::kNoState : StateSlot{0},
                                .dst = StateSlot{0}}},
                              32, vocab);
    program->submit(inputs.get());
    const std::span<const float> logits = program->wait().logits;
    for (int r = 0; r < n && first + r + 1 < static_cast<int>(ids.size()); ++r) {
      const auto row =
          logits.subspan(static_cast<size_t>(r) * static_cast<size_t>(vocab), static_cast<size_t>(vocab));
      double sum = 0;
      for (const float x : row) sum += std::exp(static_cast<double>(x));
      nll += std::log(sum) - row[static_cast<size_t>(ids[static_cast<size_t>(first + r + 1)])];
      for (size_t k = 0; k < positions.size(); ++k)
        if (positions[k] == first + r)
          result.same_top += std::max_element(row.begin(), row.end()) - row.begin() == top_ids[k * 64];
    }
  }
  result.perplexity = std::exp(nll / static_cast<double>(ids.size() - 1));
  return result;
}

class Golden : public testing::TestWithParam<plan::KvType> {
 protected:
  test::EmulatedMetal metal_ = test::make_emulated_metal(test::tiny_checkpoint(), {.kv = GetParam()});
  static plan::Policy policy() {
    plan::Policy p = metal::default_policy();
    p.kv = GetParam();
    return p;
  }
};

TEST_P(Golden, TeacherForcedPrefillAgrees) {
  const TeacherForced got = teacher_forced(*metal_.device, policy(), 512);
  fmt::print("{}: perplexity {:.5f}, same top token at {} of 192\n", plan::name(GetParam()), got.perplexity,
             got.same_top);
  EXPECT_NEAR(got.perplexity, 8.9367, 0.005 * 8.9367);
  EXPECT_GE(got.same_top, 184);
}

// Prefill of the prompt, then steps that feed one another through the token slot, two in flight.
TEST_P(Golden, GreedyAnswersAgreeUpToTheFirstNarrowMargin) {
  metal::MetalDevice& device = *metal_.device;
  const int vocab = test::tiny_checkpoint().dims().vocab;
  const auto prefill = device.compile(make_plan(Phase::prefill, 128, 1, Ending::greedy, policy(), 1024));
  const auto decode = device.compile(make_plan(Phase::decode, 1, 1, Ending::greedy, policy(), 1024));
  std::ifstream file(std::string(test::kTinyGoldens) + "/prompts.jsonl");
  int n_prompts = 0, n_tokens = 0;
  for (std::string line; std::getline(file, line);) {
    const auto golden = nlohmann::json::parse(line);
    const auto prompt = golden.at("prompt_ids").get<std::vector<int32_t>>();
    const auto output = golden.at("output_ids").get<std::vector<int32_t>>();
    const auto margins = golden.at("margins").get<std::vector<float>>();
    if (++n_prompts > 6) break;
    std::vector<int32_t> got;
    for (int first = 0; first < static_cast<int>(prompt.size()); first += 128) {
      const int n = std::min(128, static_cast<int>(prompt.size()) - first);
      test::Inputs inputs({{.tokens = {prompt.begin() + first, prompt.begin() + first + n},
                            .position = first,
                            .src = first == 0 ? backend::kNoState : StateSlot{0},
                            .dst = StateSlot{0}}},
                          16, vocab, false);
      inputs.segments()[0].token_out = backend::TokenSlot{0};
      prefill->submit(inputs.get());
      const auto tokens = prefill->wait().tokens;
      if (first + n == static_cast<int>(prompt.size())) got.push_back(tokens[0]);
    }
    size_t n_compared = 0;
    while (n_compared < output.size() && n_compared < 40 && margins[n_compared] >= 0.5f) ++n_compared;
    const auto submit = [&](size_t step) {
      test::Inputs inputs({{.tokens = {backend::kTokenFromSlot},
                            .position = static_cast<int>(prompt.size() + step),
                            .src = StateSlot{0},
                            .dst = StateSlot{0}}},
                          16, vocab, false);
      inputs.segments()[0].token_in = backend::TokenSlot{static_cast<int>(step % 2)};
      inputs.segments()[0].token_out = backend::TokenSlot{static_cast<int>((step + 1) % 2)};
      decode->submit(inputs.get());
    };
    if (n_compared > 1) submit(0);
    for (size_t step = 1; step < n_compared; ++step) {
      if (step + 1 < n_compared) submit(step);
      got.push_back(decode->wait().tokens[0]);
    }
    for (size_t i = 0; i < n_compared; ++i) {
      ASSERT_EQ(got[i], output[i]) << "prompt " << n_prompts << ", step " << i << ", margin " << margins[i];
      ++n_tokens;
    }
  }
  fmt::print("{} greedy tokens agree\n", n_tokens);
  EXPECT_GT(n_tokens, 30);
}

INSTANTIATE_TEST_SUITE_P(Types, Golden, testing::Values(plan::KvType::bf16, plan::KvType::int8),
                         [](const auto& type) { return std::string(plan::name(type.param)); });

}  // namespace
}  // namespace lily
