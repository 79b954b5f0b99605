#include "base/terminate.h"

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <new>
#include <string_view>

namespace lily {

namespace {

// On this thread: what is thrown for it ends the program on the same one.
thread_local bool memory_was_refused = false;

[[noreturn]] void end_without_memory() {
  constexpr std::string_view kLine = "lily: error: out of memory; a smaller --ctx or --memory needs less\n";
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kLine.data(), kLine.size());
  std::_Exit(1);
}

}  // namespace

void end_cleanly_without_memory() {
  std::set_new_handler([] {
    memory_was_refused = true;
    throw std::bad_alloc();
  });
  static std::terminate_handler previous = nullptr;
  previous = std::set_terminate([] {
    try {
      if (const std::exception_ptr current = std::current_exception()) std::rethrow_exception(current);
      // Where a noexcept function is inlined, the compiler ends the program before anybody has caught what
      // was thrown, and nobody can say what it was.
      if (std::uncaught_exceptions() > 0 && memory_was_refused) end_without_memory();
    } catch (const std::bad_alloc&) {
      end_without_memory();
    } catch (...) {  // NOLINT(bugprone-empty-catch)
      // Not ours to explain.
    }
    if (previous != nullptr) previous();
    std::abort();
  });
}

}  // namespace lily
