#include "tests/backend/metal/op_comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "backend/metal/lower.h"
#include "base/half.h"
#include "base/thread_pool.h"
#include "model/int8_group.h"
#include "model/weight_store.h"
#include "plan/uses.h"
#include "tests/backend/metal/delta_error.h"

namespace lily::test {

using backend::Device;
using plan::Ending;
using plan::Policy;
using plan::ValueId;

Stage::Stage(const EmulatedOptions& options, const model::Checkpoint& checkpoint)
    : checkpoint_(checkpoint),
      kv_(options.kv),
      metal_(make_emulated_metal(checkpoint, options)),
      reference_(backend::make_reference_device({})) {
  reference_->load(checkpoint, {});
  Policy policy = reference_->policy(dims());
  if (kv_ == plan::KvType::int8) policy.kv = kv_;
  reference_->reserve({.n_state_slots = kSlots, .n_kv_blocks = kBlocks, .n_token_slots = 8}, policy);
}

void Stage::fill_memory(int n_slots, int n_blocks) {
  std::mt19937 random(7);
  // Uniform, with a root mean square of `size`.
  const auto values = [&](size_t n, float size, bool bf16) {
    std::vector<float> v(n);
    const float scale = size * std::sqrt(3.0f);
    for (float& x : v) {
      x = scale * (static_cast<float>(random() >> 8) * 0x1p-23f - 1);
      if (bf16) x = bf16_rounded(x);
    }
    return v;
  };
  for (int layer = 0; layer < dims().n_layers; ++layer) {
    if (dims().mixer(layer) == model::Mixer::delta) {
      for (int slot = 0; slot < n_slots; ++slot) {
        const auto s = values(static_cast<size_t>(dims().delta_state_bytes_per_layer() / 4), 0.1f, false);
        const auto c = values(static_cast<size_t>(3 * dims().conv_channels()), 1, true);
        for (Device* d : {static_cast<Device*>(&metal()), &reference()}) {
          d->write_delta_state(backend::StateSlot{slot}, layer, s);
          d->write_conv_state(backend::StateSlot{slot}, layer, c);
        }
      }
      continue;
    }
    for (int block = 0; block < n_blocks; ++block)
      for (const auto which : {Device::Kv::k, Device::Kv::v}) {
        const auto kv = values(static_cast<size_t>(backend::kKvBlockTokens * dims().kv_width()), 1, true);
        for (Device* d : {static_cast<Device*>(&metal()), &reference()})
          d->write_kv(which, layer, block, backend::kKvBlockTokens, kv);
      }
  }
}

namespace {

double rms(std::span<const float> v) {
  double sum = 0;
  for (const float x : v) sum += static_cast<double>(x) * x;
  return std::sqrt(sum / static_cast<double>(std::max<size_t>(1, v.size())));
}

double largest(std::span<const float> v) {
  double most = 0;
  for (const float x : v) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

// Whether the kernels of an op round terms of its sums to bf16: the matrix kernels their weights, attention
// the queries and keys that it prepares. All else is fp32 inside.
bool rounds_terms(const plan::Plan& plan, const plan::Op& op) {
  constexpr int kFewRows = 8;
  const bool is_matrix = !plan.policy.row_parallel_gemv || plan.shape.rows > kFewRows;
  return std::visit(plan::overloaded{
                        [&](const plan::Linear&) { return is_matrix; },
                        [&](const plan::NormLinear&) { return is_matrix; },
                        [&](const plan::LinearAdd&) { return is_matrix; },
                        [&](const plan::NormRouter&) { return is_matrix; },
                        [&](const plan::ExpertsLinear& o) { return o.routing.grouped(); },
                        [&](const plan::ExpertsGateUp& o) { return o.routing.grouped() || is_matrix; },
                        [](const plan::GatedAttention& o) { return o.prepares(); },
                        [](const auto&) { return false; },
                    },
                    op);
}

// Relative to the size of a row's values, what a sum may lose: where terms are rounded to bf16, independent
// errors of at most 2^-8, hence with a deviation of 2^-8 / sqrt(3), six deviations of a sum whose terms
// together have the size of the row's values; else what fp32 sums add, 2^-18: 2^-24 for each doubling of up
// to 64 terms a lane.
double sum_error(bool rounds) { return rounds ? 6 / std::sqrt(3.0) * 0x1p-8 : 0x1p-18; }

// With half a unit in the last place of the result's type (2^-8 relative for bf16).
double tolerance(float expected, double row_size, plan::Type type, bool rounds) {
  return (type == plan::Type::bf16 ? 0x1p-8 * std::abs(expected) : 0) +
         sum_error(rounds) * (row_size + std::abs(expected));
}

// The rows whose eighth and ninth logits are so near that either choice is right.
std::set<int64_t> near_ties(std::span<const float> logits, int64_t stride, int n_experts, double tolerance) {
  std::set<int64_t> rows;
  for (size_t t = 0; t < logits.size() / static_cast<size_t>(stride); ++t) {
    std::vector<float> row(
        logits.begin() + static_cast<std::ptrdiff_t>(t * static_cast<size_t>(stride)),
        logits.begin() + static_cast<std::ptrdiff_t>(t * static_cast<size_t>(stride)) + n_experts);
    std::sort(row.begin(), row.end(), std::greater<>());
    for (int j = 0; j < 8; ++j)
      if (row[static_cast<size_t>(j)] - row[static_cast<size_t>(j) + 1] < tolerance)
        rows.insert(static_cast<int64_t>(t));
  }
  return rows;
}

// What errors of the logits do to the weights of the chosen experts, [rows, 8]: w = softmax of their logits,
// so dw_i = w_i (dl_i - sum_j w_j dl_j), the dl independent and within six deviations of tolerance().
std::vector<double> router_weights_error(const plan::Plan& plan, const plan::NormRouter& op,
                                         backend::Program& reference, bool rounds) {
  constexpr size_t k = model::kExpertsPerToken;
  const auto logits = reference.read(op.logits), ids = reference.read(op.ids),
             weights = reference.read(op.weights);
  const plan::Value& value = plan.value(op.logits);
  const auto cols = static_cast<size_t>(value.cols);
  std::vector<double> error(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const size_t first = i / k * k;  // of the row
    const std::span<const float> row = std::span(logits).subspan(i / k * cols, cols);
    const double size = rms(row);
    double variance = 0;
    for (size_t j = first; j < first + k; ++j) {
      const double response = (i == j ? 1.0 : 0.0) - weights[j];
      const double of_logit = tolerance(row[static_cast<size_t>(ids[j])], size, value.type, rounds);
      variance += response * response * of_logit * of_logit;
    }
    error[i] = weights[i] * std::sqrt(variance);
  }
  return error;
}

// Queries and keys that are prepared inside attention are rounded to bf16 there. A score is a sum of 256
// products over 16, so it moves by a relative 2^-8 / sqrt(3) of rms(query) * rms(key), and the output by as
// much of itself. The cache's keys have an rms of 1, a prepared query that of its norm's weight.
double query_rms(const model::Checkpoint& checkpoint, int layer) {
  ThreadPool pool(1);
  const model::WeightId id{model::Weight::q_norm, layer};
  return rms(model::WeightStore::load(checkpoint, {id}, pool).vector(id));
}

// Values that say which experts a row has, as the scene wants them.
void choose(const plan::Plan& plan, const plan::Value& value, const Scene& scene, std::vector<float>& v) {
  const auto cols = static_cast<size_t>(value.cols);
  if (value.name.ends_with("router_ids"))
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = static_cast<float>(scene.expert(static_cast<int64_t>(i / cols), static_cast<int>(i % cols)));
  if (value.name.ends_with("router_logits"))
    for (size_t t = 0; t < v.size() / cols; ++t) {
      std::fill_n(v.begin() + static_cast<std::ptrdiff_t>(t * cols), plan.dims.n_experts, -10.0f);
      for (int k = 0; k < model::kExpertsPerToken; ++k)
        v[t * cols + static_cast<size_t>(scene.expert(static_cast<int64_t>(t), k))] =
            static_cast<float>(model::kExpertsPerToken - k) / 4;
    }
}

size_t n_blocks_of(backend::Program& program, const plan::Op& op) {
  return static_cast<size_t>(program.read(std::get<plan::ExpertGroups>(op).n_blocks)[0]);
}

// What ops leave in caches and states: sums in fp32 throughout, rounded once where the type is bf16.
void expect_near(const std::vector<float>& expected, const std::vector<float>& got, plan::Type type,
                 const std::string& what) {
  const double size = rms(expected);
  for (size_t k = 0; k < expected.size(); ++k)
    ASSERT_NEAR(expected[k], got[k], tolerance(expected[k], size, type, false)) << what << " " << k;
}

// Groups of 8 bits whose values fp32 sums have made: a few of the n_new lie so near the middle between two
// codes that they are rounded to the other one, or their group's scale to its neighbour.
void expect_codes_near(const std::vector<float>& expected, const std::vector<float>& got, int64_t n_new,
                       const std::string& what) {
  int64_t n_other = 0;
  for (size_t first = 0; first < expected.size(); first += model::kInt8Group) {
    const double step = largest(std::span(expected).subspan(first, model::kInt8Group)) / 127;
    for (size_t k = first; k < first + model::kInt8Group; ++k) {
      n_other += expected[k] != got[k];
      ASSERT_NEAR(expected[k], got[k], (1 + 0x1p-8) * step) << what << " " << k;
    }
  }
  EXPECT_LE(n_other, n_new / 50 + model::kInt8Group) << what;
}

std::set<std::string>& all_kernels() {
  static std::set<std::string> names;
  return names;
}

// Whether later ops rely on what the op leaves: rows of the cache, expanded weights, and the groups of the
// experts that the scene chose.
bool leaves_memory(const plan::Plan& plan, const plan::Op& op) {
  const auto uses = plan::uses(op);
  return std::holds_alternative<plan::ExpertGroups>(op) ||
         std::any_of(uses.begin(), uses.end(), [&](const plan::Use& use) {
           return use.writes() && (use.resource == plan::Resource::kv ||
                                   (use.resource == plan::Resource::value &&
                                    plan.value(use.value).rows == plan::RowSpace::matrix));
         });
}

std::set<std::pair<std::string, std::vector<std::byte>>>& all_shapes() {
  static std::set<std::pair<std::string, std::vector<std::byte>>> kernels_and_params;
  return kernels_and_params;
}

bool is_wanted(const Scene& scene, const metal::LoweredOp& op) {
  return scene.only == Scene::Only::all ||
         std::any_of(op.dispatches.begin(), op.dispatches.end(), [&](const metal::Dispatch& d) {
           return !all_kernels().contains(d.kernel) ||
                  (scene.only == Scene::Only::new_shapes && !all_shapes().contains({d.kernel, d.params}));
         });
}

// Lowered is not launched: a grid may be empty, and what samples from the whole vocabulary runs on demand.
std::set<std::string> launched(emulator::EmulatedDevice& gpu) {
  std::set<std::string> kernels;
  for (const emulator::DispatchCounters& c : gpu.take_counters())
    if (c.n_threadgroups > 0) kernels.insert(c.kernel);
  return kernels;
}

void note(const metal::LoweredOp& op, std::set<std::string> kernels) {
  for (const metal::Dispatch& d : op.dispatches)
    if (kernels.contains(d.kernel)) all_shapes().emplace(d.kernel, d.params);
  all_kernels().merge(kernels);
}

}  // namespace

bool is_of_vocabulary(const plan::Op& op) {
  const auto uses = plan::uses(op);
  return std::holds_alternative<plan::GatherRows>(op) || std::holds_alternative<plan::GreedyToken>(op) ||
         std::holds_alternative<plan::SampleToken>(op) || std::holds_alternative<plan::TopCandidates>(op) ||
         std::any_of(uses.begin(), uses.end(), [](const plan::Use& use) {
           return use.resource == plan::Resource::weight && (use.weight.weight == model::Weight::embed ||
                                                             use.weight.weight == model::Weight::final_norm ||
                                                             use.weight.weight == model::Weight::lm_head);
         });
}

void EveryKernel::TearDown() {
  if (testing::GTEST_FLAG(filter) != "*") return;
  for (const emulator::CompiledLibrary* library : libraries_)
    for (unsigned f = 0; f < library->n_files; ++f)
      for (unsigned k = 0; k < library->files[f]->n_kernels; ++k) {
        const std::string name = library->files[f]->kernels[k].host_name;
        EXPECT_TRUE(all_kernels().contains(name) || elsewhere_.contains(name))
            << name << " has not been compared";
      }
}

void OpComparison::make_stage(const EmulatedOptions& options, const model::Checkpoint& checkpoint) {
  delete stage_;
  EmulatedOptions counting = options;
  counting.keep_counters = true;
  stage_ = new Stage(counting, checkpoint);
}
void OpComparison::TearDownTestSuite() {
  delete stage_;
  stage_ = nullptr;
}

void OpComparison::note_launched() { all_kernels().merge(launched(stage().gpu())); }

void OpComparison::compare(const Scene& scene, Policy policy, Ending ending) {
  SCOPED_TRACE(scene.name);
  Stage& s = *stage_;
  policy.kv = s.kv();
  int n_rows = 0;
  std::vector<Sequence> sequences;
  for (size_t i = 0; i < scene.rows.size(); ++i) {
    sequences.push_back(
        {.tokens = random_tokens(scene.rows[i], s.dims().vocab, 11 + i),
         .position = scene.positions[i],
         .src = scene.positions[i] == 0 ? backend::kNoState : backend::StateSlot{static_cast<int>(i)},
         .dst = backend::StateSlot{static_cast<int>(3 + i)}});
    n_rows += scene.rows[i];
  }
  const int n_blocks = static_cast<int>((scene.context + 63) / 64);
  const auto n_sequences = static_cast<int>(scene.rows.size());
  ASSERT_TRUE(n_sequences == 1 || n_blocks * n_sequences <= kBlocks);
  if (scene.end_tokens) {
    sequences.front().tokens.front() = s.dims().vocab - 1;
    sequences.back().tokens.back() = 0;
  }
  Inputs inputs(sequences, n_blocks, s.dims().vocab - 50, scene.all_outputs);
  const int n_outputs = inputs.n_outputs();
  if (ending == Ending::sampled) {
    inputs.sampling().resize(static_cast<size_t>(n_outputs), {.top_k = 20, .seed = 5});
    if (n_outputs > 1) inputs.sampling().back() = {.temperature = 4, .seed = 5};  // from the whole vocabulary
  }
  model::Dims dims = s.dims();
  dims.n_layers = scene.n_layers;
  const plan::Plan plan = plan::forward(dims,
                                        {.phase = scene.phase,
                                         .rows = n_rows,
                                         .outputs = n_outputs,
                                         .context = scene.context,
                                         .ending = ending},
                                        policy, {.keep_values = true});
  const auto reference = s.reference().compile(plan);
  const auto metal = s.metal().compile(plan);
  const metal::Lowered& lowered = dynamic_cast<metal::MetalProgram&>(*metal).lowered();
  const auto is_compared = [&](size_t i) {
    return (!scene.compares || scene.compares(plan.ops[i])) &&
           (is_wanted(scene, lowered.ops[i]) || leaves_memory(plan, plan.ops[i]));
  };
  size_t n_ops = 0;  // up to the last one that is wanted
  for (size_t i = 0; i < plan.ops.size(); ++i)
    if (is_compared(i) && is_wanted(scene, lowered.ops[i])) n_ops = i + 1;
  const auto is_meant = [&](const plan::Op& op) { return !scene.compares || scene.compares(op); };
  ASSERT_TRUE(std::any_of(plan.ops.begin(), plan.ops.end(), is_meant)) << "no op of the plan is compared";
  if (n_ops == 0) {  // all of its dispatches were in scenes before
    ASSERT_NE(scene.only, Scene::Only::all) << "nothing is compared";
    return;
  }
  s.fill_memory(n_sequences, std::min(n_blocks * n_sequences, kBlocks));
  const auto run = [&](backend::Program& program, size_t first, size_t last) {
    program.run_ops(inputs.get(), static_cast<int>(first), static_cast<int>(last));
  };
  size_t n_done = 0;  // on the reference
  for (size_t i = 0; i < n_ops; ++i) {
    const plan::Op& op = plan.ops[i];
    if (!is_compared(i)) continue;
    if (n_done < i) run(*reference, n_done, i);
    n_done = i + 1;
    SCOPED_TRACE(fmt::format("op {} {}", i, plan::kind_name(op)));
    std::vector<ValueId> outputs;
    for (const plan::Use& use : plan::uses(op)) {
      if (use.resource != plan::Resource::value) continue;
      if (use.writes()) outputs.push_back(use.value);
      if (!use.reads() || plan.value(use.value).rows == plan::RowSpace::matrix) continue;
      std::vector<float> v = reference->read(use.value);
      if (plan.value(use.value).type == plan::Type::bf16)
        for (float& x : v) x = bf16_rounded(x);
      if (scene.expert) choose(plan, plan.value(use.value), scene, v);
      reference->write(use.value, v);
      metal->write(use.value, v);
    }
    run(*reference, i, i + 1);
    launched(s.gpu());
    run(*metal, i, i + 1);
    note(lowered.ops[i], launched(s.gpu()));
    for (const plan::Use& use : plan::uses(op))
      if (use.resource == plan::Resource::kv && use.writes())
        compare_cache(scene, use.layer, std::holds_alternative<plan::KvAppend>(op));
    const bool rounds = rounds_terms(plan, op);
    std::set<int64_t> skipped;
    std::vector<double> of_weights;
    const auto* router = std::get_if<plan::NormRouter>(&op);
    if (router != nullptr) {
      if (router->weights != plan::kNoValue)
        of_weights = router_weights_error(plan, *router, *reference, rounds);
      const auto logits = reference->read(router->logits);
      skipped = near_ties(logits, plan.value(router->logits).cols, s.dims().n_experts,
                          sum_error(rounds) * rms(logits));
    }
    const auto* attends = std::get_if<plan::GatedAttention>(&op);
    const double query =
        attends != nullptr && attends->prepares() ? query_rms(s.checkpoint(), attends->layer) : 0;
    // The recurrence in registers has a bound of its own.
    const auto* recurrence = std::get_if<plan::DeltaRule>(&op);
    std::vector<double> of_recurrence;
    if (recurrence != nullptr && recurrence->scan == plan::DeltaScan::in_registers)
      of_recurrence = delta_rule_error(plan, *recurrence, inputs.get(), *reference, s.reference());
    for (const ValueId id : outputs) {
      const plan::Value& value = plan.value(id);
      if (value.rows == plan::RowSpace::matrix) continue;
      const auto expected = reference->read(id), got = metal->read(id);
      ASSERT_EQ(expected.size(), got.size());
      const auto cols = static_cast<size_t>(value.cols);
      size_t n = expected.size();
      if (value.rows == plan::RowSpace::blocks) n = n_blocks_of(*reference, op) * cols;
      double worst = 0, row = 0;
      size_t worst_at = 0;
      for (size_t k = 0; k < n; ++k) {
        if (k % cols == 0) {
          const std::span<const float> values = std::span(expected).subspan(k, cols);
          // silu(gate) * up: what rounding does to one sum is multiplied by the other, for which the row's
          // largest product stands.
          row = std::holds_alternative<plan::ExpertsGateUp>(op) ? largest(values) : rms(values);
          row *= 1 + query;
        }
        if (skipped.contains(static_cast<int64_t>(k / cols)) &&
            value.name.find("router_logits") == std::string::npos)
          continue;
        if (std::isinf(expected[k]) && expected[k] == got[k]) continue;
        const double allowed = value.type == plan::Type::i32 ? 0.5
                               : !of_recurrence.empty()      ? of_recurrence[k]
                               : router != nullptr && id == router->weights
                                   ? of_weights[k] + tolerance(expected[k], row, value.type, false)
                                   : tolerance(expected[k], row, value.type, rounds);
        const double ratio = std::abs(static_cast<double>(expected[k]) - got[k]) / allowed;
        if (!(ratio <= worst)) {
          worst = ratio;
          worst_at = k;
        }
      }
      EXPECT_LE(worst, 1) << value.name << "[" << worst_at / cols << "][" << worst_at % cols << "]: expected "
                          << expected[worst_at] << ", got " << got[worst_at];
      if (!(worst <= 1)) return;
    }
  }
  if (!scene.compares && scene.only == Scene::Only::all) compare_states(scene);
}

// The cache up to the rows that the step appended (behind them the reference has NaN); the reference goes on
// with them as the cache holds them. Values, and keys
// that the op was given (`same_keys`), are quantised from the same numbers: to the same bits.
void OpComparison::compare_cache(const Scene& scene, int layer, bool same_keys) {
  Stage& s = *stage_;
  const int n_new = std::accumulate(scene.rows.begin(), scene.rows.end(), 0);
  const int n_blocks = static_cast<int>((scene.context + 63) / 64);
  for (size_t i = 0; i < scene.rows.size(); ++i)
    for (int b = scene.positions[i] / 64; b <= (scene.positions[i] + scene.rows[i] - 1) / 64; ++b) {
      const int block = cache_block(static_cast<int>(i) * n_blocks + n_blocks - 1 - b);
      const int n_tokens =
          std::min(backend::kKvBlockTokens, scene.positions[i] + scene.rows[i] - b * backend::kKvBlockTokens);
      for (const auto which : {Device::Kv::k, Device::Kv::v}) {
        const auto got = s.metal().read_kv(which, layer, block, n_tokens);
        const auto expected = s.reference().read_kv(which, layer, block, n_tokens);
        const std::string what = fmt::format("layers.{} cache, block {}", layer, block);
        if (s.kv() != plan::KvType::int8) expect_near(expected, got, plan::Type::bf16, what);
        else if (same_keys || which == Device::Kv::v) EXPECT_EQ(expected, got) << what;
        else expect_codes_near(expected, got, int64_t{n_new} * s.dims().kv_width(), what);
        s.reference().write_kv(which, layer, block, n_tokens, got);
      }
    }
}

// What the ops left in the slots that the step wrote.
void OpComparison::compare_states(const Scene& scene) {
  Stage& s = *stage_;
  for (int layer = 0; layer < s.dims().n_layers; ++layer) {
    if (s.dims().mixer(layer) != model::Mixer::delta) continue;
    for (size_t i = 0; i < scene.rows.size(); ++i) {
      const backend::StateSlot slot{static_cast<int>(3 + i)};
      expect_near(s.reference().read_delta_state(slot, layer), s.metal().read_delta_state(slot, layer),
                  plan::Type::f32, fmt::format("layers.{} delta state", layer));
      EXPECT_EQ(s.reference().read_conv_state(slot, layer), s.metal().read_conv_state(slot, layer))
          << "layers." << layer << " conv state";
    }
  }
}

}  // namespace lily::test
