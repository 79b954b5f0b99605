// Gated DeltaNet between its projections: units are (sequence, head) or (sequence, some channels).
#include <algorithm>
#include <cmath>

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/delta_rule.h"
#include "backend/cpu/kernels/norm.h"
#include "backend/cpu/kernels/short_conv.h"
#include "backend/cpu/lower_parts.h"

namespace lily::backend::cpu {
namespace {

using backend::Segment;
using model::kDeltaHeadDim;
using model::kValueHeadsPerKey;
using model::Weight;

constexpr float kQueryScale = 0.08838834764831845f;  // 128^-0.5
constexpr int64_t kConvChunk = 128;                  // channels of a unit

const float* state_in(const Step& step, const Segment& s,
                      float* (Memory::*state)(backend::StateSlot, int) const, int layer) {
  return s.src == backend::kNoState ? nullptr : (step.memory().*state)(s.src, layer);
}

// Convolution of a segment's rows; y's column 0 is channel 0.
ConvArgs conv_args(const Step& step, const Segment& s, int layer, const float* w, const plan::View& x,
                   float* y, int64_t y_stride) {
  return {.x = step.data(x) + s.first_row * step.stride(x),
          .x_stride = step.stride(x),
          .y = y,
          .y_stride = y_stride,
          .n_rows = s.n_rows,
          .channels = step.plan().dims.conv_channels(),
          .w = w,
          .state_in = state_in(step, s, &Memory::conv_state, layer),
          .state_out = step.memory().conv_state(s.dst, layer)};
}

// (18) of one value head and row.
struct GateWeights {
  const float* a_log;
  const float* dt_bias;
  GateWeights(const LowerContext& c, int layer)
      : a_log(c.weights.vector({Weight::a_log, layer}).data()),
        dt_bias(c.weights.vector({Weight::dt_bias, layer}).data()) {}
  float g(int64_t head, float a) const { return log_decay(a_log[head], a, dt_bias[head]); }
};

void run_rule(plan::DeltaScan scan, const DeltaArgs& args) {
  if (scan == plan::DeltaScan::in_blocks) delta_rule_blocks(args);
  else delta_rule_scan(args);
}

void set_states(DeltaArgs& args, const Step& step, const Segment& s, int layer, int64_t head) {
  constexpr int64_t kState = int64_t{kDeltaHeadDim} * kDeltaHeadDim;
  args.state_in = state_in(step, s, &Memory::delta_state, layer);
  if (args.state_in != nullptr) args.state_in += head * kState;
  args.state_out = step.memory().delta_state(s.dst, layer) + head * kState;
}

// The rule of one value head over a segment's rows; o may have any columns.
template <typename Op>
DeltaArgs rule_args(const Step& step, const Op& o, const Segment& s, int64_t head, plan::ValueId out) {
  const int64_t row = s.first_row, key = head / kValueHeadsPerKey * kDeltaHeadDim;
  DeltaArgs args{.q = step.data(o.q) + row * step.stride(o.q) + key,
                 .k = step.data(o.k) + row * step.stride(o.k) + key,
                 .qk_stride = step.stride(o.q),
                 .v = step.data(o.v) + row * step.stride(o.v) + head * kDeltaHeadDim,
                 .v_stride = step.stride(o.v),
                 .g = step.data(o.g) + row * step.stride(o.g) + head,
                 .beta = step.data(o.beta) + row * step.stride(o.beta) + head,
                 .gate_stride = step.stride(o.g),
                 .o = step.data(out) + row * step.stride(out) + head * kDeltaHeadDim,
                 .o_stride = step.stride(out),
                 .n_rows = s.n_rows};
  set_states(args, step, s, o.layer, head);
  return args;
}

void norm_head(const Step& step, const float* w, const Segment& s, int64_t head, plan::ValueId o,
               const plan::View& z, plan::ValueId y) {
  for (int64_t row = s.first_row; row < s.first_row + s.n_rows; ++row) {
    const int64_t at = head * kDeltaHeadDim;
    gated_norm(step.data(o) + row * step.stride(o) + at, w, step.data(z) + row * step.stride(z) + at,
               step.data(y) + row * step.stride(y) + at, kDeltaHeadDim);
  }
}

}  // namespace

Lowered lower_op(const plan::ShortConv& o, const LowerContext& c) {
  Lowered op;
  const float* w = c.weights.vector({Weight::conv, o.layer}).data();
  const int64_t channels = c.dims().conv_channels();
  const int64_t chunks = (channels + kConvChunk - 1) / kConvChunk;
  op.phases.push_back({[=](const Step& step) { return step.n_segments() * chunks; },
                       [=](const Step& step, Worker&, int64_t unit) {
                         const Segment& s = step.segment(unit / chunks);
                         const int64_t begin = unit % chunks * kConvChunk;
                         float* y = step.data(o.y) + s.first_row * step.stride(o.y);
                         short_conv(conv_args(step, s, o.layer, w, o.x, y, step.stride(o.y)), begin,
                                    std::min(begin + kConvChunk, channels));
                       },
                       {}});
  return op;
}

Lowered lower_op(const plan::DeltaPrepare& o, const LowerContext& c) {
  Lowered op;
  const GateWeights gates(c, o.layer);
  const int64_t n_key_heads = c.dims().n_key_heads, n_value_heads = c.dims().n_value_heads;
  add_row_phase(op, o.q, [=](const Step& step, Worker&, int64_t row) {
    for (int64_t head = 0; head < n_key_heads; ++head) {
      const int64_t at = head * kDeltaHeadDim;
      l2_norm(step.data(o.q_in) + row * step.stride(o.q_in) + at, kQueryScale,
              step.data(o.q) + row * step.stride(o.q) + at, kDeltaHeadDim);
      l2_norm(step.data(o.k_in) + row * step.stride(o.k_in) + at, 1.0f,
              step.data(o.k) + row * step.stride(o.k) + at, kDeltaHeadDim);
    }
    const float* a = step.data(o.a) + row * step.stride(o.a);
    const float* b = step.data(o.b) + row * step.stride(o.b);
    for (int64_t head = 0; head < n_value_heads; ++head) {
      step.data(o.g)[row * step.stride(o.g) + head] = gates.g(head, a[head]);
      step.data(o.beta)[row * step.stride(o.beta) + head] = sigmoid(b[head]);
    }
  });
  return op;
}

Lowered lower_op(const plan::DeltaRule& o, const LowerContext& c) {
  Lowered op;
  const int64_t heads = c.dims().n_value_heads;
  op.phases.push_back({[=](const Step& step) { return step.n_segments() * heads; },
                       [=](const Step& step, Worker&, int64_t unit) {
                         run_rule(o.scan, rule_args(step, o, step.segment(unit / heads), unit % heads, o.o));
                       },
                       {}});
  return op;
}

Lowered lower_op(const plan::GatedNorm& o, const LowerContext& c) {
  Lowered op;
  const float* w = c.weights.vector({Weight::delta_norm, o.layer}).data();
  const int64_t heads = c.dims().n_value_heads;
  add_row_phase(op, o.y, [=](const Step& step, Worker&, int64_t row) {
    const Segment one{.first_row = static_cast<int32_t>(row), .n_rows = 1};
    for (int64_t head = 0; head < heads; ++head) norm_head(step, w, one, head, o.o, o.z, o.y);
  });
  return op;
}

Lowered lower_op(const plan::DeltaRuleNorm& o, const LowerContext& c) {
  Lowered op;
  const float* w = c.weights.vector({Weight::delta_norm, o.layer}).data();
  const int64_t heads = c.dims().n_value_heads;
  op.phases.push_back({[=](const Step& step) { return step.n_segments() * heads; },
                       [=](const Step& step, Worker&, int64_t unit) {
                         const Segment& s = step.segment(unit / heads);
                         const int64_t head = unit % heads;
                         // The rule's output stands where its normalised form will.
                         run_rule(o.scan, rule_args(step, o, s, head, o.y));
                         norm_head(step, w, s, head, o.y, o.z, o.y);
                       },
                       {}});
  return op;
}

// A unit has one key head, its query, and its two value heads: all channels that depend on one another.
Lowered lower_op(const plan::DeltaMixer& o, const LowerContext& c) {
  Lowered op;
  const float* conv_w = c.weights.vector({Weight::conv, o.layer}).data();
  const float* norm_w = c.weights.vector({Weight::delta_norm, o.layer}).data();
  const GateWeights gates(c, o.layer);
  const int64_t key_heads = c.dims().n_key_heads, keys = c.dims().key_width();
  constexpr int64_t kWidth = (2 + kValueHeadsPerKey) * kDeltaHeadDim;  // of the convolved columns: q, k, v, v
  const int64_t rows = c.plan.shape.rows;
  const int64_t mixed_at = reserve_worker(op, rows * kWidth * 4);
  const int64_t gates_at = reserve_worker(op, 2 * rows * 4);
  op.phases.push_back(
      {[=](const Step& step) { return step.n_segments() * key_heads; },
       [=](const Step& step, Worker& worker, int64_t unit) {
         const Segment& s = step.segment(unit / key_heads);
         const int64_t key_head = unit % key_heads;
         auto* mixed = reinterpret_cast<float*>(worker.scratch + mixed_at);
         auto* g = reinterpret_cast<float*>(worker.scratch + gates_at);
         float* beta = g + rows;
         const auto convolve = [&](int64_t first, int64_t n, int64_t column) {
           short_conv(conv_args(step, s, o.layer, conv_w, o.qkv, mixed + column - first, kWidth), first,
                      first + n);
         };
         convolve(key_head * kDeltaHeadDim, kDeltaHeadDim, 0);
         convolve(keys + key_head * kDeltaHeadDim, kDeltaHeadDim, kDeltaHeadDim);
         convolve(2 * keys + key_head * kValueHeadsPerKey * kDeltaHeadDim, kValueHeadsPerKey * kDeltaHeadDim,
                  2 * kDeltaHeadDim);
         for (int64_t t = 0; t < s.n_rows; ++t) {
           float* row = mixed + t * kWidth;
           l2_norm(row, kQueryScale, row, kDeltaHeadDim);
           l2_norm(row + kDeltaHeadDim, 1.0f, row + kDeltaHeadDim, kDeltaHeadDim);
         }
         for (int64_t i = 0; i < kValueHeadsPerKey; ++i) {
           const int64_t head = key_head * kValueHeadsPerKey + i;
           for (int64_t t = 0; t < s.n_rows; ++t) {
             const int64_t row = s.first_row + t;
             g[t] = gates.g(head, step.data(o.a)[row * step.stride(o.a) + head]);
             beta[t] = sigmoid(step.data(o.b)[row * step.stride(o.b) + head]);
           }
           DeltaArgs args{.q = mixed,
                          .k = mixed + kDeltaHeadDim,
                          .qk_stride = kWidth,
                          .v = mixed + (2 + i) * kDeltaHeadDim,
                          .v_stride = kWidth,
                          .g = g,
                          .beta = beta,
                          .gate_stride = 1,
                          .o = step.data(o.y) + s.first_row * step.stride(o.y) + head * kDeltaHeadDim,
                          .o_stride = step.stride(o.y),
                          .n_rows = s.n_rows};
           set_states(args, step, s, o.layer, head);
           run_rule(o.scan, args);
           norm_head(step, norm_w, s, head, o.y, o.z, o.y);
         }
       },
       {}});
  return op;
}

}  // namespace lily::backend::cpu
