#include "tests/engine/conversations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <random>

#include "engine/grammar/grammar_compiler.h"
#include "tests/support/checkpoint_writer.h"

namespace lily::engine {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTokenizerFolder = "models/lily-tiny";
constexpr auto kWait = std::chrono::seconds(60);
constexpr int kTogether = 2;  // conversations that ask at the same time

constexpr const char* kWords[] = {"river", "total", "what",  "the",   "seven", "spell", "apple", "why",
                                  "count", "a",     "quick", "green", "to",    "sort",  "paper", "of"};

struct Asked {
  ChatRequest request;
  std::vector<int32_t> ids;
  bool starts_in_thinking = false;
  int cancel_after = -1;  // tokens; -1: never
};

struct Told {
  std::vector<Token> tokens;
  text::ParsedOutput output;
  AnswerEnd end;
};

// One client with its conversation.
class Client {
 public:
  Client(std::mt19937& random, int index) : random_(&random) {
    const int system = below(3);
    if (system > 0)
      request_.messages.push_back(
          text::Message::of("system", system == 1 ? "You are brief." : "You count the words of a text."));
    if (below(4) == 0) {
      request_.tools = Json::parse(
          R"([{"type": "function", "function": {"name": "ls", "parameters":
              {"type": "object", "properties": {"path": {"type": "string"}}}}}])");
    }
    request_.thinking.preserve = below(4) == 0;
    if (below(2) == 0) request_.cache_key = "client " + std::to_string(index);
    keeps_reasoning_ = below(3) == 0;
  }

  Asked ask(ConversationTally& tally, bool penalties) {
    const bool has_answer = request_.messages.size() > 2;
    const int what = below(10);
    if (what == 0 && has_answer) ++tally.n_branched, go_back();
    else if (what == 1 && has_answer) ++tally.n_edited, edit();
    else if (what == 2 && asked_before_) {
      // The same question again, with another seed.
    } else if (request_.messages.empty() || request_.messages.back().role != "tool") {
      request_.messages.push_back(text::Message::of("user", words(1 + below(16))));
    }
    ends_in_question();
    asked_before_ = true;

    Asked asked{.request = request_};
    ChatRequest& r = asked.request;
    r.max_tokens = 1 + below(16);
    r.thinking.enabled = below(3) == 0;
    if (r.thinking.enabled) r.thinking.budget = below(6);
    if (r.tools.is_array() && below(3) == 0) {
      r.tool_choice.kind = ToolChoice::Kind::required;
      r.max_tokens = 48;
    }
    r.sampling = {.temperature = 0.0f, .top_p = 1.0f, .min_p = 0.0f, .top_k = 20, .seed = (*random_)()};
    if (below(2) == 0) r.sampling.temperature = 0.8f;
    r.sampling.presence_penalty = penalties && below(8) == 0 ? 0.5f : 0.0f;
    r.sampling.frequency_penalty = 0.0f;
    r.sampling.repetition_penalty = 1.0f;
    // The device chooses where nobody wants to know more.
    if (below(2) == 0) r.top_logprobs = 2;
    if (below(8) == 0) asked.cancel_after = below(5);
    return asked;
  }

  // As clients send an answer back.
  void hear(const Told& told) {
    if (told.end.finish == Finish::cancelled && below(2) == 0) return;  // asks again, or otherwise
    text::Message turn = text::Message::of("assistant", told.output.content);
    if (keeps_reasoning_) turn.reasoning_content = told.output.reasoning;
    for (const auto& call : told.output.calls) turn.tool_calls.push_back({call.name, Json(call.arguments)});
    const size_t n_calls = turn.tool_calls.size();
    request_.messages.push_back(std::move(turn));
    for (size_t i = 0; i < n_calls; ++i) request_.messages.push_back(text::Message::of("tool", words(5)));
  }

 private:
  int below(int n) { return static_cast<int>((*random_)() % static_cast<unsigned>(n)); }
  std::string words(int n) {
    std::string text;
    for (int i = 0; i < n; ++i) (text += text.empty() ? "" : " ") += kWords[below(std::size(kWords))];
    return text;
  }
  void go_back() {
    const size_t n = 1 + static_cast<size_t>(below(static_cast<int>(request_.messages.size()) - 1));
    request_.messages.resize(n);
  }
  void edit() {
    text::Message& message =
        request_.messages[static_cast<size_t>(below(static_cast<int>(request_.messages.size())))];
    if (message.content.empty()) return;
    std::string& text = message.content.front().text;
    text.insert(text.size() / 2, " not");
  }
  // The last message is a user's or a tool's.
  void ends_in_question() {
    const std::string role = request_.messages.empty() ? "" : request_.messages.back().role;
    if (role != "user" && role != "tool") request_.messages.push_back(text::Message::of("user", words(3)));
  }

  std::mt19937* random_;
  ChatRequest request_;
  bool keeps_reasoning_ = false, asked_before_ = false;
};

Told take(AnswerStream stream, int cancel_after) {
  Told told;
  if (cancel_after == 0) stream.cancel();
  while (!stream.done()) {
    std::optional<AnswerEvent> event = stream.next_for(kWait);
    if (!event) {
      ADD_FAILURE() << "no event came";
      break;
    }
    if (auto* piece = std::get_if<AnswerPiece>(&*event)) {
      for (const auto& e : piece->events) told.output.add(e);
      for (Token& token : piece->tokens) told.tokens.push_back(std::move(token));
      if (static_cast<int>(told.tokens.size()) == cancel_after) stream.cancel();
    } else if (auto* end = std::get_if<AnswerEnd>(&*event)) {
      told.end = std::move(*end);
    }
  }
  return told;
}

bool same_bits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

// An engine that remembers nothing.
class Cold {
 public:
  Cold(const model::Checkpoint& checkpoint, const text::Tokenizer& tokenizer, LoadOptions load)
      : stop_ids_(checkpoint.config().stop_ids),
        compiler_(tokenizer, stop_ids_),
        model_(checkpoint, tokenizer.n_tokens(), load) {
    model_.load();
    engine_.emplace(model_.make_executor());
  }

  Told answer(const Asked& asked) {
    const ChatRequest& r = asked.request;
    const auto n_room = engine_->limits().max_context - static_cast<int32_t>(asked.ids.size());
    GenerateRequest generate{.prompt = asked.ids,
                             .sampling = sampling_of(r),
                             .stop_ids = stop_ids_,
                             .max_tokens = r.max_tokens.value_or(0),
                             .top_logprobs = r.top_logprobs,
                             .keep_states = false};
    generate.constraint = compiler_.constraint_for(
        r, {.starts_in_thinking = asked.starts_in_thinking, .n_room = std::min(n_room, *r.max_tokens)});
    Generation generation = engine_->generate(std::move(generate));
    Told told;
    while (auto event = generation.next()) {
      if (auto* token = std::get_if<Token>(&*event)) told.tokens.push_back(std::move(*token));
      if (auto* end = std::get_if<Finished>(&*event)) {
        told.end.finish = end->finish;
        told.end.error = end->error;
        told.end.usage = end->usage;
      }
    }
    EXPECT_EQ(told.end.usage.cached_tokens, 0);
    return told;
  }

  static SamplingParams sampling_of(const ChatRequest& r) {
    return {.temperature = *r.sampling.temperature,
            .top_p = *r.sampling.top_p,
            .min_p = *r.sampling.min_p,
            .top_k = *r.sampling.top_k,
            .repetition_penalty = *r.sampling.repetition_penalty,
            .presence_penalty = *r.sampling.presence_penalty,
            .frequency_penalty = *r.sampling.frequency_penalty,
            .seed = *r.sampling.seed};
  }

 private:
  std::vector<int32_t> stop_ids_;
  grammar::GrammarCompiler compiler_;
  LoadedModel model_;
  std::optional<Engine> engine_;
};

// False if the two parted where they may.
bool compare(const Asked& asked, const Told& warm, const Told& cold, const Judge& judge) {
  if (warm.end.finish == Finish::error || cold.end.finish == Finish::error) {
    ADD_FAILURE() << "warm: " << warm.end.error << ", cold: " << cold.end.error;
    return true;
  }
  std::vector<int32_t> ids = asked.ids;
  const size_t n = std::min(warm.tokens.size(), cold.tokens.size());
  for (size_t i = 0; i < n; ++i) {
    const Token &w = warm.tokens[i], &c = cold.tokens[i];
    if (w.id != c.id && judge) {
      EXPECT_TRUE(judge({.ids = ids,
                         .warm = w.id,
                         .cold = c.id,
                         .sampling = Cold::sampling_of(asked.request),
                         .step = static_cast<uint32_t>(i)}))
          << "token " << i << ": " << w.id << " with the cache, " << c.id << " without";
      return false;
    }
    EXPECT_EQ(w.id, c.id) << "token " << i;
    if (w.id != c.id) return true;
    ids.push_back(w.id);
    if (judge) continue;
    EXPECT_TRUE(same_bits(w.logprob, c.logprob)) << "token " << i << ": " << w.logprob << ", " << c.logprob;
    EXPECT_EQ(w.top.size(), c.top.size());
    for (size_t k = 0; k < std::min(w.top.size(), c.top.size()); ++k)
      EXPECT_TRUE(w.top[k].id == c.top[k].id && same_bits(w.top[k].logprob, c.top[k].logprob))
          << "token " << i;
  }
  if (warm.end.finish == Finish::cancelled) {
    EXPECT_LE(warm.tokens.size(), cold.tokens.size());
    return true;
  }
  if (warm.tokens.size() == cold.tokens.size()) {
    EXPECT_EQ(warm.end.finish, cold.end.finish);
    EXPECT_EQ(warm.end.usage.completion_tokens, cold.end.usage.completion_tokens);
    return true;
  }
  // One of them chose a stop token, which is not shown.
  if (!judge) EXPECT_EQ(warm.tokens.size(), cold.tokens.size());
  return !judge;
}

}  // namespace

ConversationTally converse(const ConversationTrial& trial, const Judge& judge) {
  std::mt19937 random(trial.seed);
  LoadOptions load{.backend = trial.backend, .threads = 1, .kv = trial.kv};
  load.memory.context = trial.context;
  load.memory.max_sequences = kTogether;
  load.memory.n_cached_states = trial.n_cached_states;
  load.memory.shared_pool = trial.shared_pool;
  Assistant assistant(trial.folder, load, {.max_sequences = kTogether});
  EXPECT_EQ(assistant.model()->memory().spec.shared_places,
            trial.shared_pool && trial.backend == "reference");
  assistant.load();
  const model::Checkpoint checkpoint = model::Checkpoint::open(trial.folder);
  const text::Tokenizer tokenizer = text::Tokenizer::load(trial.folder);
  load.memory.max_sequences = 1;
  load.memory.n_cached_states = 0;
  load.memory.shared_pool = false;
  Cold cold(checkpoint, tokenizer, load);

  ConversationTally tally;
  std::vector<Client> clients;
  int n_begun = 0;
  const auto begin_some = [&] {
    while (static_cast<int>(clients.size()) < 2 * kTogether && n_begun < trial.n_conversations)
      clients.emplace_back(random, n_begun++);
  };
  begin_some();
  while (!clients.empty()) {
    std::shuffle(clients.begin(), clients.end(), random);
    const size_t n = std::min<size_t>(kTogether, clients.size());
    std::vector<Asked> asked;
    std::vector<AnswerStream> streams;
    std::vector<bool> over(n);
    for (size_t i = 0; i < n; ++i) {
      Asked a = clients[i].ask(tally, trial.penalties);
      const PreparedPrompt prepared = assistant.prepare(a.request);
      a.ids = prepared.ids;
      a.starts_in_thinking = prepared.starts_in_thinking;
      over[i] = random() % 6 == 0 || static_cast<int>(a.ids.size()) + 200 > trial.context;
      if (static_cast<int>(a.ids.size()) + *a.request.max_tokens > trial.context) a.ids.clear();
      asked.push_back(std::move(a));
    }
    for (const Asked& a : asked)
      if (!a.ids.empty()) streams.push_back(assistant.start(a.request));
    auto stream = streams.begin();
    for (size_t i = 0; i < n; ++i) {
      if (asked[i].ids.empty()) continue;
      SCOPED_TRACE(testing::Message() << "turn " << tally.n_turns << " of seed " << trial.seed);
      const Told warm = take(std::move(*stream++), asked[i].cancel_after);
      tally.n_exact += compare(asked[i], warm, cold.answer(asked[i]), judge) ? 1 : 0;
      ++tally.n_turns;
      tally.n_cancelled += warm.end.finish == Finish::cancelled ? 1 : 0;
      tally.n_called += warm.output.calls.empty() ? 0 : 1;
      clients[i].hear(warm);
      if (testing::Test::HasFailure()) return tally;
    }
    for (size_t i = n; i-- > 0;)
      if (over[i]) clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(i));
    begin_some();
  }
  const EngineStats stats = assistant.engine().stats();
  tally.n_prompt_tokens = stats.prompt_tokens;
  tally.n_cached_tokens = stats.cached_tokens;
  tally.n_evictions = stats.cache_evictions;
  return tally;
}

void write_small_model(const std::string& folder) {
  namespace fs = std::filesystem;
  test::CheckpointWriter::Options options;
  options.dims.vocab = model::lily_tiny().vocab;
  test::CheckpointWriter writer(options);
  for (nlohmann::json* config : {&writer.config, &writer.config["text_config"], &writer.generation_config})
    (*config)["eos_token_id"] = nlohmann::json::array({8130, 8128});  // lily-tiny's
  writer.write(folder);
  for (const char* file : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    fs::copy_file(fs::path(kTokenizerFolder) / file, fs::path(folder) / file,
                  fs::copy_options::overwrite_existing);
}

}  // namespace lily::engine
