// lily man: the manual page, written from the commands' own help.
#include <fmt/format.h>

#include <cstdio>
#include <sstream>

#include "cli/command.h"
#include "cli/describe.h"
#include "cli/version_info.h"

namespace lily::cli {
namespace {

// Backslashes and dashes as they are, and no line that troff takes for a request.
std::string roff(const std::string& text) {
  std::string out;
  bool at_start = true;
  for (const char c : text) {
    if (at_start && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') out += "\\e";
    else if (c == '-') out += "\\-";
    else out += c;
    at_start = c == '\n';
  }
  return out;
}

void print_options(const std::vector<OptionFacts>& options) {
  for (const OptionFacts& option : options) {
    std::string head = option.positional.empty() ? "" : "\\fI" + roff(option.positional) + "\\fR";
    for (const std::string& name : option.names)
      head += (head.empty() ? "\\fB" : ", \\fB") + roff(name) + "\\fR";
    if (!option.names.empty() && !option.type.empty()) head += " \\fI" + roff(option.type) + "\\fR";
    std::string text = option.description;
    if (!text.empty() && text.back() != '.') text += '.';
    if (!option.choices.empty()) text += fmt::format(" One of {}.", fmt::join(option.choices, ", "));
    if (!option.standard.empty()) text += fmt::format(" Default: {}.", option.standard);
    fmt::print(".TP\n{}\n{}\n", head, roff(text.empty() ? " " : text));
  }
}

void print_page(const CLI::App& app) {
  const CommandFacts program = describe(app);
  const std::vector<CommandFacts> commands = describe_commands(app);
  fmt::print(".TH LILY 1 \"{}\" \"lily {}\" \"lily\"\n", kCommitDate, kVersion);
  fmt::print(".SH NAME\nlily \\- local inference for Qwen3.6\\-35B\\-A3B\n");
  fmt::print(".SH SYNOPSIS\n.B lily\n\\fICOMMAND\\fR [\\fIOPTION\\fR]...\n");
  fmt::print(".SH DESCRIPTION\n{}\n", roff(program.description));
  fmt::print(".SH OPTIONS\n");
  print_options(program.options);
  fmt::print(".SH COMMANDS\n");
  for (const CommandFacts& command : commands) {
    std::string synopsis;
    for (const OptionFacts& option : command.options)
      if (!option.positional.empty())
        synopsis += (option.is_required ? " \\fI" : " [\\fI") + roff(option.positional) +
                    (option.is_required ? "\\fR" : "\\fR]");
    fmt::print(".SS \"lily {}\"\n\\fBlily {}\\fR [\\fIOPTION\\fR]...{}\n.PP\n{}.\n", command.name,
               command.name, synopsis, roff(command.description));
    print_options(command.options);
    if (!command.footer.empty()) fmt::print(".PP\n.nf\n{}\n.fi\n", roff(command.footer));
  }
  fmt::print(
      ".SH ENVIRONMENT\n"
      ".TP\n\\fBLILY_MODEL\\fR\nThe model that is used when none is named.\n"
      ".TP\n\\fBLILY_CACHE\\fR\nA further folder in which pulled models are looked for.\n"
      ".TP\n\\fBHF_ENDPOINT\\fR, \\fBHF_TOKEN\\fR, \\fBHF_TOKEN_PATH\\fR, \\fBHF_HOME\\fR, "
      "\\fBHF_HUB_CACHE\\fR, "
      "\\fBHF_HUB_OFFLINE\\fR\nThe hub's address, access token and download cache, as its other tools know "
      "them.\n"
      ".TP\n\\fBSSL_CERT_FILE\\fR\nCertificates that are trusted instead of the system's.\n"
      ".TP\n\\fBNO_COLOR\\fR\nNo colours.\n"
      ".SH EXIT STATUS\n0 done, 1 failed, 2 wrong usage, 130 interrupted.\n");
}

}  // namespace

void add_man(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("man", "Print the manual page (troff)");
  command->footer("Examples:\n  lily man | man -l -");
  command->callback([&app, &action] {
    action = [&app] {
      print_page(app);
      return 0;
    };
  });
}

}  // namespace lily::cli
