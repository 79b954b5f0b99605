// lily run: answers one prompt, or opens the interactive chat.
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "cli/answer.h"
#include "cli/chat.h"
#include "cli/line_editor.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxToolsBytes = uint64_t{16} << 20;

struct RunOptions {
  ModelOptions model;
  AnswerOptions answer;
  DiskOptions disk;
  std::vector<std::string> words;
  std::string system, tools_file;
  bool json = false, no_history = false;
};

Json answer_json(const Answer& answer, const engine::Assistant& assistant) {
  Json calls = Json::array();
  for (const auto& call : answer.output.calls)
    calls.push_back({{"name", call.name}, {"arguments", call.arguments}});
  return {{"text", answer.output.content},
          {"reasoning", answer.output.reasoning},
          {"tool_calls", calls},
          {"token_ids", answer.token_ids},
          {"finish_reason", answer.finish_reason()},
          {"prompt_tokens", answer.end.usage.prompt_tokens},
          {"cached_tokens", answer.end.usage.cached_tokens},
          {"completion_tokens", answer.end.usage.completion_tokens},
          {"prefill_tok_s", answer.prefill_tok_s()},
          {"decode_tok_s", answer.decode_tok_s()},
          {"ttft_ms", answer.end.timings.ttft_ms},
          {"model", assistant.folder()},
          {"backend", assistant.backend()},
          {"seed", answer.end.seed}};
}

// An empty line alone would not say that there was an answer.
void tell_if_only_thought(const Answer& answer) {
  if (answer.output.reasoning.empty() || !answer.output.calls.empty() || interrupted() ||
      answer.output.content.find_first_not_of(" \t\r\n") != std::string::npos)
    return;
  fmt::print(
      stderr,
      "lily: the answer is empty: the model only thought ({}, ended by {}); --no-think answers at once\n",
      counted(answer.end.usage.completion_tokens, "token"),
      answer.end.finish == engine::Finish::length ? "the token limit" : "itself");
}

// By read(), which Ctrl-C ends, and not without limit.
std::string prompt_from_stdin() {
  constexpr size_t kMaxPromptBytes = size_t{64} << 20;
  constexpr int kPollMs = 100, kPollsBeforeNotice = 20;
  std::string prompt;
  char buffer[65536];
  for (int n_polls = 0;;) {
    pollfd waiting{STDIN_FILENO, POLLIN, 0};
    if (poll(&waiting, 1, kPollMs) == 0 || interrupted()) {
      check_interrupted();
      if (++n_polls == kPollsBeforeNotice && prompt.empty())
        fmt::print(stderr, "lily: waiting for the text on stdin; </dev/null stands for none\n");
      continue;
    }
    const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return prompt;
    prompt.append(buffer, static_cast<size_t>(n));
    if (prompt.size() > kMaxPromptBytes) fail(Fault::user, "the prompt on stdin is longer than 64 MB");
  }
}

// A pipe or a file on stdin. Sockets and devices are left alone: programs that start this one have them for
// themselves, and one that stays open would never end the prompt.
bool has_piped_text() {
  struct stat info{};
  return fstat(STDIN_FILENO, &info) == 0 && (S_ISFIFO(info.st_mode) || S_ISREG(info.st_mode));
}

uint64_t parse_seed(const std::string& text) {
  uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size())
    throw CLI::ValidationError("--seed", "'" + text + "' is not a number from 0 to 2^64 - 1");
  return seed;
}

// Every tool a function with a name of its own.
void check_tools(const Json& tools, const std::string& file) {
  if (!tools.is_array()) fail(Fault::user, "--tools {}: expected a JSON array of tools", file);
  std::set<std::string> names;
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& tool = tools[i];
    if (!tool.is_object() || !tool.contains("function") || !tool["function"].is_object() ||
        !tool["function"].contains("name") || !tool["function"]["name"].is_string())
      fail(Fault::user,
           "--tools {}: tool {} is not {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}", file, i);
    if (!names.insert(tool["function"]["name"].get<std::string>()).second)
      fail(Fault::user, "--tools {}: two tools are named '{}'", file,
           tool["function"]["name"].get<std::string>());
  }
}

int run_run(const RunOptions& o, const std::vector<std::string>& last_words) {
  std::vector<std::string> words = o.words;
  words.insert(words.end(), last_words.begin(), last_words.end());
  std::string prompt = fmt::format("{}", fmt::join(words, " "));
  const bool is_interactive = prompt.empty() && isatty(STDIN_FILENO) != 0 && !o.json;
  if (prompt.empty() && !is_interactive) {
    prompt = prompt_from_stdin();
  } else if (!prompt.empty() && has_piped_text()) {
    if (const std::string piped = prompt_from_stdin(); !piped.empty()) prompt += "\n\n" + piped;
  }
  if (prompt.empty() && !is_interactive)
    fail(Fault::user, "no prompt: name it as words, pipe it in, or run on a terminal for a chat");
  Json tools;
  if (!o.tools_file.empty()) {
    tools = Json::parse(read_named_file("--tools", o.tools_file, kMaxToolsBytes), nullptr, false);
    check_tools(tools, o.tools_file);
  }

  std::optional<TypedAhead> typed_ahead;
  if (is_interactive) typed_ahead.emplace();
  const auto assistant = load_assistant(o.model, o.disk);
  if (is_interactive) return chat(*assistant, o.answer, o.system, tools, typed_ahead->take(), !o.no_history);

  std::vector<text::Message> messages;
  if (!o.system.empty()) messages.push_back(text::Message::of("system", o.system));
  messages.push_back(text::Message::of("user", prompt));
  AnswerPrinter printer;
  const Answer given = answer(*assistant, messages, tools, o.answer, [&](const text::OutputEvent& event) {
    if (!o.json) printer.print(event);
  });
  if (o.json) {
    fmt::print("{}\n", answer_json(given, *assistant).dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    printer.finish();
    print_statistics(given);
    tell_if_only_thought(given);
  }
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace

void add_answer_options(CLI::App& command, AnswerOptions& o) {
  command.add_option("-n,--max-tokens", o.max_tokens, "Tokens to write at most; 0: the rest of the context")
      ->check(CLI::Range(0, 1 << 30));
  command.add_option("--stop", o.stop, "Text that ends the answer; may be repeated")
      ->expected(1)  // a time
      ->allow_extra_args(false)
      ->take_all();
  command.add_option("-t,--temperature", o.temperature, "0 is greedy")->check(CLI::Range(0.0, 100.0));
  command.add_option("--top-p", o.top_p)->check(CLI::Range(0.0, 1.0));
  command.add_option("--top-k", o.top_k, "0 is off")->check(CLI::Range(0, 1 << 20));
  command.add_option("--min-p", o.min_p)->check(CLI::Range(0.0, 1.0));
  command.add_option("--presence-penalty", o.presence_penalty)->check(CLI::Range(-2.0, 2.0));
  command.add_option("--repetition-penalty", o.repetition_penalty)->check(CLI::Range(0.01, 10.0));
  command.add_option_function<std::string>(
      "--seed", [&o](const std::string& text) { o.seed = parse_seed(text); },
      "The same seed, model and backend give the same answer");
  command.add_flag("--think,!--no-think", o.think, "Let the model think before it answers (default: on)");
  command.add_flag("--preserve-thinking", o.preserve_thinking,
                   "Keep the thinking of earlier turns in the prompt");
}

void add_run(CLI::App& app, Action& action, const std::vector<std::string>& last_words) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand(
      "run",
      "Answer a prompt given as words, on stdin, or as words about the text on stdin; with neither, a chat");
  command->add_option("PROMPT", options->words, "The prompt; all words after -- are of it");
  add_model_options(*command, options->model);
  add_profile_option(*command, options->model);
  add_answer_options(*command, options->answer);
  add_disk_options(*command, options->disk);
  command->add_option("--system", options->system, "System message");
  command->add_option("--tools", options->tools_file,
                      "File with a JSON array of tools that the model may call");
  command->add_flag("--json", options->json, "One JSON document on stdout, after the whole answer");
  command->add_flag("--no-history", options->no_history,
                    "In a chat: neither read nor keep the history of prompts");
  command->footer(
      "Examples:\n  lily run --no-think \"What does the word river mean?\"\n  git diff | lily run --system "
      "\"Write a commit "
      "message.\"\n"
      "  lily run \"Summarise this.\" < notes.txt\n"
      "  lily run                      (a chat; /help lists its commands)");
  command->callback([options, &action, &last_words] {
    action = [options, &last_words] { return run_run(*options, last_words); };
  });
}

}  // namespace lily::cli
