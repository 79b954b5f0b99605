// What the commands share: options, where a model is found, and how output is written. One file a command.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "model/checkpoint.h"
#include "plan/policy.h"

namespace lily::cli {

inline constexpr int kExitFailed = 1, kExitUsage = 2, kExitInterrupted = 130;
inline constexpr int kExitReaderGone = 141;  // as of a program that SIGPIPE ended

// Adds a command to the program; `action` is what main runs when it was chosen. The returned options live in
// it.
using Action = std::function<int()>;
// `last_words`: those after "--", which CLI11 takes for options again; read when the action runs.
void add_run(CLI::App& app, Action& action, const std::vector<std::string>& last_words);
void add_inspect(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_eval(CLI::App& app, Action& action);
void add_diff(CLI::App& app, Action& action);
void add_selftest(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_serve(CLI::App& app, Action& action);
void add_synth(CLI::App& app, Action& action);
void add_pull(CLI::App& app, Action& action);
void add_list(CLI::App& app, Action& action);
void add_rm(CLI::App& app, Action& action);
void add_completions(CLI::App& app, Action& action);
void add_man(CLI::App& app, Action& action);
void add_version(CLI::App& app, Action& action);

// Options of every command that runs a model.
struct ModelOptions {
  std::string model;  // empty: find_model's default
  std::string backend = "auto";
  std::string kv;           // empty: the backend's
  std::string activations;  // "int8", "int16"; empty: the backend's
  int threads = 0;          // 0: physical cores
  bool tensor_ops = false;
  int ctx = 0;          // 0: what fits, at most the model's own limit
  std::string disable;  // mechanisms, "P1,D3"
  std::string profile;  // file of a trace; empty: none
};
void add_model_options(CLI::App& command, ModelOptions& options);
// Of those that run steps through an engine.
void add_profile_option(CLI::App& command, ModelOptions& options);

// A number of bytes, with a unit or without; below 10^18.
CLI::Validator as_size();

// Sessions that outlive the process.
struct DiskOptions {
  std::string folder;  // empty: none
  uint64_t n_bytes = uint64_t{16} << 30;
};
void add_disk_options(CLI::App& command, DiskOptions& options);

// The folder of a model: a path, "lily-tiny" for the bundled demo model, a hub name that has been pulled or
// lies in the Hugging Face cache, or, where `name` is empty, LILY_MODEL, else the real model if it has been
// pulled, else the demo model with a notice.
std::string find_model(const std::string& name);
// A text file that an option names; what is wrong with it is the user's fault and names the option.
std::string read_named_file(const char* option, const std::string& path, uint64_t max_bytes);
// The demo model that comes with the program; empty where it is missing.
inline constexpr const char* kDemoModel = "lily-tiny";
std::filesystem::path find_bundled();

// The policy that the device publishes, with what the options change in it.
plan::Policy chosen_policy(const backend::Device& device, const model::Dims& dims,
                           const ModelOptions& options);

// The same for the engine.
engine::LoadOptions load_options(const ModelOptions& options);
// For a program that answers: states and KV have one budget, which shrinks when the machine's memory is
// short.
void plan_for_sessions(engine::LoadOptions& load, engine::EngineOptions& options);

// True once Ctrl-C was pressed; reset by the interactive chat after each answer.
std::atomic<bool>& interrupted();
// What the signal handler writes to stderr at the first Ctrl-C and at the second, which ends the program;
// null: nothing. The texts outlive the program's signals.
struct InterruptTexts {
  std::atomic<const char*> first{nullptr}, second{nullptr};
};
InterruptTexts& interrupt_lines();
// Throws the error that ends a command with exit code 130.
struct Interrupted {};
void check_interrupted();

bool stderr_is_terminal();
bool stdout_is_terminal();
// Nobody reads the pipe on stdout any more.
bool reader_is_gone();
bool use_colour();  // stdout is a terminal and NO_COLOR is not set
void set_verbosity(int n_verbose);
// Notices and warnings of a command that has not begun to work yet wait, so that an error stands alone;
// show_notices prints those that wait, and later ones come at once.
void hold_notices();
void show_notices();

// A bar on stderr, on a terminal only, redrawn at most ten times a second. What begins to show progress has
// begun to work, so it shows the notices too.
class ProgressBar {
 public:
  // `unit`: what is counted, "tokens"; empty: bytes.
  explicit ProgressBar(std::string title, std::string unit = {});
  ~ProgressBar();  // clears the line
  void update(int64_t n_done, int64_t n_total);

 private:
  std::string amount(int64_t n) const;

  std::string title_, unit_;
  bool is_shown_;
  double start_s_, drawn_s_ = 0;
};

// "19.5 GB", "644 MB".
std::string human_bytes(int64_t n_bytes);
double now_s();  // monotonic

}  // namespace lily::cli
