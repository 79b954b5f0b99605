#include "base/terminate.h"

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <new>
#include <string_view>

namespace lily {

void end_cleanly_without_memory() {
  static std::terminate_handler previous = nullptr;
  previous = std::set_terminate([] {
    try {
      if (const std::exception_ptr current = std::current_exception()) std::rethrow_exception(current);
    } catch (const std::bad_alloc&) {
      constexpr std::string_view kLine =
          "lily: error: out of memory; a smaller --ctx or --memory needs less\n";
      [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kLine.data(), kLine.size());
      std::_Exit(1);
    } catch (...) {  // NOLINT(bugprone-empty-catch)
      // Not ours to explain.
    }
    if (previous != nullptr) previous();
    std::abort();
  });
}

}  // namespace lily
