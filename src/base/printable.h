// Text from files and requests made fit for a message of one line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lily {

// Control characters, and bytes that are not UTF-8, become \xNN; a text over max_bytes is cut and ends in
// "...".
std::string printable(std::string_view text, size_t max_bytes = 160);

// "1 prompt", "2 prompts".
std::string counted(int64_t n, std::string_view noun);

}  // namespace lily
