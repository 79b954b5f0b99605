// Runs another program and reads what it prints.
#pragma once

#include <string>
#include <vector>

namespace lily::cli {

// The path of this program.
std::string executable_path();

// Runs a command (no shell) to its end and returns its standard output; its standard error is this program's.
// Throws Error naming the command if it cannot be run or fails, Interrupted at Ctrl-C, which the child gets
// too. A command that prints without an end is ended, and an Error.
std::string run_child(const std::vector<std::string>& command);

}  // namespace lily::cli
