#include "engine/tolerance.h"

#include <algorithm>
#include <cmath>

#include "plan/uses.h"

namespace lily::engine {
namespace {

// Typical relative error of one rounding; the largest is twice that (bf16 keeps 8 significant bits: 2^-8).
constexpr double kF32 = 0x1p-24, kBf16 = 0x1p-9, kF64 = 0x1p-53;
// exp, sine and what follows them in fp32 are good to this many roundings.
constexpr double kElementaryRoundings = 8;

// Two int8 planes with a scale for each group of 64: an error of at most 2^-16 of the group's largest value,
// which is at most sqrt(64) times its root mean square; uniform over its range.
const double kTwoPlanes = 0x1p-16 * 8 / std::sqrt(3.0);

// One plane, or codes of 8 bits: half a step of 1/127 of that value.
const double kOneByte = 8 / (2 * 127 * std::sqrt(3.0));

// Roundings of a layer: two norms, the mixer's four values, attention or state, router, expert middle,
// output, twice the residual.
constexpr int kActivationsPerLayer = 12;
// Dots of a layer, one behind the other: mixer in and out, gate-up and down.
constexpr int kDotsPerLayer = 4;

double type_of(plan::FloatType type) { return type == plan::FloatType::bf16 ? kBf16 : kF32; }

double type_of(plan::KvType type) {
  switch (type) {
    case plan::KvType::f32:
      return kF32;
    case plan::KvType::bf16:
      return kBf16;
    case plan::KvType::int8:
      break;
  }
  return kOneByte;
}

double square(double x) { return x * x; }

}  // namespace

Precision precision_of(const std::string& backend, const plan::Policy& policy) {
  if (backend == "reference")
    return {.activation = kF32,
            .dot_input = 0,
            .kv = policy.kv == plan::KvType::int8 ? kOneByte : kF32,
            .accumulate = kF64};
  if (backend.starts_with("cpu"))
    return {.activation = type_of(policy.activation),
            .dot_input = policy.activation_planes == 1 ? kOneByte : kTwoPlanes,
            .kv = type_of(policy.kv),
            .accumulate = kF32};
  // Weights are rounded to bf16 on their way into a matrix unit.
  return {.activation = type_of(policy.activation),
          .dot_input = kBf16,
          .kv = type_of(policy.kv),
          .accumulate = kF32};
}

Precision both(const Precision& a, const Precision& b) {
  return {.activation = std::hypot(a.activation, b.activation),
          .dot_input = std::hypot(a.dot_input, b.dot_input),
          .kv = std::hypot(a.kv, b.kv),
          .accumulate = std::hypot(a.accumulate, b.accumulate)};
}

OpSize op_size(const plan::Plan& plan, const plan::Op& op) {
  const model::Dims& d = plan.dims;
  plan::Plan one{.dims = plan.dims, .shape = plan.shape, .policy = plan.policy, .options = plan.options};
  one.values = plan.values;
  one.ops = {op};
  OpSize size{.n_stages = std::max(1, static_cast<int>(plan::expanded(one).ops.size()))};
  for (const plan::Use& use : plan::uses(op)) {
    if (use.resource == plan::Resource::weight) {
      const auto shape = model::weight_spec(d, use.weight).shape;
      size.n_terms = std::max(size.n_terms, shape.back());
      size.dots = size.dots || model::weight_spec(d, use.weight).quantisable;
    }
    if (use.resource == plan::Resource::kv) {
      size.n_terms = std::max(size.n_terms, plan.shape.context);
      size.dots = true;
      size.writes_kv = size.writes_kv || use.writes();
    }
    // Every row goes through the state of those before it.
    if (use.resource == plan::Resource::delta_state)
      size.n_terms = std::max<int64_t>(size.n_terms, int64_t{model::kDeltaHeadDim} * plan.shape.rows);
  }
  return size;
}

double op_tolerance(const Precision& p, const OpSize& size, double row_rms, double y) {
  const double dots = size.dots ? std::hypot(p.dot_input, p.kv) : 0;
  const double each = dots + p.activation + p.accumulate * std::sqrt(static_cast<double>(size.n_terms));
  const double stored = 2 * std::max(p.activation, size.writes_kv ? p.kv : 0.0);
  return (stored + kElementaryRoundings * p.accumulate) * std::abs(y) +
         kSigmas * std::sqrt(static_cast<double>(size.n_stages)) * each * row_rms;
}

double network_tolerance(const Precision& p, const model::Dims& dims, int n_layers) {
  const double n_terms = std::max({dims.hidden, dims.q_width(), dims.value_width()});
  const double layer = kActivationsPerLayer * square(p.activation) + kDotsPerLayer * square(p.dot_input) +
                       2 * square(p.kv) + kDotsPerLayer * n_terms * square(p.accumulate);
  return kSigmas * std::sqrt((n_layers + 1) * layer);
}

double logit_tolerance(const Precision& p, const model::Dims& dims, double row_rms) {
  return network_tolerance(p, dims, dims.n_layers) * row_rms;
}

double root_mean_square(std::span<const float> row) {
  double sum = 0;
  for (const float x : row) sum += square(x);
  return row.empty() ? 0 : std::sqrt(sum / static_cast<double>(row.size()));
}

}  // namespace lily::engine
