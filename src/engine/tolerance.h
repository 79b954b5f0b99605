// How far two correct computations may be apart: computed from types, lengths and norms (docs/numerics.md,
// "Tolerances"). Shared by `lily diff`, `lily eval` and the golden tests.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "backend/backend.h"
#include "plan/plan.h"

namespace lily::engine {

// Relative roundings of what a backend computes with.
struct Precision {
  double activation = 0;  // one rounding of a value between ops
  double dot_input = 0;   // what a dot product does to its inputs, root mean square over the inputs
  double kv = 0;          // one rounding of a K or V value
  double accumulate = 0;  // one addition
};
Precision precision_of(const std::string& backend, const plan::Policy& policy);
// Of two sides that are compared: errors of independent origin add in quadrature.
Precision both(const Precision& a, const Precision& b);

// Sides of a normal distribution that count as an error: exceeded once in 5e8 values.
inline constexpr double kSigmas = 6;

// One op whose inputs are the same on both sides: `row` is one row of its output, y one value in it.
// |difference| <= (2 * stored + 8 * accumulate) * |y| + kSigmas * sqrt(n_stages) * (dot_input + activation +
// accumulate * sqrt(n_terms)) * rms(row), with stored = activation, or kv where that is coarser and written.
struct OpSize {
  int64_t n_terms = 1;  // of its longest sum
  int n_stages = 1;     // simple ops that it stands for
  bool dots = false;    // has products of activations with weights, or reads KV
  bool writes_kv = false;
};
OpSize op_size(const plan::Plan& plan, const plan::Op& op);
double op_tolerance(const Precision& p, const OpSize& size, double row_rms, double y);

// The whole network: relative distance |a - b| / |b| (Euclidean norms over a row) of hidden states after
// n_layers, both computed from the tokens on. Each layer adds roundings in quadrature; rows in which a
// near-tie of the router went the other way are not covered.
double network_tolerance(const Precision& p, const model::Dims& dims, int n_layers);
// The same for a single logit, given the row's root mean square.
double logit_tolerance(const Precision& p, const model::Dims& dims, double row_rms);

double root_mean_square(std::span<const float> row);

// A router's neighbours in rank, 8 and 9 above all, that are closer than this (relative) may change places
// where the logits are not the same.
inline constexpr double kRouterNearTie = 1e-2;

}  // namespace lily::engine
