// What is said of a command line that does not parse, and help by its other name.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lily::cli {

// `lily help` and `lily help run` as `lily --help` and `lily run --help`.
std::vector<const char*> with_help_option(int argc, const char* const* argv);

// The words after "--" of lily run, which are the prompt's whatever they look like; `args` loses them.
std::vector<std::string> take_last_words(std::vector<const char*>& args);

// One line: what is wrong, the nearest name where one is near, and which help to read. `app` has just parsed
// `args` and thrown the error.
std::string mistake(const CLI::App& app, const std::vector<const char*>& args, const CLI::ParseError& error);
// The first word, where it should have been a command and is none; else null.
const char* unknown_command(const CLI::App& app, const std::vector<const char*>& args);

}  // namespace lily::cli
