// lily ablate, added to the program as the commands of command.h are.
#pragma once

#include "cli/command.h"

namespace lily::cli {

void add_ablate(CLI::App& app, Action& action);

}  // namespace lily::cli
