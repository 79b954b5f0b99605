// Any bytes as the body of any endpoint: the request is refused with an error of the client's, or answered,
// and then every event of a streamed answer is framed JSON, the stream has its end, and nothing runs
// afterwards. The service is the real one, with grammars and replay; the model is a script.
//
// The first byte chooses the endpoint, the rest is the body. A JSON object with "api" and "body", as the
// recorded clients are, is a request of that API.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "engine/assistant.h"
#include "engine/grammar/grammar_compiler.h"
#include "server/messages.h"
#include "server/openai_chat.h"
#include "server/openai_text.h"
#include "server/responses.h"
#include "server/service.h"
#include "tests/engine/scripted_executor.h"

namespace {

using namespace lily;
using namespace lily::server;

constexpr size_t kMaxBytes = 16384;
constexpr int kContext = 512;

// What the model says, over and over: thinking, text and two calls, each of which may be cut or forbidden.
constexpr const char* kSays =
    "let me see</think>\n\nI look "
    "\xF0\x9F\x8C\xB8.\n<tool_call>\n<function=f>\n<parameter=path>\n/tmp\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>";
constexpr size_t kMaxSaid = 100;  // tokens of an answer, unless a grammar wants more

struct Rig {
  text::Tokenizer tokenizer = text::Tokenizer::load("models/lily-tiny");
  model::Config config;
  std::unique_ptr<engine::Assistant> assistant;
  std::unique_ptr<Service> service;

  Rig() {
    engine::Limits limits = engine::ScriptedExecutor::small();
    limits.n_tokens = tokenizer.n_tokens();
    limits.vocab = tokenizer.n_tokens() + 8;
    limits.max_context = kContext;
    limits.max_chunk_rows = kContext;
    limits.n_kv_blocks = 64;
    config.stop_ids = {*tokenizer.id_of("<|im_end|>")};
    auto executor = std::make_unique<engine::ScriptedExecutor>(limits);
    const std::vector<int32_t> says = tokenizer.encode(kSays, text::AddedTokens::all);
    const int32_t stop_id = config.stop_ids[0], start_id = *tokenizer.id_of("<|im_start|>");
    executor->logits = [=, vocab = static_cast<size_t>(limits.vocab)](std::span<const int32_t> prefix) {
      std::vector<float> row(vocab, 0.0f);
      const auto turn = std::find(prefix.rbegin(), prefix.rend(), start_id);
      const auto n_said = static_cast<size_t>(turn - prefix.rbegin());
      row[static_cast<size_t>(says[n_said % says.size()])] = 5;
      row[static_cast<size_t>(stop_id)] = n_said < kMaxSaid ? 4.0f : 100.0f;
      return row;
    };
    assistant = std::make_unique<engine::Assistant>(text::Tokenizer(tokenizer), config, std::move(executor));
    auto compiler =
        std::make_shared<engine::grammar::GrammarCompiler>(assistant->tokenizer(), config.stop_ids);
    assistant->set_constraints([compiler](const auto& request, const auto& prompt) {
      return compiler->constraint_for(
          request, {.starts_in_thinking = prompt.starts_in_thinking,
                    .n_room = kContext - std::min(kContext, static_cast<int>(prompt.ids.size()))});
    });
    assistant->set_replay(1 << 20);
    service = std::make_unique<Service>(*assistant, ServiceOptions{.model_id = "lily-tiny"});
  }
};

Rig& rig() {
  static Rig instance;
  return instance;
}

// Framed, each event with its JSON, and the last one an end.
void check_stream(std::string_view stream) {
  std::string_view last;
  while (!stream.empty()) {
    const size_t end = stream.find("\n\n");
    LILY_CHECK(end != std::string_view::npos, "an event without its end: {}", stream);
    std::string_view event = stream.substr(0, end);
    stream.remove_prefix(end + 2);
    if (event.starts_with(':')) continue;
    if (event.starts_with("event: ")) event.remove_prefix(event.find('\n') + 1);
    LILY_CHECK(event.starts_with("data: ") && event.find('\n') == std::string_view::npos, "{}", event);
    last = event.substr(6);
    LILY_CHECK(last == "[DONE]" || Json::accept(last), "no JSON: {}", last);
  }
  if (last == "[DONE]") return;
  const std::string type = Json::parse(last).value("type", "");
  LILY_CHECK(type == "message_stop" || type == "response.completed" || type == "response.incomplete",
             "a stream that ends in {}", last);
}

void answer(const Call& call) {
  Service& service = *rig().service;
  engine::AnswerStream stream = service.start(call);
  if (call.stream) {
    std::string sent;
    const Outcome outcome = service.stream(
        stream, *call.writer, [&](const std::string& bytes) { return sent += bytes, true; },
        [] { return true; }, "fuzz");
    LILY_CHECK(outcome.error.empty(), "{}", outcome.error);
    return check_stream(sent);
  }
  Outcome outcome;
  const std::optional<Json> whole = service.whole(stream, *call.writer, [] { return true; }, outcome);
  LILY_CHECK(whole && Json::accept(to_text(*whole)), "an answer that is no JSON");
}

using Endpoint = void (*)(const Json& body);

const std::array<Endpoint, 8> kEndpoints = {
    [](const Json& body) { answer(parse_chat_completion(body, rig().service->model())); },
    [](const Json& body) { answer(parse_message(body, rig().service->model())); },
    [](const Json& body) {
      ResponseStore store;
      answer(parse_response(body, rig().service->model(), store));
    },
    [](const Json& body) { answer(parse_text_completion(body, rig().service->model())); },
    [](const Json& body) { rig().service->count_tokens(parse_count_tokens(body, rig().service->model())); },
    [](const Json& body) { rig().service->tokenize(body); },
    [](const Json& body) { rig().service->detokenize(body); },
    [](const Json& body) { rig().service->apply_template(body); },
};

void call(size_t endpoint, const Json& body) { kEndpoints[endpoint % kEndpoints.size()](body); }

void call(std::string_view input) {
  if (input.starts_with('{')) {
    const Json request = parse_json(input);
    const std::string api = request.is_object() && request.contains("api") && request["api"].is_string()
                                ? request["api"].get<std::string>()
                                : "";
    if (!request.contains("body")) return;
    return call(api == "messages" ? 1 : api == "responses" ? 2 : 0, request["body"]);
  }
  call(static_cast<uint8_t>(input.front()), parse_json(input.substr(1)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || size > kMaxBytes) return 0;
  try {
    call({reinterpret_cast<const char*>(data), size});
  } catch (const std::exception& thrown) {
    const ApiError error = api_error_of(thrown);
    LILY_CHECK(error.status >= 400 && error.status < 500, "{}: {}", error.status, error.what());
    LILY_CHECK(std::string_view(error.what()).find_first_of("\n\r") == std::string_view::npos, "{}",
               error.what());
    LILY_CHECK(
        Json::accept(to_text(openai_error(error))) && Json::accept(to_text(anthropic_error(error, "r"))),
        "an error that is no JSON");
  }
  LILY_CHECK(rig().assistant->engine().stats().n_waiting == 0, "a request still waits");
  return 0;
}
