// The program. Commands stand in one file each; this one parses the command line and turns errors into exit
// codes.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/terminate.h"
#include "cli/ablate.h"
#include "cli/command.h"
#include "cli/line_editor.h"
#include "cli/mistake.h"
#include "cli/version_info.h"

namespace {

void write_line(const char* line) {  // in a signal handler
  if (line != nullptr && ::write(STDERR_FILENO, line, std::strlen(line)) < 0) return;
}

extern "C" void on_interrupt(int) {
  const int saved_errno = errno;
  // A second Ctrl-C ends the program whatever it is doing.
  if (!lily::cli::interrupted().exchange(true)) {
    write_line(lily::cli::interrupt_lines().first);
    errno = saved_errno;
    return;
  }
  lily::cli::restore_terminal();
  write_line(lily::cli::interrupt_lines().second);
  std::_Exit(lily::cli::kExitInterrupted);
}

extern "C" void on_terminate(int signal) {
  lily::cli::restore_terminal();
  std::_Exit(128 + signal);
}

int complain(const char* message, int code) {
  std::fprintf(stderr, "lily: %s\n", message);
  return code;
}

// A reader that has had enough, as head, is no fault and ends the program as quietly as SIGPIPE would.
int complain_of_output(const char* why) {
  if (lily::cli::reader_is_gone()) return lily::cli::kExitReaderGone;
  std::fprintf(stderr, "lily: standard output cannot be written: %s\n", why);
  return lily::cli::kExitFailed;
}

}  // namespace

int main(int argc, char** argv) {
  lily::end_cleanly_without_memory();
  using namespace lily;
  using namespace lily::cli;
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_terminate);
  std::signal(SIGHUP, on_terminate);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes is an error of that write

  CLI::App app{"lily: local inference for Qwen3.6-35B-A3B"};
  app.require_subcommand(1);
  app.fallthrough();
  int n_verbose = 0;
  app.add_flag("-v", n_verbose, "More messages on stderr; repeat for more");
  Action action;
  std::vector<const char*> args = with_help_option(argc, argv);
  const std::vector<std::string> last_words = take_last_words(args);
  add_run(app, action, last_words);
  add_pull(app, action);
  add_list(app, action);
  add_rm(app, action);
  add_inspect(app, action);
  add_plan(app, action);
  add_eval(app, action);
  add_diff(app, action);
  add_selftest(app, action);
  add_bench(app, action);
  add_ablate(app, action);
  add_serve(app, action);
  add_synth(app, action);
  add_completions(app, action);
  add_man(app, action);
  add_version(app, action);
  app.set_version_flag("-V,--version", fmt::format("lily {} ({})", kVersion, kCommit));
  app.footer("lily help COMMAND says more of one.");
  try {
    app.parse(static_cast<int>(args.size()), args.data());
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0 && unknown_command(app, args) == nullptr) return app.exit(e);  // --help
    return complain(mistake(app, args, e).c_str(), kExitUsage);
  }
  set_verbosity(n_verbose);
  if (n_verbose == 0) hold_notices();
  try {
    const int code = action();
    show_notices();
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return complain_of_output("is the disk full?");
    return code;
  } catch (const Interrupted&) {
    return kExitInterrupted;
  } catch (const Error& e) {
    if (interrupted()) return kExitInterrupted;
    return complain(e.what(), e.fault() == Fault::user ? kExitUsage : kExitFailed);
  } catch (const std::system_error& e) {  // what fmt throws
    return std::ferror(stdout) != 0
               ? complain_of_output(std::generic_category().message(e.code().value()).c_str())
               : complain(e.what(), kExitFailed);
  } catch (const std::bad_alloc&) {
    return complain("out of memory; a smaller --ctx needs less", kExitFailed);
  } catch (const std::exception& e) {
    return complain(e.what(), kExitFailed);
  }
}
