// lily selftest: each op of the model's plans on the devices that are present, against the reference.
#include <signal.h>
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/command.h"
#include "engine/selftest.h"

namespace lily::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct SelftestOptions {
  std::string backend = "auto";
  int threads = 0;
  bool tensor_ops = false, json = false;
};

// Signals that end the program wait while this lives.
class Undisturbed {
 public:
  Undisturbed() {
    sigset_t ending;
    sigemptyset(&ending);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&ending, signal);
    pthread_sigmask(SIG_BLOCK, &ending, &before_);
  }
  ~Undisturbed() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;

 private:
  sigset_t before_{};
};

// The folder of the synthetic checkpoint, for as long as its files are opened.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "lily-selftest-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      fail(Fault::device, "{}: no folder can be made there; set TMPDIR to one with 200 MB free",
           fs::temp_directory_path().string());
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Its files have no name any more: however the program ends, nothing of them stays.
model::Checkpoint synthetic_checkpoint() {
  const Undisturbed undisturbed;
  const Folder folder;
  engine::write_self_test_checkpoint(folder.path());
  return model::Checkpoint::open(folder.path());
}

// One kind of op over all steps.
struct Row {
  int n_steps = 0;
  engine::OpReport report;
  std::string step;  // of the worst value
};

std::map<std::string, Row> by_op(const std::vector<engine::SelfTestResult>& results) {
  std::map<std::string, Row> rows;
  for (const engine::SelfTestResult& r : results) {
    Row& row = rows[r.op];
    ++row.n_steps;
    row.report.n_values += r.report.n_values;
    if (r.report.worst && (!row.report.worst || r.report.worst->share() > row.report.worst->share())) {
      row.report.worst = r.report.worst;
      row.step = r.step;
    }
    if (r.report.first && !row.report.first) row.report.first = r.report.first;
  }
  return rows;
}

// What runs by default: every device that is present, less the two that are oracles and the one that stands
// for another processor.
std::vector<std::string> backends_of(const SelftestOptions& o) {
  if (o.backend != "auto") return {o.backend};
  std::vector<std::string> names;
  for (const std::string& name : backend::compiled_backends()) {
    if (name == "reference" || name == "metal-emulated" || name == "cpu-avx2") continue;
    try {
      if (backend::make_device(name)->info().keeps_values) names.push_back(name);
      else fmt::print(stderr, "lily: {} is left out: it cannot show the values between its ops\n", name);
    } catch (const Error&) {
      // Compiled in, but there is no such device here.
    }
  }
  return names;
}

int run_selftest(const SelftestOptions& o) {
  const model::Checkpoint checkpoint = synthetic_checkpoint();
  const auto reference = backend::make_device("reference", {.threads = o.threads});
  reference->load(checkpoint, {});
  Json json = Json::array();
  int n_wrong = 0;
  for (const std::string& name : backends_of(o)) {
    const double start_s = now_s();
    const auto device = backend::make_device(name, {.threads = o.threads, .tensor_ops = o.tensor_ops});
    device->load(checkpoint, {});
    const auto results = engine::self_test(*device, *reference, checkpoint.dims(), check_interrupted);
    const double seconds = now_s() - start_s;
    if (!o.json)
      fmt::print("{}: {}\n  {:22} {:>5} {:>10} {:>11}\n", name, device->info().name, "op", "steps", "values",
                 "of allowed");
    Json ops = Json::array();
    for (const auto& [op, row] : by_op(results)) {
      const bool is_wrong = row.report.first.has_value();
      n_wrong += is_wrong;
      const double share = row.report.worst ? row.report.worst->share() : 0;
      ops.push_back({{"op", op},
                     {"steps", row.n_steps},
                     {"values", row.report.n_values},
                     {"share", share},
                     {"passed", !is_wrong},
                     {"first", is_wrong ? Json(row.report.first->line()) : Json()}});
      if (o.json) continue;
      fmt::print("  {:22} {:>5} {:>10} {:>9.0f} %  {}\n", op, row.n_steps, row.report.n_values, 100 * share,
                 is_wrong ? "WRONG" : "ok");
      if (is_wrong) fmt::print("    {}\n", row.report.first->line());
    }
    if (!o.json) fmt::print("  {:.1f} s\n", seconds);
    json.push_back({{"backend", name}, {"seconds", seconds}, {"ops", ops}});
  }
  if (o.json) fmt::print("{}\n", json.dump(2));
  if (n_wrong == 0) return 0;
  fmt::print(stderr, "lily: {} kinds of ops differ from the reference by more than rounding explains\n",
             n_wrong);
  return kExitFailed;
}

}  // namespace

void add_selftest(CLI::App& app, Action& action) {
  auto options = std::make_shared<SelftestOptions>();
  CLI::App* command = app.add_subcommand(
      "selftest",
      "Test the kernels on the devices present: every op at the model's widths, against the reference");
  command
      ->add_option("--backend", options->backend,
                   "auto: every device that is present; metal-emulated and reference only by name")
      ->capture_default_str();
  command->add_option("--threads", options->threads, "0: physical cores")->check(CLI::Range(0, 1024));
  command->add_flag("--tensor-ops", options->tensor_ops,
                    "Metal 4's tensor operations, on chips that have them (metal)");
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer("Examples:\n  lily selftest\n  lily selftest --backend metal-emulated");
  command->callback([options, &action] { action = [options] { return run_selftest(*options); }; });
}

}  // namespace lily::cli
