#include "cli/describe.h"

#include <algorithm>
#include <sstream>

namespace lily::cli {
namespace {

// CLI11 shows the values of a set at the end of the type, as in "TEXT:{bf16,f32}".
void read_type(const std::string& text, OptionFacts& facts) {
  const size_t open = text.find('{'), close = text.rfind('}');
  facts.type = text.substr(0, text.find(':'));
  if (open == text.npos || close == text.npos || close < open) return;
  std::stringstream values(text.substr(open + 1, close - open - 1));
  for (std::string value; std::getline(values, value, ',');) facts.choices.push_back(value);
}

OptionFacts facts_of(const CLI::Option& option) {
  OptionFacts facts;
  for (const std::string& name : option.get_snames()) facts.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) facts.names.push_back("--" + name);
  if (facts.names.empty()) facts.positional = option.get_single_name();
  facts.description = option.get_description();
  std::replace(facts.description.begin(), facts.description.end(), '\n', ' ');
  if (option.get_items_expected_max() > 0) read_type(option.get_type_name(), facts);
  facts.standard = option.get_default_str();
  facts.is_required = option.get_required();
  return facts;
}

}  // namespace

CommandFacts describe(const CLI::App& app) {
  CommandFacts facts{
      .name = app.get_name(), .description = app.get_description(), .footer = app.get_footer()};
  for (const CLI::Option* option : app.get_options())
    if (!option->get_group().empty()) facts.options.push_back(facts_of(*option));
  return facts;
}

std::vector<CommandFacts> describe_commands(const CLI::App& app) {
  std::vector<CommandFacts> commands;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!command->get_group().empty()) commands.push_back(describe(*command));
  std::sort(commands.begin(), commands.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return commands;
}

}  // namespace lily::cli
