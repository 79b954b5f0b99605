// lily plan: what a phase would do, without running it.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backend/planner.h"
#include "base/error.h"
#include "base/printable.h"
#include "cli/command.h"
#include "plan/cost.h"
#include "plan/print.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PlanOptions {
  ModelOptions model;
  std::string phase = "decode", shape, device;
  int rows = 0;
  int64_t context = -1;
  bool list = false, json = false;
};

struct Target {
  std::string backend;
  const backend::Planner* planner;  // null: launches are not known without the device
  plan::Policy policy;
};

// The backend asked for, else the one that drives the device whose roofline is shown, if its launches are
// known without it, else the one that runs here.
Target target_of(const PlanOptions& o, const model::Dims& dims) {
  const backend::DeviceOptions options{.threads = 1, .tensor_ops = o.model.tensor_ops};
  std::string name = o.model.backend;
  if (name == "auto" && !o.device.empty()) {
    const std::string driver = plan::device_rates(o.device).backend;
    if (backend::find_planner(driver) != nullptr) name = driver;
  }
  const engine::LoadOptions load = load_options(o.model);
  if (const backend::Planner* planner = backend::find_planner(name))
    return {name, planner,
            engine::policy_of(planner->policy(dims, options), name, load.kv, load.disable,
                              load.activation_planes)};
  const auto device = backend::make_device(name, options);
  return {device->info().backend, backend::find_planner(device->info().backend),
          chosen_policy(*device, dims, o.model)};
}

int run_plan(const PlanOptions& o) {
  if (o.model.model.empty() == o.shape.empty() && !o.shape.empty())
    fail(Fault::user, "--model and --shape exclude each other");
  model::Dims dims;
  std::optional<model::Checkpoint> checkpoint;
  if (!o.shape.empty()) {
    dims = o.shape == "lily-tiny" ? model::lily_tiny() : model::qwen36_35b_a3b();
  } else {
    checkpoint = model::Checkpoint::open(find_model(o.model.model));
    dims = checkpoint->dims();
  }

  const bool is_decode = o.phase == "decode";
  plan::Workload work;
  if (checkpoint) work.storage = [&](model::WeightId id) { return checkpoint->weight(id).storage; };
  work.rows = o.rows > 0 ? o.rows : is_decode ? 1 : 512;
  work.position = o.context >= 0 ? o.context : is_decode ? 4096 : 0;
  const auto [backend, planner, policy] = target_of(o, dims);
  if (is_decode && work.rows != 1)
    fail(Fault::user,
         "--rows {}: a decode step has one row of each sequence, and costs are counted for one sequence",
         work.rows);
  if (work.position + work.rows > dims.max_positions)
    fail(Fault::user, "--context {} and --rows {} exceed the model's {} positions", work.position, work.rows,
         dims.max_positions);
  const plan::Plan plan = plan::forward(dims,
                                        {.phase = is_decode ? plan::Phase::decode : plan::Phase::prefill,
                                         .rows = static_cast<int>(work.rows),
                                         .context = work.position + work.rows,
                                         .ending = is_decode ? plan::Ending::greedy : plan::Ending::logits},
                                        policy);
  const plan::Cost cost = plan::cost(plan, work);
  std::optional<plan::Roofline> roofline;
  if (!o.device.empty()) roofline = plan::roofline(cost, work.rows, plan::device_rates(o.device));
  const backend::Launches launches =
      planner != nullptr
          ? planner->launches(plan, work.storage)
          : backend::Launches{static_cast<int>(plan.ops.size()), plan.n_stages(), plan.n_stages() - 1};

  if (o.json) {
    Json json = {{"phase", o.phase},
                 {"rows", work.rows},
                 {"context", work.position},
                 {"backend", backend},
                 {"ops", plan.ops.size()},
                 {"dispatches", launches.launches},
                 {"stages", launches.stages},
                 {"barriers", launches.barriers},
                 {"weight_bytes", cost.weight_bytes},
                 {"state_read_bytes", cost.state_read_bytes},
                 {"state_write_bytes", cost.state_write_bytes},
                 {"conv_state_bytes", cost.conv_state_bytes},
                 {"kv", plan::name(policy.kv)},
                 {"kv_read_bytes", cost.kv_read_bytes},
                 {"kv_write_bytes", cost.kv_write_bytes},
                 {"scratch_bytes", plan.scratch_bytes},
                 {"flops", cost.flops}};
    json["roofline"] =
        roofline ? Json{{"device", o.device}, {"tok_s", roofline->tok_s}, {"bound", roofline->bound}}
                 : Json();
    json["disabled"] = o.model.disable;
    json["activation_planes"] = backend.starts_with("cpu") ? Json(policy.activation_planes) : Json();
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  if (o.list) fmt::print("{}", plan::list(plan, work));
  fmt::print("{} of {} at context {} on {}: {} as {} dispatches in {}, {}\n", o.phase,
             counted(work.rows, "row"), work.position, backend, counted(std::ssize(plan.ops), "op"),
             launches.launches, counted(launches.stages, "stage"), counted(launches.barriers, "barrier"));
  const std::pair<const char*, int64_t> lines[] = {{"weights read", cost.weight_bytes},
                                                   {"delta state read", cost.state_read_bytes},
                                                   {"delta state written", cost.state_write_bytes},
                                                   {"conv state", cost.conv_state_bytes},
                                                   {"KV read", cost.kv_read_bytes},
                                                   {"KV written", cost.kv_write_bytes},
                                                   {"in all", cost.total_bytes()}};
  for (const auto& [name, n_bytes] : lines) fmt::print("  {:20} {:>16} bytes\n", name, n_bytes);
  fmt::print("  {:20} {:>16} bytes, reused between stages\n", "scratch", plan.scratch_bytes);
  fmt::print("  {:20} {:>16}\n", "flops", cost.flops);
  if (policy.activation_planes == 1)
    fmt::print("  {:20} {:>16} for 4-bit weights, of one int8 plane\n", "activations", "int8");
  if (roofline)
    fmt::print("  at most {:.0f} tok/s on {}, bound by {}\n", roofline->tok_s, o.device,
               std::string_view(roofline->bound) == "memory" ? "memory bandwidth" : "arithmetic");
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command =
      app.add_subcommand("plan", "The plan of a phase: ops, stages, bytes and FLOPs, without running it");
  add_model_options(*command, options->model);
  command->add_option("--phase", options->phase)
      ->check(CLI::IsMember({"prefill", "decode"}))
      ->capture_default_str();
  command
      ->add_option("--rows", options->rows,
                   "Rows of one sequence in the step (default: decode 1, prefill 512)")
      ->check(CLI::Range(1, 1 << 20));
  command
      ->add_option("--context", options->context,
                   "Tokens in the cache before the step (default: decode 4096, prefill 0)")
      ->check(CLI::Range(0, 1 << 20));
  command->add_option("--shape", options->shape, "Dimensions without a checkpoint")
      ->check(CLI::IsMember({"qwen3.6-35b-a3b", "lily-tiny"}));
  command->add_option(
      "--device", options->device,
      "Device whose roofline is shown: h200, m1 ... m5-max. Without --backend, those of Apple "
      "show what Metal will launch");
  command->add_flag("--list", options->list, "One line an op");
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer(
      "Examples:\n  lily plan --shape qwen3.6-35b-a3b --phase decode --context 4096 --device m5-max\n"
      "  lily plan --phase prefill --rows 2048 --list");
  command->callback([options, &action] { action = [options] { return run_plan(*options); }; });
}

}  // namespace lily::cli
