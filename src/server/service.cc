#include "server/service.h"

#include <ctime>

#include "base/log.h"
#include "base/printable.h"
#include "server/openai_chat.h"
#include "server/openai_fields.h"
#include "text/chat.h"

namespace lily::server {
namespace {

constexpr auto kPollForClient = std::chrono::milliseconds(100);  // how soon a client that left is noticed
constexpr size_t kMaxIgnoredNames = 1000;                        // that are remembered as logged

ApiError stopping() {
  return {503, "overloaded_error", "stopping", "", "the server is stopping; the answer was given up"};
}

UpstreamOptions upstream_options(const ServiceOptions& options) {
  UpstreamOptions out = options.upstreams;
  out.limits.silence = options.step_timeout;
  out.limits.keep_alive = options.keep_alive;
  return out;
}

}  // namespace

Service::Service(engine::Assistant& assistant, ServiceOptions options)
    : assistant_(assistant),
      options_(std::move(options)),
      model_{.tokenizer = assistant.tokenizer(),
             .id = options_.model_id,
             .created = std::time(nullptr),
             .context = assistant.context(),
             .preserve_thinking = options_.preserve_thinking,
             .keep_volatile = options_.keep_volatile},
      upstreams_(upstream_options(options_)) {}

engine::AnswerStream Service::start(const Call& call) {
  if (gives_up_) throw stopping();
  note_ignored(call.ignored);
  try {
    return std::visit([&](const auto& request) { return assistant_.start(request); }, call.request);
  } catch (const std::exception& e) {
    throw api_error_of(e);
  }
}

void Service::note_ignored(const std::vector<std::string>& names) {
  std::string fresh;
  {
    const std::lock_guard lock(ignored_mutex_);
    for (const std::string& name : names)
      if (ignored_.size() < kMaxIgnoredNames && ignored_.insert(name).second)
        fresh += (fresh.empty() ? "" : ", ") + name;
  }
  if (!fresh.empty()) log(LogLevel::info, "without meaning here and ignored: {}", fresh);
}

void Service::log_miss(const engine::AnswerEnd& end) const {
  if (!end.miss) return;
  std::string texts;
  if (options_.log_misses) {
    const auto text = [&](const std::vector<int32_t>& ids) {
      return printable(model_.tokenizer.decode_bytes(ids));
    };
    texts = fmt::format(": after \"{}\" comes \"{}\", and \"{}\" was remembered", text(end.miss->before),
                        text(end.miss->asked), text(end.miss->known));
  }
  log(LogLevel::info,
      "cache: a prompt of {} tokens goes on from {} cached ones; it differs from the nearest one "
      "remembered at token {}{}",
      end.usage.prompt_tokens, end.usage.cached_tokens, end.miss->position, texts);
}

Outcome Service::pump(engine::AnswerStream& answer,
                      const std::function<bool(const engine::AnswerEvent&)>& take,
                      const std::function<bool()>& idle, const IsThere& is_there) {
  Outcome outcome;
  auto last_event = options_.now(), last_sent = last_event;
  int64_t n_steps = assistant_.engine().stats().n_steps;
  const auto leave = [&] {
    answer.cancel();
    ++n_left_;
    outcome.client_left = true;
    return outcome;
  };
  while (!answer.done()) {
    const auto event = answer.next_for(kPollForClient);
    const auto now = options_.now();
    if (!is_there()) return leave();
    if (gives_up_) {
      answer.cancel();
      throw stopping();
    }
    if (!event) {
      if (now - last_event > options_.step_timeout) {
        // A request that waits its turn, or a long step of another one, is not a model that hangs.
        if (const int64_t steps = assistant_.engine().stats().n_steps; steps != n_steps) {
          n_steps = steps;
          last_event = options_.now();  // after the count: a step that is missed then is seen next time
          continue;
        }
        answer.cancel();
        throw ApiError(
            500, "server_error", "step_timeout", "",
            fmt::format("the model has made no step for {} s; the request was given up",
                        std::chrono::duration_cast<std::chrono::seconds>(now - last_event).count()));
      }
      if (now - last_sent >= options_.keep_alive) {
        if (!idle()) return leave();
        last_sent = now;
      }
      continue;
    }
    last_event = now;
    if (const auto* end = std::get_if<engine::AnswerEnd>(&*event)) {
      outcome.end = *end;
      log_miss(*end);
      if (end->finish == engine::Finish::error)
        throw ApiError(end->fault == Fault::user ? 400 : 500,
                       end->fault == Fault::user ? "invalid_request_error" : "server_error", "", "",
                       end->error);
      if (end->finish == engine::Finish::cancelled)
        throw ApiError(500, "server_error", "cancelled", "",
                       "the answer was given up: the server is stopping, or it was not read in time");
    }
    if (!take(*event)) return leave();
    // Progress that the client is not told about does not keep the connection alive.
    if (std::holds_alternative<engine::AnswerPiece>(*event)) last_sent = now;
    else if (now - last_sent >= options_.keep_alive) {
      if (!idle()) return leave();
      last_sent = now;
    }
  }
  return outcome;
}

Outcome Service::stream(engine::AnswerStream& answer, AnswerWriter& writer, const Send& send,
                        const IsThere& is_there, const std::string& request_id) {
  const auto send_some = [&](const std::string& bytes) { return bytes.empty() || send(bytes); };
  try {
    if (!send_some(writer.begin())) {
      answer.cancel();
      ++n_left_;
      return {.client_left = true};
    }
    return pump(
        answer, [&](const engine::AnswerEvent& event) { return send_some(writer.event(event)); },
        [&] { return send_some(writer.keep_alive()); }, is_there);
  } catch (const std::exception& e) {
    answer.cancel();
    ApiError error = api_error_of(e);
    error.request_id = request_id;
    log(LogLevel::error, "{}: an answer failed: {}", request_id, error.what());
    send_some(writer.failure(error));
    return {.error = error.what()};
  }
}

std::optional<Json> Service::whole(engine::AnswerStream& answer, AnswerWriter& writer,
                                   const IsThere& is_there, Outcome& outcome) {
  outcome = pump(
      answer,
      [&](const engine::AnswerEvent& event) {
        writer.event(event);
        return true;
      },
      [] { return true; }, is_there);
  if (outcome.client_left) return {};
  return writer.whole();
}

std::optional<Json> Service::model_entry(const std::string& id) const {
  Json entry = {{"id", id}, {"object", "model"}, {"created", model_.created}};
  if (id == model_.id) {
    entry["owned_by"] = "lily";
    entry["max_model_len"] = entry["context_length"] = model_.context;
    return entry;
  }
  // What an upstream can do is for it to say.
  if (!upstreams_.find(id, model_.id)) return {};
  entry["owned_by"] = "upstream";
  return entry;
}

Json Service::models() const {
  Json data = Json::array({*model_entry(model_.id)});
  for (const Upstream& upstream : upstreams_.all())
    if (const auto entry = model_entry(upstream.name)) data.push_back(*entry);
  return {{"object", "list"}, {"data", std::move(data)}};
}

Json Service::tokenize(const Json& json) const {
  Body body(json);
  std::vector<int32_t> ids;
  if (body.find("messages") != nullptr) {
    Json chat = json;
    if (!chat.contains("stream")) chat["stream"] = false;
    ids = assistant_.prepare(std::get<engine::ChatRequest>(parse_chat_completion(chat, model_).request)).ids;
  } else {
    auto text = body.text("content");
    if (!text) text = body.text("prompt");
    if (!text) body.fail("content", "a text is needed (or messages)");
    const bool special = body.boolean("parse_special", true);
    ids = model_.tokenizer.encode(*text, special ? text::AddedTokens::all : text::AddedTokens::none);
  }
  Json out = {{"tokens", ids}, {"count", ids.size()}, {"max_model_len", model_.context}};
  if (body.boolean("with_pieces", false)) {
    out["pieces"] = Json::array();
    for (const int32_t id : ids) out["pieces"].push_back(std::string(model_.tokenizer.token_bytes(id)));
  }
  return out;
}

Json Service::detokenize(const Json& json) const {
  Body body(json);
  const Json* tokens = body.array("tokens");
  if (tokens == nullptr) body.fail("tokens", "a list of token ids is needed");
  const std::vector<int32_t> ids = parse_token_ids(body, "tokens", *tokens, model_.tokenizer.n_tokens());
  const std::string text = model_.tokenizer.decode_bytes(ids);
  return {{"content", text}, {"prompt", text}};
}

Json Service::apply_template(const Json& json) const {
  const Call call = parse_chat_completion(json, model_);
  return {{"prompt", assistant_.rendered(std::get<engine::ChatRequest>(call.request))}};
}

Json Service::count_tokens(const engine::ChatRequest& request) const {
  return {{"input_tokens", assistant_.prepare(request).ids.size()}};
}

Service::Held Service::held(const engine::EngineStats& s) const {
  const engine::Limits& limits = assistant_.engine().limits();
  return {.kv_bytes = (s.n_blocks - s.n_free_blocks) * limits.block_bytes,
          .state_bytes = (s.n_states - s.n_free_states) * limits.state_bytes};
}

Json Service::cache() const {
  const engine::EngineStats s = assistant_.engine().stats();
  const Held bytes = held(s);
  Json out = {{"entries", s.n_cached_states},
              {"hits", s.cache_hits},
              {"misses", s.cache_misses},
              {"misses_by_reason",
               {{"differs", s.cache_misses_parted}, {"unknown", s.cache_misses - s.cache_misses_parted}}},
              {"evictions", s.cache_evictions},
              {"cached_tokens", s.cached_tokens},
              {"prompt_tokens", s.prompt_tokens},
              {"bytes",
               {{"kv", bytes.kv_bytes},
                {"states", bytes.state_bytes},
                {"replay", assistant_.replay_bytes()},
                {"disk", 0}}},
              {"kv_blocks", {{"free", s.n_free_blocks}, {"total", s.n_blocks}}},
              {"state_slots", {{"free", s.n_free_states}, {"total", s.n_states}}}};
  if (s.pool_bytes > 0)
    out["memory"] = {{"resident_bytes", s.resident_bytes},
                     {"budget_bytes", s.pool_bytes},
                     {"given_back_bytes", s.given_back_bytes}};
  if (engine::DiskCache* const disk = assistant_.disk_cache()) {
    const engine::DiskCacheStats d = disk->stats();
    out["disk"] = {
        {"files", d.n_files},        {"bytes", d.n_bytes},     {"max_bytes", disk->options().max_bytes},
        {"hits", s.cache_disk_hits}, {"written", d.n_written}, {"failed", d.n_failed},
        {"ignored", d.n_ignored}};
    out["bytes"]["disk"] = d.n_bytes;
  }
  return out;
}

std::string Service::metrics() const {
  const engine::EngineStats s = assistant_.engine().stats();
  std::string out;
  const auto add = [&](const char* name, const char* type, const char* help, auto value) {
    out += fmt::format("# HELP lily_{} {}\n# TYPE lily_{} {}\nlily_{} {}\n", name, help, name, type, name,
                       value);
  };
  out +=
      "# HELP lily_http_requests_total HTTP requests by result.\n# TYPE lily_http_requests_total counter\n";
  out += fmt::format(
      "lily_http_requests_total{{result=\"ok\"}} {}\nlily_http_requests_total{{result=\"refused\"}} {}\n"
      "lily_http_requests_total{{result=\"failed\"}} {}\n",
      n_ok_.load(), n_refused_.load(), n_failed_.load());
  out += upstreams_.metrics();
  add("clients_left_total", "counter", "Answers given up because the client had gone.", n_left_.load());
  add("requests_total", "counter", "Answers begun.", s.n_requests);
  add("requests_failed_total", "counter", "Answers that ended in an error.", s.n_failed);
  add("requests_waiting", "gauge", "Requests in the queue.", s.n_waiting);
  add("requests_running", "gauge", "Answers being computed.", s.n_running);
  add("prompt_tokens_total", "counter", "Tokens of prompts, cached ones included.", s.prompt_tokens);
  add("cached_tokens_total", "counter", "Tokens of prompts that were not computed again.", s.cached_tokens);
  add("completion_tokens_total", "counter", "Tokens written.", s.completion_tokens);
  add("steps_total", "counter", "Steps of the device.", s.n_steps);
  add("cache_hits_total", "counter", "Prompts that began in the prefix cache.", s.cache_hits);
  add("cache_misses_total", "counter", "Prompts that did not.", s.cache_misses);
  add("cache_misses_parted_total", "counter", "Of these: began like one remembered, where no state was kept.",
      s.cache_misses_parted);
  add("cache_evictions_total", "counter", "Snapshots given up because memory was needed.", s.cache_evictions);
  add("cache_hit_ratio", "gauge", "Share of all prompt tokens so far that were not computed again.",
      s.cached_share());
  if (engine::DiskCache* const disk = assistant_.disk_cache()) {
    const engine::DiskCacheStats d = disk->stats();
    add("disk_cache_hits_total", "counter", "States brought back from the disk.", s.cache_disk_hits);
    add("disk_cache_written_total", "counter", "Files written to the disk cache.", d.n_written);
    add("disk_cache_failed_total", "counter", "Files that could not be written.", d.n_failed);
    add("disk_cache_bytes", "gauge", "Bytes of the disk cache.", d.n_bytes);
  }
  add("cache_entries", "gauge", "Snapshots in the prefix cache.", s.n_cached_states);
  add("replay_bytes", "gauge", "Memory of answers that are remembered token for token.",
      assistant_.replay_bytes());
  const Held bytes = held(s);
  add("kv_bytes", "gauge", "Bytes of the KV cache that somebody holds.", bytes.kv_bytes);
  add("state_bytes", "gauge", "Bytes of recurrent states that somebody holds.", bytes.state_bytes);
  add("kv_blocks", "gauge", "Blocks of the KV cache.", s.n_blocks);
  add("kv_blocks_free", "gauge", "Blocks of the KV cache that nobody holds.", s.n_free_blocks);
  add("state_slots", "gauge", "Recurrent states that fit.", s.n_states);
  add("state_slots_free", "gauge", "Recurrent states that nobody holds.", s.n_free_states);
  if (s.pool_bytes > 0) {
    add("pool_bytes", "gauge", "Budget of KV and states together.", s.pool_bytes);
    add("pool_resident_bytes", "gauge", "Of these: memory in use.", s.resident_bytes);
    add("pool_given_back_bytes_total", "counter", "Given back because the machine's memory was short.",
        s.given_back_bytes);
  }
  return out;
}

}  // namespace lily::server
