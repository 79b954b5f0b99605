#include "cli/command.h"

#include <poll.h>
#include <unistd.h>

#include <fmt/format.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory_limit.h"

namespace lily::cli {
namespace {

// Of the budget for memory, beside what the program takes before it loads: 128 MiB of answers that are
// remembered, 64 MiB of stored responses, and requests, compiled steps and threads (tests/soak/memory.py).
constexpr size_t kSizeDigits = 18;
constexpr int64_t kProgramBytes = int64_t{256} << 20;
// Of the machine's memory, one part in so many is left to others, at most 1 GiB.
constexpr int64_t kLeastAvailableShare = 20;

// Lines for stderr that wait; the engine's thread logs as well.
struct Notices {
  std::mutex mutex;
  bool is_held = false;
  std::string lines;
};

Notices& notices() {
  static Notices instance;
  return instance;
}

}  // namespace

void add_model_options(CLI::App& command, ModelOptions& options) {
  command.add_option("-m,--model", options.model,
                     "Folder of a checkpoint, or the name of one that has been pulled");
  command
      .add_option("--backend", options.backend,
                  "auto, reference, cpu, cpu-avx2, cuda, metal or metal-emulated")
      ->capture_default_str();
  command
      .add_option("--kv", options.kv,
                  "Type of the KV cache (default: the backend's; cpu and GPUs: bf16); int8 halves its memory")
      ->check(CLI::IsMember({"bf16", "f32", "int8"}));
  command
      .add_option(
          "--activations", options.activations,
          "On the CPU, activations that meet 4-bit weights: int16 (the default, as exact as bf16) or int8 "
          "(most products take half the work, the numbers are coarser)")
      ->check(CLI::IsMember({"int16", "int8"}));
  command.add_option("--threads", options.threads, "Threads of the CPU backends; 0: physical cores")
      ->check(CLI::Range(0, 1024));
  command.add_flag("--tensor-ops", options.tensor_ops,
                   "Metal 4's tensor operations for prompts, on chips that have them");
  command.add_option("--ctx", options.ctx, "Tokens of context; 0: what fits, at most the model's limit")
      ->check(CLI::Range(0, 1 << 20));
  command.add_option("--disable", options.disable, "Mechanisms to switch off, as in P1,D3");
}

void add_profile_option(CLI::App& command, ModelOptions& options) {
  command.add_option("--profile", options.profile,
                     "Write a trace of steps and ops to this file (chrome://tracing and Perfetto open it)");
}

void add_disk_options(CLI::App& command, DiskOptions& options) {
  command.add_option("--cache-dir", options.folder,
                     "Folder where conversations and prefixes are kept, so that they survive a restart");
  command
      .add_option("--cache-size", options.n_bytes,
                  "Bytes that folder may take, as in 20GB; what saves least is deleted first")
      ->transform(as_size())
      ->capture_default_str();
}

plan::Policy chosen_policy(const backend::Device& device, const model::Dims& dims,
                           const ModelOptions& options) {
  const engine::LoadOptions load = load_options(options);
  return engine::policy_of(device, dims, load.kv, load.disable, load.activation_planes);
}

engine::LoadOptions load_options(const ModelOptions& options) {
  engine::LoadOptions load{.backend = options.backend,
                           .threads = options.threads,
                           .tensor_ops = options.tensor_ops,
                           .disable = plan::parse_mechanisms(options.disable)};
  if (!options.kv.empty()) load.kv = plan::parse_kv_type(options.kv);
  if (!options.activations.empty()) load.activation_planes = options.activations == "int8" ? 1 : 2;
  load.memory.context = options.ctx;
  if (!options.profile.empty()) load.trace = std::make_shared<Trace>(options.profile);
  return load;
}

void plan_for_sessions(engine::LoadOptions& load, engine::EngineOptions& options) {
  load.memory.shared_pool = true;
  load.memory.program_bytes = kProgramBytes;
  options.available_memory = available_memory;
  options.least_available_bytes = std::min<int64_t>(int64_t{1} << 30, memory_limit() / kLeastAvailableShare);
}

std::atomic<bool>& interrupted() {
  static std::atomic<bool> flag{false};
  return flag;
}

InterruptTexts& interrupt_lines() {
  static_assert(std::atomic<const char*>::is_always_lock_free);  // a signal handler reads them
  static InterruptTexts lines;
  return lines;
}

void check_interrupted() {
  if (interrupted()) throw Interrupted{};
}

std::string read_named_file(const char* option, const std::string& path, uint64_t max_bytes) {
  try {
    return read_text_file(path, max_bytes);
  } catch (const Error& e) {
    fail(Fault::user, "{} {}", option, e.what());
  }
}

CLI::Validator as_size() {
  return {[](std::string& text) -> std::string {
            const std::string typed = text;
            std::string error;
            try {
              error = CLI::AsSizeValue(true)(text);
            } catch (const CLI::ValidationError& e) {
              error = e.what();
            }
            const bool is_one = error.empty() && typed.find('-') == typed.npos && text.size() <= kSizeDigits;
            return is_one ? ""
                          : fmt::format("'{}' is no number of bytes; write it as in 20GB or 512MiB", typed);
          },
          "SIZE"};
}

bool stderr_is_terminal() { return isatty(STDERR_FILENO) != 0; }
bool stdout_is_terminal() { return isatty(STDOUT_FILENO) != 0; }

bool reader_is_gone() {
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  return poll(&out, 1, 0) > 0 && (out.revents & (POLLERR | POLLHUP)) != 0 && !stdout_is_terminal();
}

bool use_colour() {
  const char* no_colour = std::getenv("NO_COLOR");
  return stdout_is_terminal() && (no_colour == nullptr || *no_colour == '\0');
}

void set_verbosity(int n_verbose) {
  const LogLevel least = n_verbose >= 2   ? LogLevel::debug
                         : n_verbose == 1 ? LogLevel::info
                                          : LogLevel::notice;
  set_log_sink([least](LogLevel level, std::string_view line) {
    if (level < least) return;
    const char* tag = level == LogLevel::warning ? "warning: " : level == LogLevel::error ? "error: " : "";
    const std::string text = fmt::format("lily: {}{}\n", tag, line);
    Notices& waiting = notices();
    const std::lock_guard lock(waiting.mutex);
    if (waiting.is_held && (level == LogLevel::notice || level == LogLevel::warning)) waiting.lines += text;
    else std::fputs(text.c_str(), stderr);
  });
}

void hold_notices() {
  const std::lock_guard lock(notices().mutex);
  notices().is_held = true;
}

void show_notices() {
  Notices& waiting = notices();
  const std::lock_guard lock(waiting.mutex);
  waiting.is_held = false;
  std::fputs(std::exchange(waiting.lines, {}).c_str(), stderr);
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string human_bytes(int64_t n_bytes) {
  const auto n = static_cast<double>(n_bytes);
  if (n >= 1e9) return fmt::format("{:.1f} GB", n / 1e9);
  if (n >= 1e6) return fmt::format("{:.0f} MB", n / 1e6);
  if (n >= 1e3) return fmt::format("{:.0f} kB", n / 1e3);
  return fmt::format("{} bytes", n_bytes);
}

ProgressBar::ProgressBar(std::string title, std::string unit)
    : title_(std::move(title)), unit_(std::move(unit)), is_shown_(stderr_is_terminal()), start_s_(now_s()) {
  show_notices();
}

ProgressBar::~ProgressBar() {
  if (is_shown_ && drawn_s_ > 0) std::fputs("\r\x1b[K", stderr);
}

std::string ProgressBar::amount(int64_t n) const {
  return unit_.empty() ? human_bytes(n) : std::to_string(n);
}

void ProgressBar::update(int64_t n_done, int64_t n_total) {
  const double now = now_s();
  if (!is_shown_ || n_total <= 0 || (now - drawn_s_ < 0.1 && n_done < n_total)) return;
  drawn_s_ = now;
  constexpr int kWidth = 30;
  const double share = static_cast<double>(n_done) / static_cast<double>(n_total);
  const double rate = static_cast<double>(n_done) / std::max(now - start_s_, 1e-3);
  std::string bar(static_cast<size_t>(kWidth), ' ');
  for (int i = 0; i < kWidth && i < share * kWidth; ++i) bar[static_cast<size_t>(i)] = '#';
  std::string line = fmt::format("{} [{}] {:3.0f} %  {} of {}{}{}", title_, bar, share * 100, amount(n_done),
                                 amount(n_total), unit_.empty() ? "" : " ", unit_);
  if (n_done > 0)
    line += fmt::format("  {}/s  {:.0f} s left", amount(static_cast<int64_t>(rate)),
                        static_cast<double>(n_total - n_done) / rate);
  fmt::print(stderr, "\r{} \x1b[K", line);
  std::fflush(stderr);
}

}  // namespace lily::cli
