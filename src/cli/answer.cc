#include "cli/answer.h"

#include <chrono>

#include "base/error.h"
#include "cli/version_info.h"

namespace lily::cli {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);  // how soon Ctrl-C is noticed

}  // namespace

std::string Answer::finish_reason() const {
  switch (end.finish) {
    case engine::Finish::length:
      return "length";
    case engine::Finish::cancelled:
      return "cancelled";
    default:
      return end.n_complete_calls > 0 ? "tool_calls" : "stop";
  }
}

double Answer::prefill_tok_s() const {
  const int n_read = end.usage.prompt_tokens - end.usage.cached_tokens;
  return end.timings.prefill_ms > 0 ? n_read / end.timings.prefill_ms * 1e3 : 0;
}

double Answer::decode_tok_s() const {
  // The first token comes out of the prefill.
  return end.timings.decode_ms > 0 ? (end.usage.completion_tokens - 1) / end.timings.decode_ms * 1e3 : 0;
}

void keep_on_disk(engine::Assistant& assistant, const DiskOptions& disk) {
  assistant.set_build(fmt::format("{} {}", kVersion, kCommit));
  if (disk.folder.empty()) return;
  assistant.set_disk_cache({.folder = disk.folder, .max_bytes = static_cast<int64_t>(disk.n_bytes)});
}

std::unique_ptr<engine::Assistant> load_assistant(const ModelOptions& options, const DiskOptions& disk) {
  engine::LoadOptions load = load_options(options);
  engine::EngineOptions engine;
  plan_for_sessions(load, engine);
  auto assistant = std::make_unique<engine::Assistant>(find_model(options.model), load, engine);
  keep_on_disk(*assistant, disk);
  ProgressBar bar("loading");
  assistant->load([&](int64_t done, int64_t total) {
    bar.update(done, total);
    return !interrupted();
  });
  return assistant;
}

Answer answer(engine::Assistant& assistant, const std::vector<text::Message>& messages,
              const nlohmann::ordered_json& tools, const AnswerOptions& options, const EventSink& sink) {
  engine::ChatRequest request{.messages = messages,
                              .tools = tools,
                              .thinking = {.enabled = options.think, .preserve = options.preserve_thinking},
                              .sampling = {.temperature = options.temperature,
                                           .top_p = options.top_p,
                                           .min_p = options.min_p,
                                           .presence_penalty = options.presence_penalty,
                                           .repetition_penalty = options.repetition_penalty,
                                           .top_k = options.top_k,
                                           .seed = options.seed},
                              .stop = options.stop,
                              .cache_key = "chat"};
  if (options.max_tokens > 0) request.max_tokens = options.max_tokens;

  Answer answer;
  engine::AnswerStream stream = assistant.start(request);
  while (!stream.done()) {
    if (interrupted()) stream.cancel();
    std::optional<engine::AnswerEvent> event = stream.next_for(kPollInterval);
    if (!event) continue;
    if (const auto* piece = std::get_if<engine::AnswerPiece>(&*event)) {
      for (const engine::Token& token : piece->tokens) answer.token_ids.push_back(token.id);
      for (const text::OutputEvent& e : piece->events) {
        answer.output.add(e);
        sink(e);
      }
    } else if (auto* end = std::get_if<engine::AnswerEnd>(&*event)) {
      if (end->finish == engine::Finish::error) throw Error(end->fault, end->error);
      if (end->finish == engine::Finish::cancelled && !interrupted())
        fail(Fault::device, "the answer was given up because its output was not taken in time");
      answer.end = std::move(*end);
    }
  }
  return answer;
}

}  // namespace lily::cli
