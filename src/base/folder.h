// The names in a folder. std::filesystem's iterator is not used for it: where there is no memory for a name,
// it ends the program instead of throwing.
#pragma once

#include <filesystem>
#include <functional>
#include <system_error>

namespace lily {

// Calls visit with each name, in no order, "." and ".." among them. What went wrong, if anything did; what
// visit throws goes through.
std::error_code for_each_name(const std::filesystem::path& folder,
                              const std::function<void(const char* name)>& visit);

}  // namespace lily
