#include "engine/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/backend.h"
#include "base/error.h"
#include "model/checkpoint.h"
#include "plan/plan.h"

namespace lily::engine {
namespace {

using backend::kKvBlockTokens;

// A lot of layers keeps all values of its step: this many rows of four layers take 170 MB at full size.
constexpr int kChunkRows = 256;

plan::ValueId value_named(const plan::Plan& plan, const std::string& name) {
  for (size_t i = 0; i < plan.values.size(); ++i)
    if (plan.values[i].name == name) return static_cast<plan::ValueId>(i);
  LILY_CHECK(false, "no value '{}' in the plan", name);
}

// Some layers with a device of their own.
class Lot {
 public:
  Lot(const model::Checkpoint& part, int first_layer, const RoutingOptions& options, int n_prompt,
      const backend::Progress& progress)
      : dims_(part.dims()),
        first_layer_(first_layer),
        n_prompt_(n_prompt),
        device_(backend::make_device(options.backend, {.threads = options.threads})),
        policy_(device_->policy(dims_)) {
    device_->load(part, progress);
    for (int block = 0; block * kKvBlockTokens < n_prompt; ++block) blocks_.push_back(block);
    device_->reserve(
        {.n_state_slots = 1, .n_kv_blocks = static_cast<int>(blocks_.size()), .max_rows = kChunkRows},
        policy_);
    for (int layer = 0; layer < dims_.n_layers; ++layer)
      counts_.push_back({.layer = first_layer + layer,
                         .loads = std::vector<int64_t>(static_cast<size_t>(dims_.n_experts))});
  }

  // Takes rows of the prompt through the layers. `hidden` [rows, hidden] is what the layer before left, and
  // then what the last one leaves; the first lot begins with the embedding instead.
  void run(std::span<const int32_t> tokens, int position, std::span<float> hidden) {
    const auto n = static_cast<int>(tokens.size());
    if (!program_ || n > program_->plan().shape.rows) compile(n);
    const plan::Plan& plan = program_->plan();
    const std::vector<backend::Segment> segments = {{.n_rows = n,
                                                     .position = position,
                                                     .src = position == 0 ? backend::kNoState : kState,
                                                     .dst = kState}};
    const backend::StepInputs inputs{
        .tokens = tokens, .segments = segments, .block_table = blocks_, .n_tokens = dims_.vocab};
    if (first_layer_ == 0) {
      program_->submit(inputs);
      program_->wait();
    } else {
      program_->write(value_named(plan, "embed"), hidden);
      program_->run_ops(inputs, 1, static_cast<int>(plan.ops.size()));
    }
    for (int layer = 0; layer < dims_.n_layers; ++layer)
      for (const float id : program_->read(value_named(plan, fmt::format("layers.{}.router_ids", layer))))
        ++counts_[static_cast<size_t>(layer)].loads[static_cast<size_t>(id)];
    const std::vector<float> out =
        program_->read(value_named(plan, fmt::format("layers.{}.out", dims_.n_layers - 1)));
    LILY_CHECK(out.size() == hidden.size(), "{} values for {}", out.size(), hidden.size());
    std::copy(out.begin(), out.end(), hidden.begin());
  }

  const std::vector<LayerRouting>& counts() const { return counts_; }

 private:
  static constexpr backend::StateSlot kState{0};

  void compile(int n_rows) {
    program_.reset();
    program_ = device_->compile(plan::forward(dims_,
                                              {.phase = plan::Phase::prefill,
                                               .rows = n_rows,
                                               .outputs = 0,
                                               .context = n_prompt_,
                                               .ending = plan::Ending::none},
                                              policy_, {.keep_values = true}));
    LILY_CHECK(std::holds_alternative<plan::Embed>(program_->plan().ops.front()),
               "the plan begins otherwise");
  }

  const model::Dims dims_;
  const int first_layer_, n_prompt_;
  std::unique_ptr<backend::Device> device_;
  const plan::Policy policy_;
  std::vector<int32_t> blocks_;
  std::vector<LayerRouting> counts_;
  std::unique_ptr<backend::Program> program_;
};

}  // namespace

double LayerRouting::heaviest() const {
  const auto sum = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
  return static_cast<double>(*std::max_element(loads.begin(), loads.end())) *
         static_cast<double>(loads.size()) / sum;
}

double LayerRouting::share_used() const {
  return 1 -
         static_cast<double>(std::count(loads.begin(), loads.end(), 0)) / static_cast<double>(loads.size());
}

std::array<int, kLoadBounds.size() + 1> LayerRouting::histogram() const {
  std::array<int, kLoadBounds.size() + 1> classes{};
  const auto sum = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
  for (const int64_t load : loads) {
    const double relative = static_cast<double>(load) * static_cast<double>(loads.size()) / sum;
    ++classes[static_cast<size_t>(std::lower_bound(kLoadBounds.begin(), kLoadBounds.end(), relative) -
                                  kLoadBounds.begin())];
  }
  return classes;
}

std::vector<LayerRouting> count_routing(const std::filesystem::path& folder, std::span<const int32_t> prompt,
                                        const RoutingOptions& options,
                                        const std::function<bool(int64_t, int64_t)>& progress) {
  LILY_CHECK(!prompt.empty(), "no prompt");
  const model::Dims whole = model::Checkpoint::open(folder).dims();
  const auto n_prompt = static_cast<int>(prompt.size());
  std::vector<float> hidden(prompt.size() * static_cast<size_t>(whole.hidden));
  std::vector<LayerRouting> counts;
  for (int first = 0; first < whole.n_layers; first += whole.attention_interval) {
    const auto report = [&](int64_t, int64_t) { return !progress || progress(first, whole.n_layers); };
    model::Checkpoint part = model::Checkpoint::open(folder);
    part.keep_layers(first, std::min(whole.attention_interval, whole.n_layers - first));
    Lot lot(part, first, options, n_prompt, report);
    for (int at = 0; at < n_prompt; at += kChunkRows) {
      const auto n = static_cast<size_t>(std::min(kChunkRows, n_prompt - at));
      const auto row_floats = static_cast<size_t>(whole.hidden);
      lot.run(prompt.subspan(static_cast<size_t>(at), n), at,
              std::span(hidden).subspan(static_cast<size_t>(at) * row_floats, n * row_floats));
      if (!report(0, 0)) fail(Fault::user, "interrupted");
    }
    counts.insert(counts.end(), lot.counts().begin(), lot.counts().end());
  }
  if (progress) progress(whole.n_layers, whole.n_layers);
  return counts;
}

}  // namespace lily::engine
