// lily run: answers one prompt, or opens the interactive chat.
#include <unistd.h>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "cli/assistant.h"
#include "cli/chat.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxToolsBytes = uint64_t{16} << 20;

struct Options {
  ModelOptions model;
  AnswerOptions answer;
  std::vector<std::string> words;
  std::string system, tools_file;
  bool json = false;
};

Json answer_json(const Answer& answer, const Assistant& assistant) {
  Json calls = Json::array();
  for (const auto& call : answer.output.calls)
    calls.push_back({{"name", call.name}, {"arguments", call.arguments}});
  return {{"text", answer.output.content},
          {"reasoning", answer.output.reasoning},
          {"tool_calls", calls},
          {"token_ids", answer.token_ids},
          {"finish_reason", answer.finish_reason()},
          {"prompt_tokens", answer.usage.prompt_tokens},
          {"cached_tokens", answer.usage.cached_tokens},
          {"completion_tokens", answer.usage.completion_tokens},
          {"prefill_tok_s", answer.prefill_tok_s()},
          {"decode_tok_s", answer.decode_tok_s()},
          {"ttft_ms", answer.timings.ttft_ms},
          {"model", assistant.folder()},
          {"backend", assistant.backend()},
          {"seed", answer.seed}};
}

std::string prompt_from_stdin() {
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

int run(const Options& o) {
  std::string prompt = fmt::format("{}", fmt::join(o.words, " "));
  const bool is_interactive = prompt.empty() && isatty(STDIN_FILENO) != 0 && !o.json;
  if (prompt.empty() && !is_interactive) prompt = prompt_from_stdin();
  if (prompt.empty() && !is_interactive)
    fail(Fault::user, "no prompt: name it as words, pipe it in, or run on a terminal for a chat");
  Json tools;
  if (!o.tools_file.empty()) {
    tools = Json::parse(read_text_file(o.tools_file, kMaxToolsBytes), nullptr, false);
    if (!tools.is_array()) fail(Fault::user, "--tools {}: expected a JSON array of tools", o.tools_file);
  }

  Assistant assistant(o.model);
  if (is_interactive) return chat(assistant, o.answer, o.system, tools);

  std::vector<text::Message> messages;
  if (!o.system.empty()) messages.push_back(text::Message::of("system", o.system));
  messages.push_back(text::Message::of("user", prompt));
  AnswerPrinter printer;
  const Answer answer = assistant.answer(messages, tools, o.answer, [&](const text::OutputEvent& event) {
    if (!o.json) printer.print(event);
  });
  if (o.json) {
    fmt::print("{}\n", answer_json(answer, assistant).dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    printer.finish();
    print_statistics(answer);
  }
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace

void add_answer_options(CLI::App& command, AnswerOptions& o) {
  command.add_option("-n,--max-tokens", o.max_tokens, "Tokens to write at most; 0: the rest of the context")
      ->check(CLI::Range(0, 1 << 30));
  command.add_option("--stop", o.stop, "Text that ends the answer; may be repeated")->take_all();
  command.add_option("-t,--temperature", o.temperature, "0 is greedy")->check(CLI::Range(0.0, 100.0));
  command.add_option("--top-p", o.top_p)->check(CLI::Range(0.0, 1.0));
  command.add_option("--top-k", o.top_k, "0 is off")->check(CLI::Range(0, 1 << 20));
  command.add_option("--min-p", o.min_p)->check(CLI::Range(0.0, 1.0));
  command.add_option("--presence-penalty", o.presence_penalty)->check(CLI::Range(-2.0, 2.0));
  command.add_option("--repetition-penalty", o.repetition_penalty)->check(CLI::Range(0.01, 10.0));
  command.add_option("--seed", o.seed, "The same seed, model and backend give the same answer");
  command.add_flag("--think,!--no-think", o.think, "Let the model think before it answers (default: on)");
  command.add_flag("--preserve-thinking", o.preserve_thinking,
                   "Keep the thinking of earlier turns in the prompt");
}

void add_run(CLI::App& app, Action& action) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("run", "Answer a prompt given as words or on stdin; with neither, a chat");
  command->add_option("PROMPT", options->words, "The prompt");
  add_model_options(*command, options->model);
  add_answer_options(*command, options->answer);
  command->add_option("--system", options->system, "System message");
  command->add_option("--tools", options->tools_file,
                      "File with a JSON array of tools that the model may call");
  command->add_flag("--json", options->json, "One JSON document on stdout, after the whole answer");
  command->footer(
      "Examples:\n  lily run \"What is 17 * 23?\"\n  git diff | lily run --system \"Write a commit "
      "message.\"\n"
      "  lily run                      (a chat; /help lists its commands)");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace lily::cli
