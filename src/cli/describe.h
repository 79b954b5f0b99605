// What the parser knows about the commands, as data: completions and the manual page are written from it, so
// that neither can say anything else than --help.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lily::cli {

struct OptionFacts {
  std::vector<std::string> names;    // "-m", "--model"; empty for a positional
  std::string positional;            // its name, else empty
  std::string description;           // one line
  std::string type;                  // "TEXT", "FOLDER"; empty for a flag
  std::vector<std::string> choices;  // the only values allowed, where they are few
  std::string standard;              // value if it is not given
  bool is_required = false;
};

struct CommandFacts {
  std::string name, description, footer;
  std::vector<OptionFacts> options;  // --help included
};

// Of the program itself, whose commands are not among its options.
CommandFacts describe(const CLI::App& app);
std::vector<CommandFacts> describe_commands(const CLI::App& app);  // sorted by name

}  // namespace lily::cli
