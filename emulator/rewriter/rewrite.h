// Metal source as C++: what clang then compiles with emulator/shim.
//
// Attributes are dropped. Kernels become functions and a table made from the attributes of their parameters;
// explicit instantiations with a host_name become entries of that table. Threadgroup variables become
// references into the emulated threadgroup memory, function constants become variables that the runtime sets.
// Works on tokens and expects the subset of docs/emulator.md; what it does not understand it passes on, for
// the compiler to refuse.
#pragma once

#include <string>
#include <vector>

#include "emulator/rewriter/token.h"

namespace lily::emulator {

// `symbol` names the CompiledFile that the output defines, `file` is the name the file reports.
std::string rewrite(const std::vector<Token>& tokens, const std::string& symbol, const std::string& file);

}  // namespace lily::emulator
