#include "cli/mistake.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/printable.h"
#include "cli/describe.h"

namespace lily::cli {
namespace {

constexpr size_t kNear = 2;         // letters that may be missing, added or wrong
constexpr size_t kLeastPrefix = 4;  // "--te" is taken for the beginning of a longer name

// Levenshtein's distance, a row at a time.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j)
      diagonal = std::exchange(row[j + 1],
                               std::min({row[j] + 1, row[j + 1] + 1, diagonal + (a[i] == b[j] ? 0 : 1)}));
  }
  return row.back();
}

// What an option or command is called, without the dashes.
std::string_view bare(std::string_view word) {
  return word.substr(std::min(word.find_first_not_of('-'), word.size()));
}

// ": did you mean NAME?", or nothing.
std::string nearest(std::string_view word, const std::vector<std::string>& names) {
  size_t least = std::min(kNear, bare(word).size() / 2) + 1;
  std::string_view found;
  for (const std::string& name : names) {
    const bool is_prefix = word.size() >= kLeastPrefix && name.starts_with(word);
    const size_t d = is_prefix ? 0 : distance(bare(word), bare(name));
    if (d < least) least = d, found = name;
  }
  return found.empty() ? "" : fmt::format(": did you mean {}?", found);
}

// `called`: "lily run".
std::string unknown_option(const CLI::App& app, const CLI::App& command, const std::string& called) {
  for (const std::string& word : app.remaining(true)) {
    if (!word.starts_with('-')) continue;
    const std::string name = word.substr(0, word.find('='));
    std::vector<std::string> names;
    for (const CLI::App* one : {&command, &app})
      for (const OptionFacts& option : describe(*one).options)
        names.insert(names.end(), option.names.begin(), option.names.end());
    if (std::ranges::find(names, name) != names.end())
      return fmt::format("option {} stands before the command; write it behind: {} {} ...", name, called,
                         name);
    const std::string near = nearest(name, names);
    return fmt::format("{} has no option {}{} see {} --help", called, printable(name),
                       near.empty() ? ";" : near, called);
  }
  return {};
}

}  // namespace

std::vector<const char*> with_help_option(int argc, const char* const* argv) {
  std::vector<const char*> args(argv, argv + argc);
  if (argc < 2 || std::strcmp(args[1], "help") != 0) return args;
  args.erase(args.begin() + 1);
  args.push_back("--help");
  return args;
}

std::vector<std::string> take_last_words(std::vector<const char*>& args) {
  const auto is = [](const char* text) {
    return [text](const char* arg) { return std::strcmp(arg, text) == 0; };
  };
  const auto mark = std::find_if(args.begin(), args.end(), is("--"));
  if (mark == args.end()) return {};
  const auto command = std::find_if(args.begin() + 1, mark, [](const char* arg) { return arg[0] != '-'; });
  if (command == mark || !is("run")(*command)) return {};
  std::vector<std::string> words(mark + 1, args.end());
  args.erase(mark, args.end());
  return words;
}

const char* unknown_command(const CLI::App& app, const std::vector<const char*>& args) {
  return args.size() > 1 && args[1][0] != '-' && app.get_subcommands().empty() ? args[1] : nullptr;
}

std::string mistake(const CLI::App& app, const std::vector<const char*>& args, const CLI::ParseError& error) {
  if (const char* word = unknown_command(app, args)) {
    std::vector<std::string> names;
    for (const CommandFacts& command : describe_commands(app)) names.push_back(command.name);
    const std::string near = nearest(word, names);
    return fmt::format("'{}' is not a command{} see lily --help", printable(word), near.empty() ? ";" : near);
  }
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const CLI::App& command = chosen.empty() ? app : *chosen.back();
  const std::string called = chosen.empty() ? "lily" : "lily " + command.get_name();
  // Without a command that is missed first, whatever stands there instead.
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr || chosen.empty())
    if (std::string line = unknown_option(app, command, called); !line.empty()) return line;
  return fmt::format("{}; see {} --help", error.what(), called);
}

}  // namespace lily::cli
