// What constrained answers cost: masks over a vocabulary of the real model's size (made of lily-tiny's
// tokens, alone and in pairs), single questions, and decoding with lily-tiny on the CPU with and without a
// schema.
#include <benchmark/benchmark.h>

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/assistant.h"
#include "engine/grammar/grammar_compiler.h"
#include "engine/grammar/schema_compiler.h"
#include "engine/grammar/token_matcher.h"

namespace {

using namespace lily;
using namespace lily::engine;
using namespace lily::engine::grammar;

constexpr const char* kModel = "models/lily-tiny";
constexpr int32_t kVocabulary = 248'044;

const text::Tokenizer& large() {
  static const text::Tokenizer kTokenizer = [] {
    const text::Tokenizer tiny = text::Tokenizer::load(kModel);
    text::TokenizerData data;
    std::unordered_set<std::string> seen;
    std::vector<std::string> words;
    for (int b = 0; b < 256; ++b) {
      data.byte_tokens[static_cast<size_t>(b)] = b;
      words.emplace_back(1, static_cast<char>(b));
      seen.insert(words.back());
    }
    const auto add = [&](std::string word) {
      if (seen.insert(word).second) words.push_back(std::move(word));
    };
    for (int32_t id = 0; id < tiny.n_tokens(); ++id)
      if (!tiny.is_added(id)) add(std::string(tiny.token_bytes(id)));
    std::mt19937 random(1);
    const size_t n = words.size();
    while (words.size() < kVocabulary) add(words[random() % n] + words[random() % n]);
    data.token_bytes = std::move(words);
    return text::Tokenizer(std::move(data));
  }();
  return kTokenizer;
}
const TokenTrie& large_trie() {
  static const TokenTrie kTrie(large());
  return kTrie;
}

const nlohmann::ordered_json& schema() {
  static const auto kSchema = nlohmann::ordered_json::parse(
      R"({"type":"object","properties":{"name":{"type":"string","maxLength":4000},"id":{"type":"string","pattern":"^[A-Z]{2}-[0-9]{4}$"},
          "age":{"type":"integer","minimum":0,"maximum":130},"tags":{"type":"array","items":{"type":"string"}}},
          "required":["name","id","age","tags"],"additionalProperties":false})");
  return kSchema;
}

void compile(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(schema_grammar(schema(), "schema"));
}
BENCHMARK(compile)->Unit(benchmark::kMicrosecond);

void build_trie(benchmark::State& state) {
  for (auto _ : state) {
    const TokenTrie trie(large());
    benchmark::DoNotOptimize(trie.nodes().data());
  }
  state.counters["nodes"] = static_cast<double>(large_trie().nodes().size());
  state.counters["MB"] = static_cast<double>(large_trie().n_bytes()) / 1e6;
}
BENCHMARK(build_trie)->Unit(benchmark::kMillisecond);

// Texts that lead to states of different kinds.
constexpr std::array kPlaces = {"",
                                "{",
                                "{\"name\": \"",
                                "{\"name\": \"x\", \"id\": \"",
                                "{\"name\": \"x\", \"id\": \"AB-1234\", \"age\": ",
                                "{\"name\": \"x\", \"id\": \"AB-1234\", \"age\": 9, \"tags\": [\"a\""};

void new_mask(benchmark::State& state) {
  std::vector<uint64_t> words((static_cast<size_t>(large().n_tokens()) + 63) / 64);
  for (auto _ : state) {
    state.PauseTiming();
    TokenMatcher matcher(schema_grammar(schema(), "schema"), large_trie(), large());
    TokenMatcher::Cursor cursor(matcher);
    cursor.read(kPlaces[static_cast<size_t>(state.range(0))]);
    state.ResumeTiming();
    cursor.allow(words);
  }
  state.SetLabel(kPlaces[static_cast<size_t>(state.range(0))]);
}
BENCHMARK(new_mask)->DenseRange(0, kPlaces.size() - 1)->Unit(benchmark::kMillisecond)->Iterations(20);

void known_mask(benchmark::State& state) {
  std::vector<uint64_t> words((static_cast<size_t>(large().n_tokens()) + 63) / 64);
  TokenMatcher matcher(schema_grammar(schema(), "schema"), large_trie(), large());
  TokenMatcher::Cursor cursor(matcher);
  cursor.read(kPlaces[2]);
  for (auto _ : state) cursor.allow(words);
}
BENCHMARK(known_mask)->Unit(benchmark::kMicrosecond);

// A step that ends in candidates: 64 questions and one token read.
void ask_candidates(benchmark::State& state) {
  TokenMatcher matcher(schema_grammar(schema(), "schema"), large_trie(), large());
  TokenMatcher::Cursor cursor(matcher);
  cursor.read(kPlaces[2]);
  std::mt19937 random(2);
  std::vector<int32_t> ids(64 * 512);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % kVocabulary);
  size_t round = 0;
  int64_t n_allowed = 0;
  for (auto _ : state) {
    for (size_t i = 0; i < 64; ++i) n_allowed += cursor.allows(ids[(round % 512) * 64 + i]) ? 1 : 0;
    if (++round % 1000 == 0) {
      cursor.restart();
      cursor.read(kPlaces[2]);
    }
    cursor.read("x");
  }
  state.counters["allowed"] = static_cast<double>(n_allowed) / static_cast<double>(round);
}
BENCHMARK(ask_candidates)->Unit(benchmark::kMicrosecond);

void loop_guard(benchmark::State& state) {
  LoopGuard guard({});
  std::mt19937 random(3);
  int64_t n_found = 0;
  for (auto _ : state) n_found += guard.push(static_cast<int32_t>(random() % 1000)) ? 1 : 0;
  benchmark::DoNotOptimize(n_found);
}
BENCHMARK(loop_guard);

// lily-tiny writes 300 tokens. 0: nothing constrains; 1: the loop guard is there; 2: a long JSON string.
void decode(benchmark::State& state) {
  static Assistant* const kAssistant = [] {
    LoadOptions load;
    load.backend = "cpu";
    load.memory.context = 2048;
    auto* assistant = new Assistant(kModel, load, EngineOptions{});
    assistant->load();
    return assistant;
  }();
  GrammarCompiler compiler(kAssistant->tokenizer(), {}, {.loops = {.enabled = state.range(0) == 1}});
  ChatRequest request;
  request.messages = {text::Message::of("user", "Tell me a long story.")};
  request.thinking.enabled = false;
  if (state.range(0) == 2)
    request.format = {OutputFormat::Kind::json_schema,
                      nlohmann::ordered_json::parse(R"({"type":"string","minLength":5000})")};
  const PreparedPrompt prompt = kAssistant->prepare(request);
  double ms = 0;
  int64_t n = 0;
  for (auto _ : state) {
    GenerateRequest generate;
    generate.prompt = prompt.ids;
    generate.max_tokens = 300;
    generate.sampling = {
        .temperature = state.range(1) == 0 ? 0.0f : 1.0f, .top_p = 0.95f, .top_k = 20, .seed = 1};
    generate.constraint = compiler.constraint_for(request, {.n_room = 300});
    Generation generation = kAssistant->engine().generate(std::move(generate));
    while (auto event = generation.next())
      if (const auto* end = std::get_if<Finished>(&*event)) {
        ms += end->timings.decode_ms;
        n += end->usage.completion_tokens - 1;
      }
  }
  state.counters["ms/token"] = ms / static_cast<double>(n);
}
BENCHMARK(decode)
    ->ArgNames({"constraint", "sampled"})
    ->ArgsProduct({{0, 1, 2}, {0, 1}})
    ->Unit(benchmark::kMillisecond)
    ->MinTime(2);

}  // namespace
