// What an answer has said so far: what every writer needs for its whole form and its closing events.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/chat_request.h"
#include "server/body.h"
#include "text/tokenizer.h"

namespace lily::server {

struct Transcript {
  struct Call {
    std::string id, name, arguments;
    bool complete = false;
  };
  std::string reasoning, content;
  std::vector<Call> calls;
  std::vector<engine::Token> tokens;  // where logprobs were asked for
  engine::AnswerEnd end;

  // `id_prefix` of calls: "call_".
  void add(const text::OutputEvent& event, std::string_view id_prefix);
};

// [{token, logprob, bytes, top_logprobs}] as OpenAI's clients read it.
Json logprobs_content(const std::vector<engine::Token>& tokens, int n_top, const text::Tokenizer& tokenizer);
// The text of one token; what is no UTF-8 becomes U+FFFD.
std::string token_text(int32_t id, const text::Tokenizer& tokenizer);
// Log-probabilities as JSON can hold them.
double finite_logprob(float logprob);

// prefill_ms, decode_tps and the like, cache, seed, stop_detail: the `lily` member of answers.
Json lily_details(const engine::AnswerEnd& end);

}  // namespace lily::server
