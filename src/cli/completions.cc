// lily completions: what the shells complete, written from the definitions of the options.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "cli/command.h"
#include "cli/describe.h"

namespace lily::cli {
namespace {

std::vector<std::string> names_of(const CommandFacts& command) {
  std::vector<std::string> names;
  for (const OptionFacts& option : command.options)
    names.insert(names.end(), option.names.begin(), option.names.end());
  return names;
}

// The only words that may stand behind a command; empty: files, or anything.
std::vector<std::string> words_of(const CommandFacts& command) {
  for (const OptionFacts& option : command.options)
    if (!option.positional.empty() && !option.choices.empty()) return option.choices;
  return {};
}

// `lily help COMMAND` is no command of the parser's.
CommandFacts help_command(const std::vector<CommandFacts>& commands) {
  OptionFacts command{.positional = "COMMAND"};
  for (const CommandFacts& other : commands) command.choices.push_back(other.name);
  return {.name = "help", .description = "Say more of a command", .options = {command}};
}

void print_bash(const CommandFacts& program, const std::vector<CommandFacts>& commands) {
  std::vector<std::string> command_names;
  for (const auto& command : commands) command_names.push_back(command.name);
  fmt::print(
      "# bash completion for lily, written by `lily completions bash`\n"
      "_lily() {{\n"
      "  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command= word\n"
      "  for word in \"${{COMP_WORDS[@]:1:COMP_CWORD-1}}\"; do\n"
      "    [[ $word == -* ]] || {{ command=$word; break; }}\n"
      "  done\n"
      "  case \"$command $previous\" in\n");
  for (const auto& command : commands)
    for (const auto& option : command.options)
      if (!option.choices.empty())
        for (const auto& name : option.names)
          fmt::print("    '{} {}') COMPREPLY=($(compgen -W '{}' -- \"$current\")); return ;;\n", command.name,
                     name, fmt::join(option.choices, " "));
  fmt::print("  esac\n  local options=\n  case \"$command\" in\n    '') options='{} {}' ;;\n",
             fmt::join(command_names, " "), fmt::join(names_of(program), " "));
  for (const auto& command : commands)
    fmt::print("    '{}') options='{}' ;;\n", command.name, fmt::join(names_of(command), " "));
  fmt::print("  esac\n  local words=\n  case \"$command\" in\n");
  for (const auto& command : commands)
    if (const auto words = words_of(command); !words.empty())
      fmt::print("    '{}') words='{}' ;;\n", command.name, fmt::join(words, " "));
  fmt::print(
      "  esac\n"
      "  if [[ -z $command || $current == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$current\"))\n"
      "  elif [[ -n $words ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -f -- \"$current\"))\n"
      "  fi\n"
      "}}\n"
      "complete -o filenames -F _lily lily\n");
}

// Between single quotes of zsh's _arguments, where brackets and colons are syntax.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\'') out += "'\\''";
    else if (c == '[' || c == ']' || c == ':' || c == '\\') out += std::string("\\") + c;
    else out += c;
  }
  return out;
}

void print_zsh(const CommandFacts& program, const std::vector<CommandFacts>& commands) {
  const auto specs = [](const CommandFacts& command) {
    std::vector<std::string> lines;
    for (const auto& option : command.options) {
      std::string value;
      if (!option.choices.empty()) value = fmt::format(":value:({})", fmt::join(option.choices, " "));
      else if (!option.type.empty()) value = fmt::format(":{}:_files", zsh_text(option.type));
      for (const auto& name : option.names)
        lines.push_back(fmt::format("'*{}[{}]{}'", name, zsh_text(option.description), value));
    }
    return lines;
  };
  fmt::print(
      "#compdef lily\n"
      "# zsh completion for lily, written by `lily completions zsh`\n"
      "_lily() {{\n"
      "  local context state line\n"
      "  local -A opt_args\n"
      "  _arguments -C {} '1: :->command' '*:: :->rest'\n"
      "  case $state in\n"
      "    command)\n"
      "      local -a commands=(",
      fmt::join(specs(program), " "));
  for (const auto& command : commands) fmt::print("'{}:{}' ", command.name, zsh_text(command.description));
  fmt::print(")\n      _describe command commands ;;\n    rest)\n      case $line[1] in\n");
  for (const auto& command : commands) {
    const auto words = words_of(command);
    fmt::print("        {}) _arguments {} '{}' ;;\n", command.name, fmt::join(specs(command), " "),
               words.empty() ? "*:file:_files" : fmt::format("1:word:({})", fmt::join(words, " ")));
  }
  fmt::print(
      "      esac ;;\n  esac\n}}\nif [[ $funcstack[1] = _lily ]]; then _lily \"$@\"; else compdef _lily "
      "lily; fi\n");
}

std::string fish_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

void print_fish(const CommandFacts& program, const std::vector<CommandFacts>& commands) {
  const auto print_options = [](const CommandFacts& command, const std::string& condition) {
    for (const auto& option : command.options) {
      if (option.names.empty()) continue;
      std::string line = "complete -c lily" + condition;
      for (const auto& name : option.names)
        line += name.rfind("--", 0) == 0 ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (!option.choices.empty()) line += fmt::format(" -x -a '{}'", fmt::join(option.choices, " "));
      else if (!option.type.empty()) line += " -r";
      fmt::print("{} -d '{}'\n", line, fish_text(option.description));
    }
  };
  fmt::print("# fish completion for lily, written by `lily completions fish`\n");
  print_options(program, "");
  for (const auto& command : commands)
    fmt::print("complete -c lily -n __fish_use_subcommand -f -a {} -d '{}'\n", command.name,
               fish_text(command.description));
  for (const auto& command : commands) {
    const std::string condition = fmt::format(" -n '__fish_seen_subcommand_from {}'", command.name);
    print_options(command, condition);
    if (const auto words = words_of(command); !words.empty())
      fmt::print("complete -c lily{} -f -a '{}'\n", condition, fmt::join(words, " "));
  }
}

}  // namespace

void add_completions(CLI::App& app, Action& action) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("completions", "Print what a shell needs to complete lily's commands");
  command->add_option("SHELL", *shell, "The shell")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->required();
  command->footer("Examples:\n  source <(lily completions bash)");
  command->callback([&app, shell, &action] {
    action = [&app, shell] {
      const CommandFacts program = describe(app);
      std::vector<CommandFacts> commands = describe_commands(app);
      commands.push_back(help_command(commands));
      if (*shell == "bash") print_bash(program, commands);
      if (*shell == "zsh") print_zsh(program, commands);
      if (*shell == "fish") print_fish(program, commands);
      return 0;
    };
  });
}

}  // namespace lily::cli
