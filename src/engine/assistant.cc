#include "engine/assistant.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <random>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/printable.h"
#include "base/random_name.h"
#include "engine/grammar/grammar_compiler.h"
#include "engine/session_identity.h"
#include "text/normalise.h"
#include "text/output_reader.h"
#include "text/tool_schema.h"

namespace lily::engine {
namespace {

constexpr uint64_t kMaxTemplateBytes = 1 << 20;
constexpr size_t kReplayBytes = size_t{128} << 20;  // 32 million tokens
constexpr int kSeedBits = 53;  // what every JSON reader can hold: clients send seeds back
constexpr const char* kEndOfTurn = "<|im_end|>";

uint64_t random_seed() {
  std::random_device device;
  return ((uint64_t{device()} << 32) ^ device()) >> (64 - kSeedBits);
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

text::Conversation conversation_of(const ChatRequest& request) {
  return text::normalise(request.messages, {.add_generation_prompt = request.add_generation_prompt,
                                            .enable_thinking = request.thinking.enabled,
                                            .preserve_thinking = request.thinking.preserve});
}

}  // namespace

// ---- One answer

class AnswerStream::State {
 public:
  struct Begin {
    nlohmann::ordered_json tools;
    text::OutputOptions output;
    bool parallel_calls = true;
    uint64_t seed = 0;
    int32_t n_prompt = 0;
    int32_t n_context = 0;
    ReplayBook* replay = nullptr;
    VisibleHash visible;       // of the prompt
    std::vector<int32_t> ids;  // of the prompt, and then of the answer
  };

  State(const text::Tokenizer& tokenizer, Begin begin, Engine& engine, GenerateRequest request)
      : begin_(std::move(begin)),
        tools_(begin_.tools),
        reader_(tokenizer, tools_, begin_.output),
        generation_(engine.generate(std::move(request))) {}

  std::optional<AnswerEvent> next_for(std::chrono::milliseconds timeout) {
    // Tokens that no longer count leave nothing to hand on; what comes after them is at hand soon.
    while (ready_.empty()) {
      std::optional<Event> event = generation_.next_for(timeout);
      if (!event) return {};
      std::visit([&](auto& e) { take(e); }, *event);
    }
    AnswerEvent event = std::move(ready_.front());
    ready_.pop_front();
    done_ = std::holds_alternative<AnswerEnd>(event);
    return event;
  }

  bool done() const { return done_; }
  void cancel() { generation_.cancel(); }
  uint64_t seed() const { return begin_.seed; }

 private:
  void take(PromptProgress& progress) { ready_.emplace_back(progress); }

  void take(Token& token) {
    if (closed_) return;  // it had been decoded already when the answer ended
    AnswerPiece piece;
    reader_.push(token.id, piece.events);
    name_calls(piece);
    ++n_tokens_;
    if (begin_.replay != nullptr) begin_.ids.push_back(token.id);
    piece.tokens.push_back(std::move(token));
    close_if_over(piece);
    note_visible(piece);
    ready_.emplace_back(std::move(piece));
  }

  static void name_calls(AnswerPiece& piece) {
    for (text::OutputEvent& event : piece.events)
      if (event.kind == text::OutputEvent::Kind::call_begin) event.id = random_name(kCallIdLetters);
  }

  void note_visible(const AnswerPiece& piece) {
    if (begin_.replay == nullptr) return;
    for (const text::OutputEvent& event : piece.events) said_.add(event);
  }

  // What the client has seen stands for the tokens that were written; it does not where the answer was ended
  // at a place that the tokens do not show.
  void remember(const Finished& finished) {
    if (begin_.replay == nullptr || closed_) return;
    if (finished.finish != Finish::stop && finished.finish != Finish::length) return;
    const bool shows_something = said_.content.find_first_not_of(" \t\r\n") != std::string::npos;
    if (!shows_something && said_.calls.empty()) return;
    begin_.replay->remember(begin_.visible, said_, std::exchange(begin_.ids, {}));
  }

  // The answer is over although the model would go on.
  void close_if_over(AnswerPiece& piece) {
    bool over = reader_.parser().matched_stop() >= 0;
    if (!begin_.parallel_calls && reader_.parser().n_complete_calls() > 0) {
      // What came after the first call in the same token does not count.
      const auto call_end = std::find_if(piece.events.begin(), piece.events.end(), [](const auto& e) {
        return e.kind == text::OutputEvent::Kind::call_end;
      });
      if (call_end != piece.events.end()) piece.events.erase(call_end + 1, piece.events.end());
      over = true;
    }
    if (!over) return;
    closed_ = true;
    generation_.cancel();
  }

  void take(Finished& finished) {
    AnswerEnd end{.finish = finished.finish,
                  .fault = finished.fault,
                  .error = std::move(finished.error),
                  .usage = finished.usage,
                  .timings = finished.timings,
                  .seed = begin_.seed};
    if (closed_) {
      end.finish = Finish::stop;
      end.usage.completion_tokens = n_tokens_;
    } else {
      // A call that a loop has cut is not one to be carried out.
      const bool is_whole = finished.finish == Finish::stop && finished.detail != StopDetail::loop;
      AnswerPiece last;
      reader_.finish(is_whole ? text::OutputEnd::stop : text::OutputEnd::length, last.events);
      name_calls(last);
      close_if_over(last);
      note_visible(last);
      remember(finished);
      if (!last.events.empty()) ready_.emplace_back(std::move(last));
    }
    if (finished.detail == StopDetail::loop) end.detail = AnswerEnd::Detail::loop;
    if (finished.detail == StopDetail::thinking_budget) end.detail = AnswerEnd::Detail::thinking_budget;
    end.stop_string = reader_.parser().matched_stop();
    if (end.stop_string >= 0) end.detail = AnswerEnd::Detail::stop_string;
    end.n_complete_calls = begin_.parallel_calls ? reader_.parser().n_complete_calls()
                                                 : std::min(reader_.parser().n_complete_calls(), 1);
    end.context_full =
        end.finish == Finish::length && begin_.n_prompt + end.usage.completion_tokens >= begin_.n_context;
    if (end.usage.cached_tokens > 0) end.cache_source = end.usage.from_disk ? "disk" : "ram";
    // What the cache remembers at that place may be another client's: it is not for the reader of an answer.
    if (finished.miss)
      end.cache_miss = fmt::format("the prompt differs from the nearest one remembered at token {}",
                                   finished.miss->position);
    end.miss = std::move(finished.miss);
    end.reasoning_tokens = reader_.n_reasoning_tokens();
    ready_.emplace_back(std::move(end));
  }

  Begin begin_;
  text::ToolSet tools_;
  text::OutputReader reader_;
  Generation generation_;
  std::deque<AnswerEvent> ready_;
  text::ParsedOutput said_;  // with replay
  int32_t n_tokens_ = 0;
  bool closed_ = false;  // nothing more of the answer counts
  bool done_ = false;
};

AnswerStream::AnswerStream(std::unique_ptr<State> state) : state_(std::move(state)) {}
AnswerStream::AnswerStream(AnswerStream&&) noexcept = default;
AnswerStream& AnswerStream::operator=(AnswerStream&&) noexcept = default;
AnswerStream::~AnswerStream() = default;

std::optional<AnswerEvent> AnswerStream::next_for(std::chrono::milliseconds timeout) {
  return state_->next_for(timeout);
}
bool AnswerStream::done() const { return state_->done(); }
void AnswerStream::cancel() { state_->cancel(); }
uint64_t AnswerStream::seed() const { return state_->seed(); }

// ---- The assistant

Assistant::Assistant(const std::string& folder, const LoadOptions& load, const EngineOptions& options)
    : folder_(folder),
      checkpoint_(std::make_unique<model::Checkpoint>(model::Checkpoint::open(folder))),
      tokenizer_(text::Tokenizer::load(folder)),
      config_(checkpoint_->config()),
      model_(std::make_unique<LoadedModel>(*checkpoint_, tokenizer_.n_tokens(), load)),
      options_(options),
      end_of_turn_(tokenizer_.id_of(kEndOfTurn)) {
  check_template(folder_);
  backend_ = model_->device().info().backend;
  if (end_of_turn_) set_replay(kReplayBytes);
}

Assistant::Assistant(text::Tokenizer tokenizer, model::Config config, std::unique_ptr<Executor> executor,
                     const EngineOptions& options)
    : backend_("scripted"),
      tokenizer_(std::move(tokenizer)),
      config_(std::move(config)),
      options_(options),
      end_of_turn_(tokenizer_.id_of(kEndOfTurn)),
      engine_(std::make_unique<Engine>(std::move(executor), options)) {
  set_replay(kReplayBytes);
}

Assistant::~Assistant() = default;

void Assistant::load(const backend::Progress& progress) {
  LILY_CHECK(!engine_, "a model is loaded once");
  model_->load(progress);
  engine_ = std::make_unique<Engine>(model_->make_executor(), options_, disk_.get());
  if (!constraints_) set_constraints(grammar_constraints());
}

ConstraintFactory Assistant::grammar_constraints() const {
  auto compiler = std::make_shared<grammar::GrammarCompiler>(tokenizer_, config_.stop_ids);
  return [this, compiler](const ChatRequest& request, const PreparedPrompt& prompt) {
    const int32_t n_rest = std::max(0, context() - static_cast<int32_t>(prompt.ids.size()));
    return compiler->constraint_for(
        request, {.starts_in_thinking = prompt.starts_in_thinking,
                  .n_room = request.max_tokens ? std::min(n_rest, *request.max_tokens) : n_rest});
  };
}

int Assistant::context() const {
  return engine_ ? engine_->limits().max_context : static_cast<int>(model_->memory().context);
}

SamplingParams Assistant::sampling(const SamplingOverrides& o) const {
  const model::SamplingDefaults& defaults = config_.sampling;
  SamplingParams p;
  p.temperature =
      o.temperature.value_or(defaults.do_sample ? static_cast<float>(defaults.temperature) : 0.0f);
  p.top_p = o.top_p.value_or(static_cast<float>(defaults.top_p));
  p.top_k = o.top_k.value_or(defaults.top_k);
  p.min_p = o.min_p.value_or(p.min_p);
  p.presence_penalty = o.presence_penalty.value_or(p.presence_penalty);
  p.frequency_penalty = o.frequency_penalty.value_or(p.frequency_penalty);
  p.repetition_penalty = o.repetition_penalty.value_or(p.repetition_penalty);
  p.logit_bias = o.logit_bias;
  p.seed = o.seed ? *o.seed : random_seed();
  return p;
}

void Assistant::set_replay(size_t max_bytes) {
  replay_ = max_bytes > 0 ? std::make_unique<ReplayBook>(max_bytes, disk_.get()) : nullptr;
}

// ---- Saved sessions

std::string Assistant::identity() const {
  if (!model_) return std::string(64, '0');
  return session_identity(*checkpoint_, model_->device().info(), model_->policy(), build_);
}

void Assistant::set_disk_cache(DiskCacheOptions options) {
  LILY_CHECK(model_ && !engine_ && !disk_, "before load(), once");
  options.identity = identity();
  disk_ = std::make_unique<DiskCache>(std::move(options));
  if (replay_) set_replay(kReplayBytes);
}

void Assistant::save_session(const std::filesystem::path& path, const ChatRequest& conversation,
                             std::string messages) {
  LILY_CHECK(engine_ != nullptr, "nothing is loaded yet");
  SessionHeader header{.kind = SessionKind::chat, .identity = identity(), .messages = std::move(messages)};
  if (replay_ && !conversation.messages.empty()) {
    VisibleHash last = replay_->hashes_of(conversation_of(conversation).messages, conversation.tools).back();
    if (auto ids = replay_->find(last)) {
      header.conversation = std::move(last.digits);
      header.replay = *std::move(ids);
    }
  }
  // The state is that of the beginning which any next question shares.
  ChatRequest next = conversation;
  next.messages.push_back(text::Message::of("user", "?"));
  if (engine_->save_session(prepare(next).ids, path, header)) return;
  SessionWriter(path, std::move(header)).publish();
}

Assistant::SavedSession Assistant::load_session(const std::filesystem::path& path) {
  LILY_CHECK(engine_ != nullptr, "nothing is loaded yet");
  SessionReader reader(path);
  const SessionHeader& header = reader.header();
  const std::string name = printable(path.string(), 400);
  if (header.kind != SessionKind::chat)
    fail(Fault::user, "{}: is a file of the cache and no saved chat", name);
  SavedSession session{.messages = header.messages};
  const bool is_ours = header.identity == identity();
  if (is_ours && replay_ && !header.conversation.empty())
    replay_->bring_back({header.conversation}, header.replay);
  if (!is_ours) {
    log(LogLevel::notice,
        "{}: was saved with another model, backend or build; the conversation is read again", name);
  } else if (!header.tokens.empty()) {
    try {
      session.has_state = engine_->load_session(reader);
    } catch (const Error& e) {
      log(LogLevel::warning, "{}; the conversation is read again", e.what());
    }
  }
  return session;
}

PreparedPrompt Assistant::prepare(const ChatRequest& request) const {
  const text::Conversation conversation = conversation_of(request);
  const std::vector<text::Message>& messages = conversation.messages;
  const text::RenderedPrompt prompt = text::render(messages, request.tools, conversation.options);
  PreparedPrompt prepared{.starts_in_thinking = prompt.starts_in_thinking(),
                          .continues_text = prompt.continues_text()};

  // The newest answer of ours that the conversation holds, and all that came before it.
  std::vector<int32_t> replayed;
  size_t n_replayed_bytes = 0;  // of the rendered prompt, which the tokens stand for
  if (replay_ && !conversation.options.continue_last) {
    std::vector<VisibleHash> hashes = replay_->hashes_of(messages, request.tools);
    for (size_t i = messages.size(); i-- > 0 && replayed.empty();) {
      if (messages[i].role != "assistant") continue;
      std::optional<std::vector<int32_t>> ids = replay_->find(hashes[i + 1]);
      if (!ids) continue;
      replayed = *std::move(ids);
      replayed.push_back(*end_of_turn_);
      n_replayed_bytes = prompt.message_ends()[i] - 1;  // the line end after the turn's closing token
    }
    prepared.visible = std::move(hashes.back());
  }
  prepared.ids = std::move(replayed);
  size_t n_done_bytes = n_replayed_bytes;
  // Token by token the same as without a cut, at the end of a turn: the token after it is <|im_start|>.
  const auto tokenize_to = [&](size_t end) {
    text::tokenize_append(prompt, n_done_bytes, end, tokenizer_, prepared.ids);
    n_done_bytes = end;
    return static_cast<int32_t>(prepared.ids.size());
  };
  // Other conversations part from this one after the tools and the system message, another question parts
  // from this one after the last answer.
  const std::span<const size_t> ends = prompt.message_ends();
  std::vector<size_t> places = {prompt.system_end()};
  for (size_t i = messages.size(); i-- > 0;) {
    if (messages[i].role != "assistant") continue;
    if (i + 1 < messages.size()) places.push_back(ends[i]);
    break;
  }
  for (const size_t place : places)
    if (place > n_done_bytes) prepared.branches.push_back(tokenize_to(place));
  // The next turn begins as this prompt does up to its generation prompt.
  if (ends.back() < prompt.text().size()) prepared.n_stable = tokenize_to(ends.back());
  tokenize_to(prompt.text().size());
  return prepared;
}

std::string Assistant::rendered(const ChatRequest& request) const {
  const text::Conversation conversation = conversation_of(request);
  return text::render(conversation.messages, request.tools, conversation.options).text();
}

AnswerStream Assistant::start(const ChatRequest& request) {
  LILY_CHECK(engine_ != nullptr, "nothing is loaded yet");
  PreparedPrompt prompt = prepare(request);
  const bool calls = request.tools.is_array() && !request.tools.empty() &&
                     request.tool_choice.kind != ToolChoice::Kind::none;
  const SamplingParams params = sampling(request.sampling);
  GenerateRequest generate{.session = request.cache_key,
                           .n_stable = prompt.n_stable,
                           .branches = std::move(prompt.branches),
                           .sampling = params,
                           .stop_ids = config_.stop_ids,
                           .max_tokens = request.max_tokens.value_or(0),
                           .top_logprobs = request.top_logprobs};
  if (constraints_) generate.constraint = constraints_(request, prompt);
  AnswerStream::State::Begin begin{.tools = calls ? request.tools : nlohmann::ordered_json(),
                                   .output = {.starts_in_thinking = prompt.starts_in_thinking,
                                              .continues_text = prompt.continues_text,
                                              .calls = calls,
                                              .stop = request.stop},
                                   .parallel_calls = request.tool_choice.parallel,
                                   .seed = params.seed,
                                   .n_prompt = static_cast<int32_t>(prompt.ids.size()),
                                   .n_context = context()};
  if (replay_ && !prompt.visible.digits.empty()) {
    begin.replay = replay_.get();
    begin.visible = std::move(prompt.visible);
    begin.ids = prompt.ids;
  }
  generate.prompt = std::move(prompt.ids);
  return AnswerStream(
      std::make_unique<AnswerStream::State>(tokenizer_, std::move(begin), *engine_, std::move(generate)));
}

AnswerStream Assistant::start(const TextRequest& request) {
  LILY_CHECK(engine_ != nullptr, "nothing is loaded yet");
  const SamplingParams params = sampling(request.sampling);
  GenerateRequest generate{.sampling = params,
                           .stop_ids = config_.stop_ids,
                           .max_tokens = request.max_tokens.value_or(0),
                           .top_logprobs = request.top_logprobs};
  if (const auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt)) generate.prompt = *ids;
  else generate.prompt = tokenizer_.encode(std::get<std::string>(request.prompt), text::AddedTokens::all);
  if (constraints_ && request.format.kind != OutputFormat::Kind::text) {
    ChatRequest chat;
    chat.format = request.format;
    chat.thinking.enabled = false;
    generate.constraint = constraints_(chat, {.continues_text = true});
  }
  AnswerStream::State::Begin begin{.output = {.continues_text = true, .calls = false, .stop = request.stop},
                                   .seed = params.seed,
                                   .n_prompt = static_cast<int32_t>(generate.prompt.size()),
                                   .n_context = context()};
  return AnswerStream(
      std::make_unique<AnswerStream::State>(tokenizer_, std::move(begin), *engine_, std::move(generate)));
}

}  // namespace lily::engine
