#include "server/transcript.h"

#include <cmath>

#include "server/dialect.h"

namespace lily::server {
namespace {

Json token_entry(int32_t id, float logprob, const text::Tokenizer& tokenizer) {
  Json bytes = Json::array();
  for (const char byte : tokenizer.token_bytes(id)) bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", token_text(id, tokenizer)}, {"logprob", finite_logprob(logprob)}, {"bytes", bytes}};
}

const char* detail_name(engine::AnswerEnd::Detail detail) {
  using Detail = engine::AnswerEnd::Detail;
  switch (detail) {
    case Detail::none:
      return nullptr;
    case Detail::stop_string:
      return "stop_string";
    case Detail::loop:
      return "loop";
    case Detail::thinking_budget:
      return "thinking_budget";
  }
  return nullptr;
}

double per_second(double count, double ms) { return ms > 0 ? std::round(count / ms * 1e5) / 100 : 0; }

}  // namespace

void Transcript::add(const text::OutputEvent& event, std::string_view id_prefix) {
  using Kind = text::OutputEvent::Kind;
  switch (event.kind) {
    case Kind::reasoning:
      reasoning += event.text;
      break;
    case Kind::content:
      content += event.text;
      break;
    case Kind::call_begin:
      calls.push_back({call_id(id_prefix, event), event.text, {}, false});
      break;
    case Kind::call_arguments:
      calls.at(static_cast<size_t>(event.call)).arguments += event.text;
      break;
    case Kind::call_end:
      calls.at(static_cast<size_t>(event.call)).complete = true;
      break;
  }
}

double finite_logprob(float logprob) { return std::isfinite(logprob) ? logprob : -9999.0; }

std::string token_text(int32_t id, const text::Tokenizer& tokenizer) {
  const std::string quoted = to_text(Json(std::string(tokenizer.token_bytes(id))));
  return Json::parse(quoted).get<std::string>();
}

Json logprobs_content(const std::vector<engine::Token>& tokens, int n_top, const text::Tokenizer& tokenizer) {
  Json list = Json::array();
  for (const engine::Token& token : tokens) {
    Json entry = token_entry(token.id, token.logprob, tokenizer);
    entry["top_logprobs"] = Json::array();
    for (size_t i = 0; i < token.top.size() && i < static_cast<size_t>(n_top); ++i)
      entry["top_logprobs"].push_back(token_entry(token.top[i].id, token.top[i].logprob, tokenizer));
    list.push_back(std::move(entry));
  }
  return list;
}

Json lily_details(const engine::AnswerEnd& end) {
  const engine::Usage& usage = end.usage;
  const engine::Timings& t = end.timings;
  Json cache = {{"hit_tokens", usage.cached_tokens}, {"source", end.cache_source}};
  cache["miss_reason"] = end.cache_miss.empty() ? Json() : Json(end.cache_miss);
  Json out = {{"queued_ms", t.queued_ms},
              {"prefill_ms", t.prefill_ms},
              {"ttft_ms", t.ttft_ms},
              {"decode_ms", t.decode_ms},
              {"prefill_tps", per_second(usage.prompt_tokens - usage.cached_tokens, t.prefill_ms)},
              {"decode_tps", per_second(std::max(usage.completion_tokens - 1, 0), t.decode_ms)},
              {"cache", cache},
              {"seed", end.seed}};
  if (const char* detail = detail_name(end.detail)) out["stop_detail"] = detail;
  return out;
}

}  // namespace lily::server
