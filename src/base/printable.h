// Text from files and requests made fit for a message of one line.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lily {

// Control characters, and bytes that are not UTF-8, become \xNN; a text over max_bytes is cut and ends in
// "...".
std::string printable(std::string_view text, size_t max_bytes = 160);

}  // namespace lily
