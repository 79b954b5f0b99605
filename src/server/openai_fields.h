// Fields that OpenAI's endpoints have in common.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "server/body.h"
#include "server/dialect.h"

namespace lily::server {

// temperature, top_p, top_k, min_p, penalties, seed, logit_bias.
engine::SamplingOverrides parse_sampling(Body& body, const ServedModel& model);
// A string or up to 16 of them.
std::vector<std::string> parse_stop(Body& body, const char* name);
// The functions of a request, each with a name of its own, for the template; ChatRequest::tools stays null if
// there are none.
class Functions {
 public:
  explicit Functions(engine::ChatRequest& request) : request_(request) {}
  // `tool`: in the form that the template takes; `fields` and `schema`: where the client has its name, and
  // its schema.
  void add(const Body& fields, const char* schema, Json tool);

 private:
  engine::ChatRequest& request_;
  std::set<std::string> names_;
};
// Those of chat completions, which have that form; the others put theirs together.
void parse_functions(const Json& tools, engine::ChatRequest& request);
// auto, none, required (any), or a function's name in one of the forms in use.
engine::ToolChoice parse_tool_choice(Body& body, const Json& tools);
// {"type": "text" | "json_object" | "json_schema", ...}; the schema inside or flat.
engine::OutputFormat parse_format(Body format);
// none, minimal, low, medium, high, xhigh, max: off, a budget, or no bound.
void apply_effort(const std::string& effort, const std::string& path, engine::Thinking& thinking);
// thinking, thinking_budget and its alias, enable_thinking, preserve_thinking, chat_template_kwargs. They win
// over an effort that was applied before. Appends names that mean nothing to `ignored`.
void parse_thinking(Body& body, engine::Thinking& thinking, std::vector<std::string>& ignored);
// A list of token ids; the field is named where it is wrong.
std::vector<int32_t> parse_token_ids(const Body& body, const char* name, const Json& list, int32_t n_tokens);
std::optional<int32_t> parse_max_tokens(Body& body, const char* name);
// A number of choices other than one.
void refuse_several(Body& body, const char* name);

// "usage" of completions; responses have names of their own.
Json openai_usage(const engine::Usage& usage, int32_t reasoning_tokens);

// A chunk of a stream. `head`: what all chunks have in common.
Json chunk_of(Json head, Json choice);
// The last chunks: one with the end of the choice, one with `usage` where it is not null, [DONE].
std::string closing_chunks(const Json& head, Json choice, const char* finish_reason,
                           const engine::AnswerEnd& end, const Json& usage);
// stream, and stream_options.include_usage. Returns whether usage is asked for.
bool parse_stream(Body& body, Call& call);

void add_ignored(std::vector<std::string>& ignored, const std::vector<std::string>& names);

}  // namespace lily::server
