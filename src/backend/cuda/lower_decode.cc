// The fused ops on the decode kernels.
#include <algorithm>

#include "backend/cuda/kernels/attention_decode.h"
#include "backend/cuda/kernels/delta_decode.h"
#include "backend/cuda/kernels/experts_decode.h"
#include "backend/cuda/kernels/linear_decode.h"
#include "backend/cuda/kernels/simple.h"
#include "backend/cuda/kernels/tokens.h"
#include "backend/cuda/lower.h"
#include "base/error.h"

namespace lily::cuda {
namespace {

using model::Weight;
using model::WeightId;

constexpr int kRows = 8;  // of one launch of linear_q4_decode

const unsigned char* records(const DeviceWeight& w) {
  return reinterpret_cast<const unsigned char*>(w.records);
}

}  // namespace

void linear_rows(const Run& run, const LinearSource& x, const std::vector<WeightId>& weights, plan::ValueId y,
                 int rows) {
  LILY_CHECK(weights.size() <= kMaxPieces, "{} weights in one linear", weights.size());
  LinearDecode p;
  int col = 0;
  for (const WeightId id : weights) {
    const DeviceWeight& w = run.weights.get(id);
    p.pieces[p.n_pieces++] = {records(w), static_cast<int>(w.out), col};
    col += static_cast<int>(w.out);
    p.in = static_cast<int>(w.in);
  }
  p.x_stride = x.stride;
  p.x_f32 = x.f32;
  p.norm = x.norm;
  p.epsilon = model::kNormEpsilon;
  p.y_stride = run.stride(y);
  p.y_f32 = run.is_f32(y);
  if (weights.front().weight == Weight::lm_head) p.n_tokens = run.step.n_tokens();
  for (int first = 0; first < rows; first += kRows) {
    p.rows = std::min(kRows, rows - first);
    p.x = static_cast<const std::byte*>(x.x) + first * x.stride * (x.f32 ? 4 : 2);
    p.y = run.data<std::byte>(y) + first * p.y_stride * (p.y_f32 ? 4 : 2);
    launch_linear_decode(p, run.n_sms, run.stream);
  }
}

void linear_add_rows(const Run& run, const plan::LinearAdd& op) {
  const DeviceWeight& w = run.weights.get(op.weight);
  LinearDecode p;
  p.pieces[0] = {records(w), static_cast<int>(w.out), 0};
  p.n_pieces = 1;
  p.in = static_cast<int>(w.in);
  p.x_stride = run.stride(op.x);
  p.y_stride = w.out;
  for (int first = 0; first < run.step.n_rows(); first += kRows) {
    p.rows = std::min(kRows, run.step.n_rows() - first);
    p.x = run.data<uint16_t>(op.x) + first * p.x_stride;
    p.residual_in = run.data<float>(op.residual_in) + first * p.y_stride;
    p.residual_out = run.data<float>(op.residual_out) + first * p.y_stride;
    launch_linear_decode(p, run.n_sms, run.stream);
  }
}

void delta_rows(const Run& run, const plan::DeltaMixer& op) {
  DeltaDecode p;
  p.qkv = run.bf16(op.qkv);
  p.z = run.bf16(op.z);
  p.b = run.bf16(op.b);
  p.a = run.bf16(op.a);
  p.stride = run.stride(op.qkv.value);
  p.conv = run.weights.get({Weight::conv, op.layer}).bf16;
  p.a_log = run.weights.get({Weight::a_log, op.layer}).vector;
  p.dt_bias = run.weights.get({Weight::dt_bias, op.layer}).vector;
  p.norm = run.weights.get({Weight::delta_norm, op.layer}).vector;
  p.n_key_heads = run.plan.dims.n_key_heads;
  p.epsilon = model::kNormEpsilon;
  p.conv_state = run.memory.conv_state(op.layer);
  p.conv_slot_stride = run.memory.conv_slot_stride();
  p.delta_state = run.memory.delta_state(op.layer);
  p.delta_slot_stride = run.memory.delta_slot_stride();
  p.step = run.step.view();
  p.y = run.data<uint16_t>(op.y);
  if (run.step.one_row_each()) {
    p.rows = run.step.n_rows();
    launch_delta_decode(p, run.stream);
    return;
  }
  // Rows of one sequence follow one another: a launch each.
  p.state_in_flight = true;
  for (int row = 0; row < run.step.n_rows(); ++row) {
    launch_delta_decode(p, run.stream);
    p.qkv += p.stride;
    p.z += p.stride;
    p.b += p.stride;
    p.a += p.stride;
    p.y += run.stride(op.y);
    ++p.step.state_src;
    ++p.step.state_dst;
  }
}

void qk_prepare_rows(const Run& run, const plan::QkPrepare& op) {
  PrepareHeads p;
  p.q_gate = run.bf16(op.q_gate);
  p.k = run.bf16(op.k);
  p.v = run.bf16(op.v);
  p.stride = run.stride(op.q_gate.value);
  p.q_norm = run.weights.get({Weight::q_norm, op.layer}).vector;
  p.k_norm = run.weights.get({Weight::k_norm, op.layer}).vector;
  p.epsilon = model::kNormEpsilon;
  p.n_q_heads = run.plan.dims.n_q_heads;
  p.rows = run.step.n_rows();
  p.cache = run.memory.kv(op.layer);
  p.step = run.step.view();
  p.q = run.data<uint16_t>(op.q);
  launch_prepare_heads(p, run.stream);
}

void attention_rows(const Run& run, const plan::GatedAttention& op, const plan::QkPrepare* prepare) {
  AttentionDecode p;
  p.stride = run.stride(op.gate.value);
  p.prepare = prepare != nullptr;
  p.q_norm = run.weights.get({Weight::q_norm, op.layer}).vector;
  p.k_norm = run.weights.get({Weight::k_norm, op.layer}).vector;
  p.epsilon = model::kNormEpsilon;
  p.n_q_heads = run.plan.dims.n_q_heads;
  p.cache = run.memory.kv(op.layer);
  p.partial = run.extra.attention_partial.get<float>();
  p.counters = run.extra.attention_counters.get<unsigned>();
  const int64_t width = run.plan.dims.q_width();
  for (int first = 0; first < run.step.n_rows(); first += Extra::kAttentionRows) {
    p.rows = std::min(Extra::kAttentionRows, run.step.n_rows() - first);
    p.q_gate = run.bf16(op.gate) + first * p.stride;
    if (prepare != nullptr) {
      p.k = run.bf16(prepare->k) + first * p.stride;
      p.v = run.bf16(prepare->v) + first * p.stride;
    } else {
      p.q = run.data<uint16_t>(op.q) + first * width;
    }
    p.y = run.data<uint16_t>(op.y) + first * width;
    p.step = run.step.view();
    p.step.positions += first;
    p.step.table_first += first;
    p.step.rope += first * 32;
    launch_attention_decode(p, run.stream);
  }
}

void router_rows(const Run& run, const plan::NormRouter& op, bool choose) {
  const DeviceWeight &router = run.weights.get({Weight::router, op.layer}),
                     &gate = run.weights.get({Weight::shared_gate, op.layer});
  RouterDecode p;
  p.x = run.data<float>(op.x);
  p.norm = run.weights.get({Weight::post_norm, op.layer}).vector;
  p.epsilon = model::kNormEpsilon;
  p.hidden = run.plan.dims.hidden;
  p.n_experts = run.plan.dims.n_experts;
  p.rows = run.step.n_rows();
  p.router_codes = reinterpret_cast<const uint8_t*>(router.codes);
  p.router_scales = router.scales;
  p.router_biases = router.biases;
  p.shared_codes = reinterpret_cast<const uint8_t*>(gate.codes);
  p.shared_scales = gate.scales;
  p.shared_biases = gate.biases;
  p.normed = run.data<uint16_t>(op.normed);
  p.logits = run.data<float>(op.logits);
  launch_router_decode(p, run.stream);
  if (choose)
    launch_router_top({p.logits, p.n_experts + 1, p.n_experts, p.rows, run.data<int32_t>(op.ids),
                       run.data<float>(op.weights)},
                      run.stream);
}

void gate_up_rows(const Run& run, const plan::ExpertsGateUp& op, const plan::NormRouter* router) {
  const model::Dims& d = run.plan.dims;
  ExpertsGateUpDecode p;
  p.normed = run.data<uint16_t>(op.x);
  if (router != nullptr) {
    p.logits = run.data<float>(router->logits);
    p.logits_stride = d.n_experts + 1;
    p.weights = run.data<float>(router->weights);
  }
  p.ids = run.data<int32_t>(op.routing.ids);
  p.hidden = d.hidden;
  p.width = d.expert_width;
  p.n_experts = d.n_experts;
  p.rows = run.step.n_rows();
  p.gate = records(run.weights.get({Weight::expert_gate, op.layer}));
  p.up = records(run.weights.get({Weight::expert_up, op.layer}));
  p.act = run.data<uint16_t>(op.y);
  if (op.shared != plan::kNoValue) {
    p.shared_width = d.shared_width;
    p.shared_gate = records(run.weights.get({Weight::shared_gate_proj, op.layer}));
    p.shared_up = records(run.weights.get({Weight::shared_up_proj, op.layer}));
    p.shared_act = run.data<uint16_t>(op.shared);
  }
  launch_experts_gate_up_decode(p, run.n_sms, run.stream);
}

void down_rows(const Run& run, const plan::ExpertsDownCombine& op, const plan::NormRouter* router) {
  const model::Dims& d = run.plan.dims;
  ExpertsDownDecode p;
  p.act = run.data<uint16_t>(op.x);
  if (router != nullptr) {
    p.logits = run.data<float>(router->logits);
    p.logits_stride = d.n_experts + 1;
  }
  p.ids = run.data<int32_t>(op.routing.ids);
  p.weights = run.data<float>(op.weights);
  p.hidden = d.hidden;
  p.width = d.expert_width;
  p.n_experts = d.n_experts;
  p.rows = run.step.n_rows();
  p.down = records(run.weights.get({Weight::expert_down, op.layer}));
  p.shared_act = run.data<uint16_t>(op.shared);
  p.shared_width = d.shared_width;
  p.shared_down = records(run.weights.get({Weight::shared_down_proj, op.layer}));
  p.shared_logit = run.data<float>(op.shared_gate.value) + op.shared_gate.first_col;
  p.shared_logit_stride = run.stride(op.shared_gate.value);
  p.residual_in = run.data<float>(op.residual_in);
  p.residual_out = run.data<float>(op.residual_out);
  launch_experts_down_decode(p, run.stream);
}

namespace {

ChooseToken choice_of(const Run& run, plan::ValueId logits) {
  ChooseToken p;
  p.logits = run.data<float>(logits);
  p.vocab = run.plan.dims.vocab;
  p.outputs = run.step.n_outputs();
  p.step = run.step.view();
  p.chunk_max = run.extra.chunk_max.get<float>();
  p.chunk_id = run.extra.chunk_id.get<int32_t>();
  p.chunk_sum = run.extra.chunk_sum.get<float>();
  p.weights = run.extra.sample_weights.get<uint64_t>();
  return p;
}

}  // namespace

void choose_token(const Run& run, plan::ValueId logits, plan::ValueId token, bool sampled) {
  ChooseToken p = choice_of(run, logits);
  p.choice = sampled ? Choice::sample : Choice::greedy;
  p.token = run.data<int32_t>(token);
  p.reports = run.reports;
  launch_choose_token(p, run.stream);
}

void choose_candidates(const Run& run, const plan::TopCandidates& op) {
  LILY_CHECK(op.n_candidates <= kMaxCandidates, "{} candidates", op.n_candidates);
  ChooseToken p = choice_of(run, op.logits);
  p.choice = Choice::candidates;
  p.n_candidates = op.n_candidates;
  p.ids = run.data<int32_t>(op.ids);
  p.values = run.data<float>(op.values);
  p.logsumexp = run.data<float>(op.logsumexp);
  launch_choose_token(p, run.stream);
}

}  // namespace lily::cuda
