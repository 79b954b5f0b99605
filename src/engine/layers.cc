#include "engine/layers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/file.h"
#include "engine/tolerance.h"
#include "model/safetensors.h"

namespace lily::engine {
namespace {

using backend::Device;
using backend::kKvBlockTokens;
using backend::StateSlot;

constexpr StateSlot kState{0};

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<float> data;  // I32 tensors are converted; their values are small
  int64_t cols() const { return shape.empty() ? 1 : shape.back(); }
};

class Checker {
 public:
  Checker(Device& device, const model::Dims& dims, const plan::Policy& policy,
          const std::filesystem::path& path)
      : device_(device),
        dims_(dims),
        policy_(policy),
        // The goldens are fp32 throughout.
        precision_(both(precision_of(device.info().backend, policy),
                        {.activation = 0x1p-24, .kv = 0x1p-24, .accumulate = 0x1p-24})),
        file_(path.string()) {
    const File file = File::open(path);
    const model::SafetensorsHeader header = model::read_safetensors_header(file);
    for (const model::TensorEntry& entry : header.tensors) {
      if (entry.dtype != model::Dtype::f32 && entry.dtype != model::Dtype::i32)
        fail(Fault::model, "{}: {} is {}; golden tensors are F32 or I32", file_, entry.name,
             entry.dtype_name);
      Tensor tensor{.shape = entry.shape,
                    .data = std::vector<float>(static_cast<size_t>(entry.n_bytes() / 4))};
      file.read_at(header.data_start + entry.begin, std::as_writable_bytes(std::span(tensor.data)));
      if (entry.dtype == model::Dtype::i32)
        for (float& x : tensor.data) x = static_cast<float>(std::bit_cast<int32_t>(x));
      tensors_.emplace(entry.name, std::move(tensor));
    }
  }

  std::vector<LayerCheck> run() {
    const std::vector<int32_t> tokens = ids("ids"), next = ids("decode.token");
    if (next.size() != 1)
      fail(Fault::model, "{}: decode.token has {} values; it is one token", file_, next.size());
    if (tokens.size() >= static_cast<size_t>(dims_.max_positions))
      fail(Fault::model, "{}: ids has {} tokens and the model {} positions", file_, tokens.size(),
           dims_.max_positions);
    const auto n = static_cast<int>(tokens.size());
    check_sizes("", n, n);
    check_sizes("decode.", 1, n + 1);
    for (int32_t b = 0; b * kKvBlockTokens <= n; ++b) blocks_.push_back(b);
    device_.reserve({.n_state_slots = 1, .n_kv_blocks = static_cast<int>(blocks_.size()), .max_rows = n},
                    policy_);
    step("", plan::Phase::prefill, tokens, 0);
    step("decode.", plan::Phase::decode, next, n);
    return checks_;
  }

 private:
  const Tensor& golden(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail(Fault::model, "{}: no tensor '{}'", file_, name);
    return found->second;
  }

  std::vector<int32_t> ids(const std::string& name) const {
    std::vector<int32_t> ids;
    for (const float id : golden(name).data) {
      if (!(id >= 0 && id < static_cast<float>(dims_.vocab)) || id != std::floor(id))
        fail(Fault::model, "{}: {}[{}] is {}; ids are whole numbers from 0 to {}", file_, name, ids.size(),
             id, dims_.vocab - 1);
      ids.push_back(static_cast<int32_t>(id));
    }
    if (ids.empty()) fail(Fault::model, "{}: {} is empty", file_, name);
    return ids;
  }

  // Of what every step compares, before the first one runs. The other tensors are compared if the policy
  // keeps their values; compare() knows those.
  void check_sizes(const std::string& prefix, int n_rows, int n_tokens) const {
    const auto expect = [&](const std::string& name, int64_t n) {
      const Tensor& tensor = golden(name);
      if (static_cast<int64_t>(tensor.data.size()) != n)
        fail(Fault::model, "{}: {} has {} values, the model's has {}; are these goldens of this model?",
             file_, name, tensor.data.size(), n);
    };
    for (int layer = 0; layer < dims_.n_layers; ++layer) {
      const std::string name = fmt::format("{}layer.{}.", prefix, layer);
      expect(name + "router_logits", int64_t{n_rows} * dims_.n_experts);
      expect(name + "router_ids", int64_t{n_rows} * model::kExpertsPerToken);
      if (dims_.mixer(layer) == model::Mixer::delta) {
        expect(name + "recurrent_state",
               int64_t{dims_.n_value_heads} * model::kDeltaHeadDim * model::kDeltaHeadDim);
        expect(name + "conv_state", int64_t{dims_.conv_channels()} * 4);
        continue;
      }
      for (const char* const cache : {"k_cache", "v_cache"})
        expect(name + cache, int64_t{n_tokens} * dims_.n_kv_heads * model::kHeadDim);
    }
  }

  void step(const std::string& prefix, plan::Phase phase, const std::vector<int32_t>& tokens, int position) {
    const auto n = static_cast<int>(tokens.size());
    const auto program = device_.compile(plan::forward(
        dims_,
        {.phase = phase, .rows = n, .outputs = n, .context = position + n, .ending = plan::Ending::logits},
        policy_, {.keep_values = true}));
    const std::vector<backend::Segment> segments = {{.n_rows = n,
                                                     .position = position,
                                                     .src = position == 0 ? backend::kNoState : kState,
                                                     .dst = kState}};
    std::vector<int32_t> output_rows(static_cast<size_t>(n));
    std::iota(output_rows.begin(), output_rows.end(), 0);
    program->submit({.tokens = tokens,
                     .segments = segments,
                     .block_table = blocks_,
                     .output_rows = output_rows,
                     .n_tokens = dims_.vocab});
    program->wait();

    skip_.assign(static_cast<size_t>(n), false);
    const auto compare_value = [&](const std::string& ours, const std::string& theirs, int n_layers) {
      const auto value = find(program->plan(), ours);
      if (value) compare_rows(prefix + theirs, program->read(*value), n_layers);
    };
    compare_value("embed", "embed", 0);
    for (int layer = 0; layer < dims_.n_layers; ++layer) {
      const std::string ours = fmt::format("layers.{}.", layer), theirs = fmt::format("layer.{}.", layer);
      for (const char* name : {"input_norm", "mixer_out"})
        compare_value(ours + name, theirs + name, name[0] == 'i' ? layer : layer + 1);
      compare_value(ours + "post_norm", theirs + "post_norm", layer + 1);
      router(*program, prefix, layer);
      compare_value(ours + "router_weights", theirs + "router_weights", layer + 1);
      compare_value(ours + "out", theirs + "out", layer + 1);
      states(prefix, layer, position + n);
    }
    compare_value("final_norm", "final_norm", dims_.n_layers);
    compare_value("logits", "logits", dims_.n_layers);
  }

  static std::optional<plan::ValueId> find(const plan::Plan& plan, const std::string& name) {
    for (size_t v = 0; v < plan.values.size(); ++v)
      if (plan.values[v].name == name) return plan::ValueId{static_cast<int32_t>(v)};
    return std::nullopt;
  }

  // Logits; then ids, which have to be the golden ones but for near-ties. A row that went the other way is
  // left out from here on: it has read other experts.
  void router(backend::Program& program, const std::string& prefix, int layer) {
    const std::string name = fmt::format("{}layer.{}.", prefix, layer);
    const Tensor& expected = golden(name + "router_logits");
    const auto ids = program.read(find(program.plan(), fmt::format("layers.{}.router_ids", layer)).value());
    const auto with_gate =
        program.read(find(program.plan(), fmt::format("layers.{}.router_logits", layer)).value());
    const auto cols = static_cast<size_t>(dims_.n_experts), stride = cols + 1;
    std::vector<float> logits;
    for (size_t row = 0; row < skip_.size(); ++row)
      logits.insert(logits.end(), with_gate.begin() + static_cast<std::ptrdiff_t>(row * stride),
                    with_gate.begin() + static_cast<std::ptrdiff_t>(row * stride + cols));
    compare_rows(name + "router_logits", logits, layer + 1);

    const Tensor& expected_ids = golden(name + "router_ids");
    constexpr auto kTop = static_cast<size_t>(model::kExpertsPerToken);
    LayerCheck check{.name = name + "router_ids", .tolerance = 0};
    for (size_t row = 0; row < skip_.size(); ++row) {
      ++check.n_rows;
      const auto first = static_cast<std::ptrdiff_t>(row * kTop);
      const auto differs =
          std::mismatch(ids.begin() + first, ids.begin() + first + static_cast<std::ptrdiff_t>(kTop),
                        expected_ids.data.begin() + first);
      if (skip_[row] || differs.first == ids.begin() + first + static_cast<std::ptrdiff_t>(kTop)) {
        check.n_rows_skipped += skip_[row];
        continue;
      }
      // The smallest step between neighbours of the order, the ninth included.
      std::vector<float> order(expected.data.begin() + static_cast<std::ptrdiff_t>(row * cols),
                               expected.data.begin() + static_cast<std::ptrdiff_t>((row + 1) * cols));
      const double rms = root_mean_square(order);
      std::sort(order.rbegin(), order.rend());
      double gap = std::numeric_limits<double>::infinity();
      for (size_t i = 0; i < kTop && i + 1 < order.size(); ++i)
        gap = std::min(gap, std::expm1(static_cast<double>(order[i]) - order[i + 1]));
      if (gap < std::max(kRouterNearTie, 2 * network_tolerance(precision_, dims_, layer + 1) * rms)) {
        skip_[row] = true;
        ++check.n_rows_skipped;
        continue;
      }
      const auto col = differs.first - (ids.begin() + first);
      check.error = 1;
      check.row = static_cast<int64_t>(row);
      check.col = col;
      check.found = *differs.first;
      check.expected = *differs.second;
    }
    checks_.push_back(check);
  }

  void states(const std::string& prefix, int layer, int n_tokens) {
    const std::string name = fmt::format("{}layer.{}.", prefix, layer);
    if (dims_.mixer(layer) == model::Mixer::delta) {
      compare_whole(name + "recurrent_state", device_.read_delta_state(kState, layer), layer + 1);
      // Golden: [channel][4 last inputs]; ours: [3 last rows][channel].
      const std::vector<float> rows = device_.read_conv_state(kState, layer);
      const Tensor& expected = golden(name + "conv_state");
      const auto channels = static_cast<size_t>(dims_.conv_channels());
      std::vector<float> transposed = expected.data;
      for (size_t ch = 0; ch < channels; ++ch)
        for (size_t r = 0; r < 3; ++r) transposed[ch * 4 + r + 1] = rows[r * channels + ch];
      compare_whole(name + "conv_state", transposed, layer + 1);
      return;
    }
    const auto heads = static_cast<size_t>(dims_.n_kv_heads), width = static_cast<size_t>(model::kHeadDim);
    for (const auto& [which, cache] :
         {std::pair{Device::Kv::k, "k_cache"}, std::pair{Device::Kv::v, "v_cache"}}) {
      std::vector<float> found(static_cast<size_t>(n_tokens) * heads * width);  // [head][position][256]
      for (int first = 0; first < n_tokens; first += kKvBlockTokens) {
        const int n = std::min(kKvBlockTokens, n_tokens - first);
        const auto part =
            device_.read_kv(which, layer, blocks_[static_cast<size_t>(first / kKvBlockTokens)], n);
        for (size_t t = 0; t < static_cast<size_t>(n); ++t)
          for (size_t h = 0; h < heads; ++h)
            std::copy_n(part.begin() + static_cast<std::ptrdiff_t>((t * heads + h) * width), width,
                        found.begin() + static_cast<std::ptrdiff_t>((h * static_cast<size_t>(n_tokens) +
                                                                     static_cast<size_t>(first) + t) *
                                                                    width));
      }
      compare_whole(name + cache, found, layer + 1);
    }
  }

  // Row by row; a row is a token.
  void compare_rows(const std::string& name, const std::vector<float>& found, int n_layers) {
    const Tensor& expected = golden(name);
    compare(name, found, expected.data, expected.cols(), n_layers, skip_);
  }
  // As one row: tokens are mixed in it, so it says nothing once a row has gone another way.
  void compare_whole(const std::string& name, const std::vector<float>& found, int n_layers) {
    const Tensor& expected = golden(name);
    if (std::find(skip_.begin(), skip_.end(), true) != skip_.end()) return;
    compare(name, found, expected.data, static_cast<int64_t>(expected.data.size()), n_layers, {});
  }

  void compare(const std::string& name, const std::vector<float>& found, const std::vector<float>& expected,
               int64_t cols, int n_layers, const std::vector<bool>& skip) {
    if (found.size() != expected.size())
      fail(Fault::model, "{}: {} has {} values, the model's has {}; are these goldens of this model?", file_,
           name, expected.size(), found.size());
    LayerCheck check{.name = name, .tolerance = network_tolerance(precision_, dims_, n_layers)};
    double largest = -1;
    const auto width = static_cast<size_t>(cols);
    for (size_t first = 0; first + width <= expected.size(); first += width) {
      ++check.n_rows;
      if (first / width < skip.size() && skip[first / width]) {
        ++check.n_rows_skipped;
        continue;
      }
      double difference = 0, norm = 0;
      for (size_t i = first; i < first + width; ++i) {
        const double d = std::abs(static_cast<double>(found[i]) - expected[i]);
        difference += d * d;
        norm += static_cast<double>(expected[i]) * expected[i];
        if (d <= largest) continue;
        largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
        check.row = static_cast<int64_t>(first / width);
        check.col = static_cast<int64_t>(i - first);
        check.found = found[i];
        check.expected = expected[i];
      }
      const double error = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
      check.error =
          std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(check.error, error);
      if (std::isinf(check.error)) break;
    }
    checks_.push_back(check);
  }

  Device& device_;
  const model::Dims& dims_;
  const plan::Policy& policy_;
  const Precision precision_;
  const std::string file_;
  std::map<std::string, Tensor> tensors_;
  std::vector<int32_t> blocks_;
  std::vector<bool> skip_;  // rows of the step
  std::vector<LayerCheck> checks_;
};

}  // namespace

std::string LayerCheck::line() const {
  return fmt::format(
      "{}: relative error {:.3g} where {:.3g} is allowed; largest difference at [{}, {}]: {} against {}",
      name, error, tolerance, row, col, found, expected);
}

std::vector<LayerCheck> check_layers(Device& device, const model::Dims& dims, const plan::Policy& policy,
                                     const std::filesystem::path& file) {
  return Checker(device, dims, policy, file).run();
}

}  // namespace lily::engine
