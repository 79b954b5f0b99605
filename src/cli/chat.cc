#include "cli/chat.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/printable.h"
#include "cli/conversation_file.h"
#include "cli/line_editor.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;
using Kind = text::OutputEvent::Kind;

constexpr const char* kHelp =
    "  /help             this list\n"
    "  /reset            forget the conversation, keep the system message\n"
    "  /system TEXT      set the system message and start anew\n"
    "  /think on|off     let the model think before it answers\n"
    "  /save FILE        write the conversation and the model's state; FILE.json: the conversation as JSON\n"
    "  /load FILE        read one\n"
    "  /stats            figures of the last answer, and of the cache\n"
    "  /quit             leave (so does Ctrl-D)\n"
    "  Enter sends; Alt-Enter, Ctrl-J or a \\ at the end of a line continue on the next one.\n"
    "  Ctrl-C stops an answer; a second one before it has stopped ends the chat.\n";

std::string history_path() {
  const char* cache = std::getenv("LILY_CACHE");
  const char* home = std::getenv("HOME");
  std::filesystem::path folder = cache != nullptr && *cache != '\0' ? std::filesystem::path(cache)
                                 : home != nullptr ? std::filesystem::path(home) / ".cache/lily"
                                                   : std::filesystem::path();
  if (folder.empty()) return {};
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  return (folder / "history").string();
}

std::string dimmed(const std::string& line) {
  return stderr_is_terminal() && use_colour() ? "\x1b[2m" + line + "\x1b[0m\n" : line + "\n";
}

// While one lives, Ctrl-C is answered at once: the engine stops only between two steps.
class InterruptLines {
 public:
  InterruptLines() {
    static const std::string first = "\n" + dimmed("lily: stopping ..."),
                             second = "\nlily: the chat was ended by a second Ctrl-C\n";
    if (stderr_is_terminal()) interrupt_lines().first = first.c_str();
    interrupt_lines().second = second.c_str();
  }
  ~InterruptLines() { interrupt_lines().first = interrupt_lines().second = nullptr; }
  InterruptLines(const InterruptLines&) = delete;
  InterruptLines& operator=(const InterruptLines&) = delete;
};

// The turn of an answer as the template takes it back in the next prompt.
text::Message assistant_turn(const Answer& answer) {
  text::Message message = text::Message::of("assistant", answer.output.content);
  if (!answer.output.reasoning.empty()) message.reasoning_content = answer.output.reasoning;
  for (const auto& call : answer.output.calls) {
    Json arguments = Json::parse(call.arguments, nullptr, false);
    message.tool_calls.push_back({call.name, arguments.is_object() ? std::move(arguments) : Json::object()});
  }
  return message;
}

class Chat {
 public:
  Chat(engine::Assistant& assistant, AnswerOptions options, const std::string& system, const Json& tools,
       bool keeps_history)
      : assistant_(assistant), options_(std::move(options)), tools_(tools) {
    set_system(system);
    if (keeps_history) history_ = history_path();
    LineEditor::shorten_history(history_);
    editor_.load_history(history_);
  }

  int loop(const std::string& typed_ahead) {
    editor_.give(typed_ahead);
    fmt::print(stderr, "lily: {} on {}, {} tokens of context; /help lists the commands\n",
               assistant_.folder(), assistant_.backend(), assistant_.context());
    std::string line;
    for (bool is_first = true;; is_first = false) {
      const LineEditor::Result result = editor_.read("> ", line);
      if (is_first) check_interrupted();  // while the model was loaded
      interrupted() = false;
      if (result == LineEditor::Result::end_of_input) return end();
      if (result == LineEditor::Result::interrupted || line.find_first_not_of(" \t\n") == std::string::npos)
        continue;
      editor_.add_history(line);
      if (!history_.empty()) LineEditor::append_history(history_, line);
      try {
        if (line[0] == '/') {
          if (!command(line)) return end();
        } else {
          ask(line);
        }
      } catch (const std::exception& e) {
        fmt::print(stderr, "lily: {}\n", e.what());
      }
    }
  }

 private:
  int end() const {
    if (last_) print_session();
    return 0;
  }

  void print_session() const {
    const engine::EngineStats s = assistant_.engine().stats();
    fmt::print(stderr, "lily: {} of {} in all, {:.0f} % of them cached; {} began in the cache, {} did not\n",
               counted(s.n_requests, "prompt"), counted(s.prompt_tokens, "token"), s.cached_share() * 100,
               counted(s.cache_hits, "prompt"), s.cache_misses);
  }

  void set_system(const std::string& system) {
    system_ = system;
    messages_.clear();
    if (!system.empty()) messages_.push_back(text::Message::of("system", system));
  }

  void ask(const std::string& text) {
    messages_.push_back(text::Message::of("user", text));
    AnswerPrinter printer;
    try {
      const InterruptLines lines;
      last_ = answer(assistant_, messages_, tools_, options_,
                     [&](const text::OutputEvent& e) { printer.print(e); });
    } catch (...) {
      printer.finish();
      messages_.pop_back();  // the question can be asked again, shorter perhaps
      throw;
    }
    printer.finish();
    if (interrupted()) fmt::print(stderr, "lily: stopped\n");
    interrupted() = false;
    messages_.push_back(assistant_turn(*last_));
  }

  static void say_dropped(const char* what_else) {
    fmt::print(stderr, "{}", dimmed(fmt::format("lily: the conversation is forgotten{}", what_else)));
  }

  // False ends the chat.
  bool command(const std::string& line) {
    const size_t space = line.find_first_of(" \n");
    const std::string name = line.substr(0, space);
    const size_t begin = space == std::string::npos ? space : line.find_first_not_of(" \n", space);
    std::string rest = begin == std::string::npos ? "" : line.substr(begin);
    rest.erase(rest.find_last_not_of(" \n") + 1);
    if (name == "/quit" || name == "/exit") return false;
    if (name == "/help") {
      fmt::print(stderr, "{}  {}\n", kHelp,
                 history_.empty() ? "No history of prompts is kept."
                                  : "The history of prompts is " + printable(history_, 400) +
                                        "; lily run --no-history keeps none.");
    } else if (name == "/reset") {
      set_system(system_);
      say_dropped(system_.empty() ? "" : "; the system message stays");
    } else if (name == "/system") {
      const bool had_system = !system_.empty();
      set_system(rest);
      say_dropped(!rest.empty() ? "; the system message is new"
                  : had_system  ? "; so is the system message"
                                : "; there is no system message");
    } else if (name == "/think") {
      if (rest == "on" || rest == "off") options_.think = rest == "on";
      else if (!rest.empty()) fail(Fault::user, "/think {}: expected on or off", rest);
      fmt::print(stderr, "lily: thinking is {}\n", options_.think ? "on" : "off");
    } else if (name == "/save") {
      save(rest);
    } else if (name == "/load") {
      load(rest);
    } else if (name == "/stats") {
      if (last_) print_statistics(*last_), print_session();
      else fmt::print(stderr, "lily: no answer yet\n");
    } else {
      fmt::print(stderr, "lily: no command {}; /help lists them\n", name);
    }
    return true;
  }

  engine::ChatRequest conversation() const {
    return {.messages = messages_,
            .tools = tools_,
            .thinking = {.enabled = options_.think, .preserve = options_.preserve_thinking}};
  }

  // A name in .json asks for what other programs can read; anything else has the model's state too.
  void save(const std::string& path) {
    if (path.empty()) fail(Fault::user, "/save needs a file name");
    check_replaceable(path);
    if (!path.ends_with(".json")) {
      assistant_.save_session(
          path, conversation(),
          conversation_json(messages_).dump(-1, ' ', false, Json::error_handler_t::replace));
      fmt::print(stderr, "lily: {} and the model's state written to {}\n",
                 counted(std::ssize(messages_), "message"), path);
      return;
    }
    write_conversation(messages_, path);
    fmt::print(stderr, "lily: {} written to {}\n", counted(std::ssize(messages_), "message"), path);
  }

  void load(const std::string& path) {
    if (path.empty()) fail(Fault::user, "/load needs a file name");
    const bool is_json = path.ends_with(".json");
    engine::Assistant::SavedSession saved;
    if (!is_json) saved = assistant_.load_session(path);
    messages_ = parse_conversation(is_json ? read_conversation(path) : saved.messages, tools_, path);
    system_.clear();
    if (!messages_.empty() && messages_[0].role == "system")
      for (const text::ContentPart& part : messages_[0].content) system_ += part.text;
    fmt::print(stderr, "lily: {}{} read from {}\n", counted(std::ssize(messages_), "message"),
               saved.has_state ? " and the model's state" : "", path);
  }

  engine::Assistant& assistant_;
  AnswerOptions options_;
  const Json& tools_;
  std::string system_, history_;
  std::vector<text::Message> messages_;
  std::optional<Answer> last_;
  LineEditor editor_{[] { return interrupted().load(); }};
};

}  // namespace

std::string safe_for_terminal(std::string_view text) {
  if (!stdout_is_terminal()) return std::string(text);
  std::string safe;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const bool is_c1 = c == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7F || is_c1) {
      safe += "\uFFFD";
      i += is_c1 ? 1 : 0;
    } else {
      safe += text[i];
    }
  }
  return safe;
}

AnswerPrinter::AnswerPrinter() : colour_(use_colour()), shows_thinking_(stdout_is_terminal()) {}

void AnswerPrinter::switch_to(Kind kind) {
  const bool dim = kind == Kind::reasoning;
  if (dimmed_ && !dim) {
    std::fputs(colour_ ? "\x1b[0m\n\n" : "\n\n", stdout);
    ends_line_ = true;
  }
  if (dim && !dimmed_ && colour_) std::fputs("\x1b[2m", stdout);
  if (kind == Kind::call_begin && !ends_line_) {
    std::fputc('\n', stdout);
    ends_line_ = true;
  }
  dimmed_ = dim;
}

void AnswerPrinter::print(const text::OutputEvent& event) {
  if (event.kind == Kind::reasoning && !shows_thinking_) return;
  switch_to(event.kind);
  std::string shown;
  switch (event.kind) {
    case Kind::reasoning:
    case Kind::content:
    case Kind::call_arguments:
      shown = safe_for_terminal(event.text);
      break;
    case Kind::call_begin:
      shown = "-> " + safe_for_terminal(event.text) + " ";
      break;
    case Kind::call_end:
      shown = "\n";
      break;
  }
  if (shown.empty()) return;
  ends_line_ = shown.back() == '\n';
  has_output_ = true;
  std::fwrite(shown.data(), 1, shown.size(), stdout);
  std::fflush(stdout);
}

void AnswerPrinter::finish() {
  if (dimmed_ && colour_) std::fputs("\x1b[0m", stdout);
  dimmed_ = false;
  if (has_output_ && !ends_line_) std::fputc('\n', stdout);
  std::fflush(stdout);
}

void print_statistics(const Answer& a) {
  fmt::print(stderr,
             "lily: prompt {} ({} cached) at {:.0f} tok/s, answer {} at {:.0f} tok/s, first token after "
             "{:.0f} ms{}\n",
             counted(a.end.usage.prompt_tokens, "token"), a.end.usage.cached_tokens, a.prefill_tok_s(),
             counted(a.end.usage.completion_tokens, "token"), a.decode_tok_s(), a.end.timings.ttft_ms,
             a.end.finish == engine::Finish::length ? "; ended by the token limit" : "");
}

int chat(engine::Assistant& assistant, const AnswerOptions& options, const std::string& system,
         const Json& tools, const std::string& typed_ahead, bool keeps_history) {
  return Chat(assistant, options, system, tools, keeps_history).loop(typed_ahead);
}

}  // namespace lily::cli
