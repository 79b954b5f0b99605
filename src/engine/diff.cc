#include "engine/diff.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "engine/tolerance.h"
#include "plan/uses.h"

namespace lily::engine {
namespace {

using backend::Device;
using backend::kKvBlockTokens;
using backend::StateSlot;
using plan::Resource;

constexpr StateSlot kBefore{0}, kAfter{1};

// The gate of an op that ends in the gated norm, whose result is y.
const plan::View* gate_of(const plan::Op& op, plan::ValueId y) {
  return std::visit(plan::overloaded{
                        [&](const plan::DeltaMixer& o) { return o.y == y ? &o.z : nullptr; },
                        [&](const plan::DeltaRuleNorm& o) { return o.y == y ? &o.z : nullptr; },
                        [&](const plan::GatedNorm& o) { return o.y == y ? &o.z : nullptr; },
                        [](const auto&) -> const plan::View* { return nullptr; },
                    },
                    op);
}

// How the delta rule's results respond to its inputs is measured with so many random changes of this relative
// size: one would not do where a head's response has a single direction.
constexpr int kProbes = 8;
constexpr float kProbe = 0x1p-12f;

double share_of(double error, double tolerance) {
  return error == 0 ? 0 : tolerance > 0 ? error / tolerance : std::numeric_limits<double>::infinity();
}

class OpByOp {
 public:
  OpByOp(Device& candidate, Device& reference, const plan::Plan& plan, const backend::StepInputs& inputs)
      : a_(candidate), b_(reference), plan_(plan), inputs_(inputs) {
    precision_ = both(precision_of(candidate.info().backend, plan.policy),
                      precision_of(reference.info().backend, plan.policy));
  }

  DiffReport run(const DiffOptions& options) {
    const std::string& until = options.until;
    const auto program_a = a_.compile(plan_), program_b = b_.compile(plan_);
    program_a->submit(inputs_);
    program_a->wait();
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      if (options.between_ops) options.between_ops();
      const plan::Op& op = plan_.ops[i];
      if (options.compares && !options.compares(op)) continue;
      const std::vector<plan::Use> uses = plan::uses(op);
      for (const plan::Use& use : uses)
        if (use.resource == Resource::value && use.reads()) {
          // In place, the sum has replaced its input: such a plan keeps values apart, so this cannot be.
          LILY_CHECK(!use.writes(), "{} updates a value in place", plan::kind_name(op));
          program_b->write(use.value, program_a->read(use.value));
        }
      response_ = response_of(op, static_cast<int>(i), *program_a, *program_b);
      program_b->run_ops(inputs_, static_cast<int>(i), static_cast<int>(i) + 1);
      ++report_.n_ops;
      of_kind_ = &report_.by_op[plan::kind_name(op)];
      ++of_kind_->n_ops;
      bool last = false;
      for (const plan::Use& use : uses) {
        if (!use.writes()) continue;
        compare(op, use, *program_a, *program_b);
        last = last || (use.resource == Resource::value && plan_.value(use.value).name == until);
      }
      if (last) break;
    }
    return report_;
  }

 private:
  // Root mean square change of each head of a delta mixer's y when q, k and v change by kProbe: [rows,
  // heads]. Where the sum of a head nearly cancels, the norm behind it makes much of roundings.
  std::vector<double> response_of(const plan::Op& op, int index, backend::Program& a, backend::Program& b) {
    const auto* mixer = std::get_if<plan::DeltaMixer>(&op);
    const bool in_place = std::any_of(inputs_.segments.begin(), inputs_.segments.end(),
                                      [](const backend::Segment& s) { return s.src == s.dst; });
    if (mixer == nullptr || in_place) return {};
    b.run_ops(inputs_, index, index + 1);
    const std::vector<float> exact = a.read(mixer->qkv.value), y = b.read(mixer->y);
    const auto stride = static_cast<size_t>(plan_.value(mixer->qkv.value).cols),
               first = static_cast<size_t>(mixer->qkv.first_col),
               width = static_cast<size_t>(plan_.dims.conv_channels());
    std::vector<double> response(y.size() / model::kDeltaHeadDim);
    std::mt19937 random(1);
    for (int probe = 0; probe < kProbes; ++probe) {
      std::vector<float> changed = exact;
      for (size_t row = 0; row < changed.size(); row += stride)
        for (size_t i = row + first; i < row + first + width; ++i)
          changed[i] *= random() & 1u ? 1 + kProbe : 1 - kProbe;
      b.write(mixer->qkv.value, changed);
      b.run_ops(inputs_, index, index + 1);
      const std::vector<float> other = b.read(mixer->y);
      for (size_t i = 0; i < y.size(); ++i) {
        const double change = static_cast<double>(other[i]) - y[i];
        response[i / model::kDeltaHeadDim] += change * change / (model::kDeltaHeadDim * kProbes);
      }
    }
    b.write(mixer->qkv.value, exact);
    for (double& x : response) x = std::sqrt(x);
    return response;
  }

  void compare(const plan::Op& op, const plan::Use& use, backend::Program& a, backend::Program& b) {
    const OpSize size = op_size(plan_, op);
    if (use.resource == Resource::value) {
      const plan::Value& value = plan_.value(use.value);
      if (value.rows == plan::RowSpace::blocks || value.rows == plan::RowSpace::one)
        return;  // a backend's own order
      const std::vector<float> x = a.read(use.value), y = b.read(use.value);
      if (value.type == plan::Type::i32) compare_ids(op, value, x, y, b);
      else if (const plan::View* gate = gate_of(op, use.value))
        compare_gated(op, size, value, x, y, *gate, a);
      else compare_rows(op, size, value.name, value.cols, x, y, near_ties(op, value, b));
    } else if (use.resource == Resource::delta_state || use.resource == Resource::conv_state) {
      for (const backend::Segment& s : inputs_.segments) compare_state(op, size, use, s.dst);
    } else if (use.resource == Resource::kv) {
      for (const backend::Segment& s : inputs_.segments) compare_kv(op, size, s, use.layer);
    }
  }

  // A state is a sum of products k delta^T, so the roundings of an element are those of its row (k) and of
  // its column (delta): where a column stands out of its head, its elements' tolerances do.
  void compare_delta_state(const plan::Op& op, const OpSize& size, const std::string& name,
                           const std::vector<float>& x, const std::vector<float>& y) {
    constexpr size_t kSide = model::kDeltaHeadDim;
    LILY_CHECK(x.size() == y.size(), "states of {} and {} values", x.size(), y.size());
    for (size_t head = 0; head < x.size(); head += kSide * kSide) {
      const std::span<const float> all = std::span(y).subspan(head, kSide * kSide);
      std::vector<double> column(kSide, 0.0);
      for (size_t i = 0; i < all.size(); ++i)
        column[i % kSide] += static_cast<double>(all[i]) * all[i] / kSide;
      const double head_rms = root_mean_square(all);
      for (size_t row = 0; row < kSide; ++row) {
        const double row_rms = root_mean_square(all.subspan(row * kSide, kSide));
        for (size_t col = 0; col < kSide; ++col) {
          const double factor = head_rms > 0 ? std::max(1.0, std::sqrt(column[col]) / head_rms) : 1;
          const size_t i = head + row * kSide + col;
          note(op, name, static_cast<int64_t>(i / kSide), static_cast<int64_t>(col), x[i], y[i],
               op_tolerance(precision_, size, row_rms * factor, y[i]));
        }
      }
    }
  }

  void compare_state(const plan::Op& op, const OpSize& size, const plan::Use& use, StateSlot slot) {
    if (use.resource == Resource::delta_state)
      compare_delta_state(op, size, fmt::format("layers.{}.delta_state", use.layer),
                          a_.read_delta_state(slot, use.layer), b_.read_delta_state(slot, use.layer));
    else
      compare_rows(op, size, fmt::format("layers.{}.conv_state", use.layer), plan_.dims.conv_channels(),
                   a_.read_conv_state(slot, use.layer), b_.read_conv_state(slot, use.layer), {});
  }

  // Then both go on with the candidate's.
  void compare_kv(const plan::Op& op, const OpSize& size, const backend::Segment& s, int layer) {
    const int n_tokens = s.position + s.n_rows;
    OpSize with_kv = size;
    with_kv.dots = true;
    for (const auto& [which, name] : {std::pair{Device::Kv::k, "k"}, std::pair{Device::Kv::v, "v"}}) {
      std::vector<float> x, y;
      for (int first = 0; first < n_tokens; first += kKvBlockTokens) {
        const int block = inputs_.block_table[static_cast<size_t>(s.first_block + first / kKvBlockTokens)];
        const int n = std::min(kKvBlockTokens, n_tokens - first);
        const std::vector<float> part = a_.read_kv(which, layer, block, n),
                                 other = b_.read_kv(which, layer, block, n);
        x.insert(x.end(), part.begin(), part.end());
        y.insert(y.end(), other.begin(), other.end());
        b_.write_kv(which, layer, block, n, part);
      }
      compare_rows(op, with_kv, fmt::format("layers.{}.{}", layer, name), plan_.dims.kv_width(), x, y, {});
    }
  }

  // Rows in which rounding may have chosen other experts: only where the op makes its logits itself.
  std::vector<bool> near_ties(const plan::Op& op, const plan::Value& value, backend::Program& b) const {
    const auto* router = std::get_if<plan::NormRouter>(&op);
    if (router == nullptr || value.cols != model::kExpertsPerToken) return {};
    const std::vector<float> logits = b.read(router->logits);
    const auto cols = static_cast<size_t>(plan_.value(router->logits).cols);
    std::vector<bool> rows;
    for (size_t first = 0; first + cols <= logits.size(); first += cols) {
      std::vector<float> row(logits.begin() + static_cast<std::ptrdiff_t>(first),
                             logits.begin() + static_cast<std::ptrdiff_t>(first + cols - 1));
      std::sort(row.rbegin(), row.rend());
      bool tie = false;  // p8 / p9 - 1 of any two neighbours, since the order counts too
      for (size_t i = 0; i < model::kExpertsPerToken && i + 1 < row.size(); ++i)
        tie = tie || std::expm1(static_cast<double>(row[i]) - row[i + 1]) < kRouterNearTie;
      rows.push_back(tie);
    }
    return rows;
  }

  void compare_ids(const plan::Op& op, const plan::Value& value, const std::vector<float>& x,
                   const std::vector<float>& y, backend::Program& b) {
    const std::vector<bool> skip = near_ties(op, value, b);
    LILY_CHECK(x.size() == y.size(), "{}: {} and {} values", value.name, x.size(), y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / value.cols;
      if (static_cast<size_t>(row) < skip.size() && skip[static_cast<size_t>(row)]) continue;
      note(op, value.name, row, static_cast<int64_t>(i) % value.cols, x[i], y[i], 0.5);
    }
  }

  // The norm leaves every head's values at a root mean square of 1, their roundings with them; then each is
  // multiplied by the SiLU of its gate. So where a gate stands out of its row, the value's roundings do, also
  // where the value itself is small. The same holds for a head that makes more of its inputs' roundings than
  // their size (response_).
  void compare_gated(const plan::Op& op, const OpSize& size, const plan::Value& value,
                     const std::vector<float>& x, const std::vector<float>& y, const plan::View& gate,
                     backend::Program& a) {
    LILY_CHECK(x.size() == y.size(), "{}: {} and {} values", value.name, x.size(), y.size());
    const std::vector<float> z = a.read(gate.value);
    const auto cols = static_cast<size_t>(value.cols), first_col = static_cast<size_t>(gate.first_col),
               stride = static_cast<size_t>(plan_.value(gate.value).cols);
    std::vector<float> silu(cols);
    for (size_t row = 0; row < x.size() / cols; ++row) {
      for (size_t i = 0; i < cols; ++i) {
        const double g = z[row * stride + first_col + i];
        silu[i] = static_cast<float>(g / (1 + std::exp(-g)));
      }
      const double rms = root_mean_square(std::span(y).subspan(row * cols, cols)),
                   silu_rms = root_mean_square(silu);
      double of_head = 1;
      for (size_t i = 0; i < cols; ++i) {
        if (i % model::kDeltaHeadDim == 0 && !response_.empty() && silu_rms > 0) {
          const double gates = root_mean_square(std::span(silu).subspan(i, model::kDeltaHeadDim));
          const double in_size = kProbe * rms * gates / silu_rms;
          const double response = response_[(row * cols + i) / model::kDeltaHeadDim];
          of_head = in_size > 0 ? std::max(1.0, response / in_size) : 1;
        }
        const double factor =
            of_head * (silu_rms > 0 ? std::max(1.0, std::abs(static_cast<double>(silu[i])) / silu_rms) : 1);
        const size_t at = row * cols + i;
        note(op, value.name, static_cast<int64_t>(row), static_cast<int64_t>(i), x[at], y[at],
             op_tolerance(precision_, size, rms * factor, y[at]));
      }
    }
  }

  void compare_rows(const plan::Op& op, const OpSize& size, const std::string& name, int64_t cols,
                    const std::vector<float>& x, const std::vector<float>& y, const std::vector<bool>& skip) {
    LILY_CHECK(x.size() == y.size(), "{}: {} and {} values", name, x.size(), y.size());
    const auto width = static_cast<size_t>(cols);
    for (size_t first = 0; first + width <= x.size(); first += width) {
      if (first / width < skip.size() && skip[first / width]) continue;
      const double rms = root_mean_square(std::span(y).subspan(first, width));
      for (size_t i = first; i < first + width; ++i)
        note(op, name, static_cast<int64_t>(first / width), static_cast<int64_t>(i - first), x[i], y[i],
             op_tolerance(precision_, size, rms, y[i]));
    }
  }

  void note(const plan::Op& op, const std::string& value, int64_t row, int64_t col, float x, float y,
            double tolerance) {
    const double difference = std::abs(static_cast<double>(x) - y);
    const double error = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
    const double share = share_of(error, tolerance);
    OpReport& of_kind = *of_kind_;
    ++report_.n_values;
    ++of_kind.n_values;
    const auto keep = [&](std::optional<Difference>& to) {
      to = {plan::kind_name(op), value, row, col, x, y, error, tolerance};
    };
    if (error > tolerance && !report_.first) keep(report_.first);
    if (error > tolerance && !of_kind.first) keep(of_kind.first);
    if (!report_.worst || share > report_.worst->share()) keep(report_.worst);
    if (!of_kind.worst || share > of_kind.worst->share()) keep(of_kind.worst);
  }

  Device &a_, &b_;
  const plan::Plan& plan_;
  const backend::StepInputs& inputs_;
  Precision precision_;
  DiffReport report_;
  std::vector<double> response_;  // of the op at hand
  OpReport* of_kind_ = nullptr;   // in report_, of the op at hand
};

void copy_sequence(Device& from, Device& to, const model::Dims& dims, int n_tokens,
                   std::span<const int32_t> blocks) {
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    if (dims.mixer(layer) == model::Mixer::delta) {
      to.write_delta_state(kBefore, layer, from.read_delta_state(kBefore, layer));
      to.write_conv_state(kBefore, layer, from.read_conv_state(kBefore, layer));
      continue;
    }
    for (const auto which : {Device::Kv::k, Device::Kv::v})
      for (int first = 0; first < n_tokens; first += kKvBlockTokens) {
        const int block = blocks[static_cast<size_t>(first / kKvBlockTokens)];
        const int n = std::min(kKvBlockTokens, n_tokens - first);
        to.write_kv(which, layer, block, n, from.read_kv(which, layer, block, n));
      }
  }
}

}  // namespace

double Difference::share() const { return share_of(error, tolerance); }

std::string Difference::line() const {
  return fmt::format("{} {}[{}, {}]: {} against {}, apart by {:.3g} where {:.3g} is allowed", op, value, row,
                     col, candidate, reference, error, tolerance);
}

DiffReport diff(Device& candidate, Device& reference, const model::Dims& dims, const plan::Policy& policy,
                std::span<const int32_t> tokens, const DiffOptions& options) {
  const bool decode = options.phase == plan::Phase::decode;
  const auto n = static_cast<int>(tokens.size());
  if (n < (decode ? 2 : 1)) fail(Fault::user, "{} tokens are too few to compare a step", n);
  const int n_before = decode ? n - 1 : 0;
  std::vector<int32_t> blocks;
  for (int32_t b = 0; b * kKvBlockTokens < n; ++b) blocks.push_back(b);
  const backend::MemorySpec memory{
      .n_state_slots = 2, .n_kv_blocks = static_cast<int>(blocks.size()), .n_token_slots = 2, .max_rows = n};
  candidate.reserve(memory, policy);
  reference.reserve(memory, policy);

  const auto plan_of = [&](plan::Phase phase, int rows, plan::Ending ending) {
    return plan::forward(dims,
                         {.phase = phase,
                          .rows = rows,
                          .outputs = ending == plan::Ending::none ? 0 : 1,
                          .context = n,
                          .ending = ending},
                         policy, {.keep_values = true});
  };
  if (decode) {
    const std::vector<backend::Segment> segment = {
        {.n_rows = n_before, .position = 0, .src = backend::kNoState, .dst = kBefore}};
    const auto program = candidate.compile(plan_of(plan::Phase::prefill, n_before, plan::Ending::none));
    program->submit({.tokens = tokens.first(static_cast<size_t>(n_before)),
                     .segments = segment,
                     .block_table = blocks,
                     .n_tokens = dims.vocab});
    program->wait();
    copy_sequence(candidate, reference, dims, n_before, blocks);
  }
  const int n_rows = n - n_before;
  const plan::Plan plan = plan_of(options.phase, n_rows, plan::Ending::logits);
  if (!options.until.empty() && std::none_of(plan.values.begin(), plan.values.end(),
                                             [&](const plan::Value& v) { return v.name == options.until; }))
    fail(Fault::user, "this plan has no value '{}'; lily plan --list shows their names", options.until);
  const std::vector<backend::Segment> segment = {
      {.n_rows = n_rows, .position = n_before, .src = decode ? kBefore : backend::kNoState, .dst = kAfter}};
  const std::vector<int32_t> output_rows = {n_rows - 1};
  const backend::StepInputs inputs{.tokens = tokens.subspan(static_cast<size_t>(n_before)),
                                   .segments = segment,
                                   .block_table = blocks,
                                   .output_rows = output_rows,
                                   .n_tokens = dims.vocab};
  return compare_step(candidate, reference, plan, inputs, options);
}

DiffReport compare_step(Device& candidate, Device& reference, const plan::Plan& plan,
                        const backend::StepInputs& inputs, const DiffOptions& options) {
  return OpByOp(candidate, reference, plan, inputs).run(options);
}

}  // namespace lily::engine
