#include "cli/assistant.h"

#include <chrono>
#include <filesystem>
#include <random>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "text/chat_template.h"
#include "text/output_reader.h"
#include "text/tool_schema.h"

namespace lily::cli {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);  // how soon Ctrl-C is noticed
constexpr uint64_t kMaxTemplateBytes = 1 << 20;

uint64_t random_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) ^ device();
}

}  // namespace

std::string Answer::finish_reason() const {
  if (finish == engine::Finish::length) return "length";
  if (finish == engine::Finish::cancelled && stop_string < 0) return "cancelled";
  for (const auto& call : output.calls)
    if (call.complete) return "tool_calls";
  return "stop";
}

double Answer::prefill_tok_s() const {
  const int n_read = usage.prompt_tokens - usage.cached_tokens;
  return timings.prefill_ms > 0 ? n_read / timings.prefill_ms * 1e3 : 0;
}

double Answer::decode_tok_s() const {
  // The first token comes out of the prefill.
  return timings.decode_ms > 0 ? (usage.completion_tokens - 1) / timings.decode_ms * 1e3 : 0;
}

Assistant::Assistant(const ModelOptions& options) : folder_(find_model(options.model)) {
  checkpoint_ = std::make_unique<model::Checkpoint>(model::Checkpoint::open(folder_));
  check_template(folder_);
  tokenizer_ = std::make_unique<text::Tokenizer>(text::Tokenizer::load(folder_));
  model_ = std::make_unique<engine::LoadedModel>(*checkpoint_, tokenizer_->n_tokens(), load_options(options));
  backend_ = model_->device().info().backend;
  {
    ProgressBar bar("loading");
    model_->load([&](int64_t done, int64_t total) {
      bar.update(done, total);
      return !interrupted();
    });
  }
  engine_ = std::make_unique<engine::Engine>(model_->make_executor());
}

int Assistant::context() const { return engine_->limits().max_context; }

engine::SamplingParams Assistant::sampling(const AnswerOptions& o) const {
  const model::SamplingDefaults& defaults = checkpoint_->config().sampling;
  engine::SamplingParams p;
  p.temperature = static_cast<float>(o.temperature.value_or(defaults.do_sample ? defaults.temperature : 0.0));
  p.top_p = static_cast<float>(o.top_p.value_or(defaults.top_p));
  p.top_k = o.top_k.value_or(defaults.top_k);
  p.min_p = static_cast<float>(o.min_p.value_or(0.0));
  p.presence_penalty = static_cast<float>(o.presence_penalty.value_or(0.0));
  p.repetition_penalty = static_cast<float>(o.repetition_penalty.value_or(1.0));
  p.seed = o.seed.value_or(random_seed());
  return p;
}

Answer Assistant::answer(const std::vector<text::Message>& messages, const nlohmann::ordered_json& tools,
                         const AnswerOptions& options, const Sink& sink) {
  const text::RenderedPrompt prompt = text::render(messages, tools,
                                                   {.add_generation_prompt = true,
                                                    .enable_thinking = options.think,
                                                    .preserve_thinking = options.preserve_thinking});
  // The next turn begins as this prompt does up to its generation prompt: a state kept there is not read
  // again.
  const text::RenderedPrompt stable = text::render(messages, tools,
                                                   {.add_generation_prompt = false,
                                                    .enable_thinking = options.think,
                                                    .preserve_thinking = options.preserve_thinking});
  engine::GenerateRequest request{
      .prompt = text::tokenize(prompt, *tokenizer_),
      .session = "chat",
      .n_stable = static_cast<int32_t>(text::tokenize(stable, *tokenizer_).size()),
      .sampling = sampling(options),
      .stop_ids = checkpoint_->config().stop_ids,
      .max_tokens = options.max_tokens};
  Answer answer{.seed = request.sampling.seed};

  const text::ToolSet tool_set(tools);
  text::OutputReader reader(*tokenizer_, tool_set,
                            {.starts_in_thinking = prompt.starts_in_thinking(),
                             .continues_text = prompt.continues_text(),
                             .calls = !tool_set.empty(),
                             .stop = options.stop});
  std::vector<text::OutputEvent> events;
  const auto deliver = [&] {
    for (const text::OutputEvent& event : events) {
      answer.output.add(event);
      sink(event);
    }
    events.clear();
  };

  engine::Generation generation = engine_->generate(std::move(request));
  while (!generation.done()) {
    if (interrupted()) generation.cancel();
    const std::optional<engine::Event> event = generation.next_for(kPollInterval);
    if (!event) continue;
    if (const auto* token = std::get_if<engine::Token>(&*event)) {
      if (answer.stop_string >= 0) continue;  // already decoded when the stop string was found
      answer.token_ids.push_back(token->id);
      reader.push(token->id, events);
      deliver();
      answer.stop_string = reader.parser().matched_stop();
      if (answer.stop_string >= 0) generation.cancel();
    } else if (const auto* finished = std::get_if<engine::Finished>(&*event)) {
      if (finished->finish == engine::Finish::error) throw Error(finished->fault, finished->error);
      if (finished->finish == engine::Finish::cancelled && !interrupted() && answer.stop_string < 0)
        fail(Fault::device, "the answer was given up because its output was not taken in time");
      answer.finish = finished->finish;
      answer.usage = finished->usage;
      answer.timings = finished->timings;
    }
  }
  const bool is_cut = answer.finish == engine::Finish::length || answer.finish == engine::Finish::cancelled;
  reader.finish(is_cut ? text::OutputEnd::length : text::OutputEnd::stop, events);
  deliver();
  return answer;
}

void check_template(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::path(folder) / "chat_template.jinja";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return;
  switch (text::identify_template(read_text_file(path, kMaxTemplateBytes))) {
    case text::KnownTemplate::qwen36:
      return;
    case text::KnownTemplate::qwen35:
      log(LogLevel::notice, "{}: the chat template is Qwen3.5's; the one of Qwen3.6 is used instead",
          path.string());
      return;
    case text::KnownTemplate::unknown:
      log(LogLevel::warning, "{}: an unknown chat template; the one of Qwen3.6 is used instead",
          path.string());
      return;
  }
}

}  // namespace lily::cli
