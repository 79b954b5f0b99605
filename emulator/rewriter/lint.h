// Rules of Metal's language that neither the executing nor the checking compiler enforces.
#pragma once

#include <string>
#include <vector>

#include "emulator/rewriter/token.h"

namespace lily::emulator {

// "file:line: error: ..." for each violation.
std::vector<std::string> lint(const std::vector<Token>& tokens);

}  // namespace lily::emulator
