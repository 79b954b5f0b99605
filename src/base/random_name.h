// Names that cannot be guessed.
#pragma once

#include <string>

namespace lily {

// Letters and digits.
std::string random_name(int n_characters);

}  // namespace lily
