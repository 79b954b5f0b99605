#include "engine/grammar/grammar_compiler.h"

#include <algorithm>

#include "base/error.h"
#include "engine/grammar/call_grammar.h"
#include "engine/grammar/regex.h"
#include "engine/grammar/schema_compiler.h"
#include "text/json_text.h"

namespace lily::engine::grammar {
namespace {

constexpr const char* kSchemaName = "the schema of the response format";

// A matcher that lives as long as the vocabulary whose tree it reads.
struct Owned {
  std::shared_ptr<const Vocabulary> vocabulary;
  TokenMatcher matcher;
  Owned(std::shared_ptr<const Vocabulary> v, Grammar grammar, const TokenMatcherLimits& limits)
      : vocabulary(std::move(v)),
        matcher(std::move(grammar), vocabulary->trie(), vocabulary->tokenizer(), limits) {}
};

// Faults of the client's schema become SchemaRefused; `field`: empty where the message begins with it.
template <typename Compile>
auto compiled(const std::string& field, Compile compile) {
  try {
    return compile();
  } catch (const Error& e) {
    if (e.fault() != Fault::user) throw;
    const std::string what = e.what();
    throw SchemaRefused(field.empty() ? what.substr(0, what.find_first_of(" :")) : field, what);
  }
}

// A document, after the empty line that models like to write before it.
Grammar after_blanks(Grammar grammar) {
  const NodeId blanks = grammar.add({.kind = Node::Kind::bytes, .dfa = regex("^( |\n{0,2})$")});
  grammar.root = grammar.add({.kind = Node::Kind::sequence, .children = {blanks, grammar.root}});
  return grammar;
}

}  // namespace

GrammarCompiler::GrammarCompiler(const text::Tokenizer& tokenizer, std::vector<int32_t> stop_ids,
                                 GrammarOptions options)
    : vocabulary_(std::make_shared<Vocabulary>(tokenizer, std::move(stop_ids))), options_(options) {
  const LoopGuard checked(options_.loops);
}

int GrammarCompiler::n_grammars() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(kept_.size());
}

GrammarCompiler::Shared GrammarCompiler::matcher(const std::string& key,
                                                 const std::function<Grammar()>& compile) {
  const auto known = [&]() -> Shared {
    const auto at =
        std::find_if(kept_.begin(), kept_.end(), [&](const auto& entry) { return entry.first == key; });
    if (at == kept_.end()) return nullptr;
    kept_.splice(kept_.begin(), kept_, at);
    return at->second;
  };
  {
    const std::lock_guard lock(mutex_);
    if (Shared found = known()) return found;
  }
  if (!vocabulary_->trie().has_all_bytes())
    fail(Fault::model,
         "the tokenizer has no token for some bytes; constrained answers cannot be written with it");
  auto owned = std::make_shared<Owned>(vocabulary_, compile(), options_.matcher);
  Shared made(owned, &owned->matcher);
  const std::lock_guard lock(mutex_);
  if (Shared found = known()) return found;  // another thread was faster
  kept_.emplace_front(key, made);
  size_t n_bytes = 0;
  for (const auto& [name, matcher] : kept_) n_bytes += matcher->n_bytes();
  while (kept_.size() > 1 && (kept_.size() > static_cast<size_t>(options_.max_grammars) ||
                              n_bytes > options_.max_grammar_bytes)) {
    n_bytes -= std::min(n_bytes, kept_.back().second->n_bytes());
    kept_.pop_back();
  }
  return made;
}

GrammarCompiler::Shared GrammarCompiler::text_matcher(const OutputFormat& format) {
  switch (format.kind) {
    case OutputFormat::Kind::text:
      return nullptr;
    case OutputFormat::Kind::json_object:
      return matcher("object", [] { return after_blanks(json_object_grammar()); });
    case OutputFormat::Kind::json_schema:
      return compiled(format.field, [&] {
        check_nesting(format.schema, kSchemaName);
        return matcher("schema " + text::dump_json(format.schema),
                       [&] { return after_blanks(schema_grammar(format.schema, kSchemaName)); });
      });
  }
  return nullptr;
}

std::unique_ptr<TokenConstraint> GrammarCompiler::constraint_for(const TextRequest& request) {
  ChatConstraint::Demands demands{.text = text_matcher(request.format), .loops = options_.loops};
  if (!demands.text && !demands.loops.enabled) return nullptr;
  return std::make_unique<ChatConstraint>(vocabulary_, std::move(demands), text::ToolSet());
}

std::unique_ptr<TokenConstraint> GrammarCompiler::constraint_for(const ChatRequest& request,
                                                                 const Answer& answer) {
  using Choice = ToolChoice::Kind;
  const Choice choice = request.tool_choice.kind;
  const bool has_tools = request.tools.is_array() && !request.tools.empty();
  ChatConstraint::Demands demands{.starts_in_thinking = answer.starts_in_thinking, .loops = options_.loops};
  demands.text = text_matcher(request.format);
  demands.calls_possible = has_tools && choice != Choice::none;
  demands.calls_forbidden = has_tools && choice == Choice::none;
  demands.call_required = choice == Choice::required || choice == Choice::named;
  demands.single_call = !request.tool_choice.parallel && demands.calls_possible;
  if (demands.call_required && !has_tools)
    fail(Fault::user, "tool_choice asks for a call, but there are no tools");
  const bool skeleton =
      demands.call_required || (demands.calls_possible && (demands.text || any_strict(request.tools)));
  if (skeleton) {
    if (vocabulary_->call_open() < 0 || vocabulary_->call_close() < 0)
      fail(Fault::model,
           "the tokenizer has no <tool_call> and </tool_call>; calls cannot be constrained with it");
    const std::string name = choice == Choice::named ? request.tool_choice.name : std::string();
    if (choice == Choice::named && name.empty()) fail(Fault::user, "tool_choice names no function");
    demands.calls = compiled("", [&] {
      check_nesting(request.tools, "tools");
      return matcher("calls " + text::dump_json(name) + text::dump_json(request.tools),
                     [&] { return call_grammar(request.tools, name, request.tool_places); });
    });
  }
  if (demands.starts_in_thinking && request.thinking.budget) {
    const auto n_closing = static_cast<int32_t>(vocabulary_->closing().size());
    const int32_t for_answer = std::min(kAnswerTokens, answer.n_room / 2);
    demands.thinking_budget =
        std::clamp(*request.thinking.budget, 0, std::max(0, answer.n_room - for_answer - n_closing));
  }
  const bool nothing = !demands.text && !demands.calls && !demands.calls_forbidden && !demands.single_call &&
                       demands.thinking_budget < 0 && !demands.loops.enabled;
  if (nothing) return nullptr;
  return std::make_unique<ChatConstraint>(vocabulary_, std::move(demands), text::ToolSet(request.tools));
}

}  // namespace lily::engine::grammar
