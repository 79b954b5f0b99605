// What ablations run instead of the kernels of lower_decode.cc and lower_prefill.cc (docs/architecture.md,
// "Mechanisms"), and the simple ops one by one.
#include <algorithm>
#include <numeric>

#include "backend/cuda/kernels/attention_ablation.h"
#include "backend/cuda/kernels/unfused_ablation.h"
#include "backend/cuda/lower.h"
#include "backend/cuda/prefill_linear.h"
#include "backend/cuda/prefill_routing.h"
#include "base/error.h"

namespace lily::cuda {
namespace {

using model::Weight;

// What group_on_host reads and writes, in pinned memory.
struct HostGroups {
  int32_t* chosen;       // [rows, 8]
  float* chosen_weight;  // [rows, 8]
  float* shared_weight;  // [rows]
  int32_t *token_of_row, *row_of_choice, *n_tiles;
  float* row_weight;
  ExpertTile* tiles;
  size_t n_bytes = 0;

  HostGroups(std::byte* base, int n_rows, int n_tiles_bound) {
    const auto rows = static_cast<size_t>(n_rows);
    const auto place = [&](auto*& p, size_t n) {
      using T = std::remove_reference_t<decltype(*p)>;
      p = reinterpret_cast<T*>(base + n_bytes);
      n_bytes += (n * sizeof(T) + 63) / 64 * 64;
    };
    place(chosen, 8 * rows);
    place(chosen_weight, 8 * rows);
    place(shared_weight, rows);
    place(token_of_row, 9 * rows);
    place(row_of_choice, 8 * rows);
    place(n_tiles, 1);
    place(row_weight, 9 * rows);
    place(tiles, static_cast<size_t>(n_tiles_bound));
  }
};

template <typename T>
void copy(T* to, const T* from, int64_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(n) * sizeof(T), kind, stream), "moving expert groups");
}

}  // namespace

size_t host_group_bytes(int n_rows, int n_tiles_bound) {
  return HostGroups(nullptr, n_rows, n_tiles_bound).n_bytes;
}

void group_on_host(const Run& run, const GroupArgs& args) {
  const int n = args.n_tokens, n_experts = args.n_experts;
  const HostGroups h(run.extra.host_groups.get(), n, run.extra.n_tiles_bound);
  copy(h.chosen, args.chosen, 8 * n, cudaMemcpyDeviceToHost, run.stream);
  copy(h.chosen_weight, args.chosen_weight, 8 * n, cudaMemcpyDeviceToHost, run.stream);
  copy(h.shared_weight, args.shared_weight, n, cudaMemcpyDeviceToHost, run.stream);
  check(cudaStreamSynchronize(run.stream), "waiting for the choice of experts");

  std::vector<int> rows(static_cast<size_t>(n_experts) + 1), first(rows.size());
  for (int a = 0; a < 8 * n; ++a) ++rows[static_cast<size_t>(h.chosen[a])];
  rows.back() = n;  // the shared expert
  std::exclusive_scan(rows.begin(), rows.end(), first.begin(), 0);
  std::vector<int> next = first;
  for (int a = 0; a < 8 * n; ++a) {
    const int row = next[static_cast<size_t>(h.chosen[a])]++;
    h.token_of_row[row] = a / 8;
    h.row_weight[row] = h.chosen_weight[a];
    h.row_of_choice[a] = row;
  }
  for (int t = 0; t < n; ++t) {
    h.token_of_row[8 * n + t] = t;
    h.row_weight[8 * n + t] = h.shared_weight[t];
  }
  std::vector<int> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return rows[static_cast<size_t>(a)] > rows[static_cast<size_t>(b)]; });
  int n_tiles = 0;
  for (const int e : order) {
    const int n_rows = rows[static_cast<size_t>(e)], parts = (n_rows + args.tile_rows - 1) / args.tile_rows;
    if (parts == 0) break;
    const int size = ((n_rows + parts - 1) / parts + 15) / 16 * 16;
    for (int i = 0; i < parts; ++i)
      h.tiles[n_tiles++] = {e, first[static_cast<size_t>(e)] + i * size, std::min(size, n_rows - i * size)};
  }
  LILY_CHECK(n_tiles <= run.extra.n_tiles_bound, "{} tiles of {}", n_tiles, run.extra.n_tiles_bound);
  *h.n_tiles = n_tiles;
  copy(args.token_of_row, h.token_of_row, 9 * n, cudaMemcpyHostToDevice, run.stream);
  copy(args.row_weight, h.row_weight, 9 * n, cudaMemcpyHostToDevice, run.stream);
  copy(args.row_of_choice, h.row_of_choice, 8 * n, cudaMemcpyHostToDevice, run.stream);
  copy(args.tiles, h.tiles, n_tiles, cudaMemcpyHostToDevice, run.stream);
  copy(args.n_tiles, h.n_tiles, 1, cudaMemcpyHostToDevice, run.stream);
}

void head_chunk(const Run& run, const plan::NormLinear& op) {
  const int rows = run.step.n_outputs();
  const DeviceWeight& w = run.weights.get(op.weights.front());
  auto* normed = run.extra.normed.get<uint16_t>();
  rms_norm_prefill(run.data<float>(op.x), run.weights.get(op.norm).vector, normed, rows, run.plan.dims.hidden,
                   run.stream);
  LinearArgs a{};
  a.x = normed;
  a.n_tokens = rows;
  a.n_cols = static_cast<int>(w.in);
  a.n_segments = 1;
  a.segments[0] = {w.records, static_cast<int>(w.out), run.data<float>(op.y), w.out};
  a.output = LinearOutput::floats;
  a.unit = run.has_wgmma ? ProductUnit::wgmma : ProductUnit::mma;
  linear_q4_prefill(a, run.n_sms, run.stream);
  launch_mask_tokens({run.data<float>(op.y), static_cast<int>(w.out), run.step.n_tokens(), rows}, run.stream);
}

bool attention_is_ablated(const Run& run, const plan::GatedAttention& op) {
  const plan::Policy& p = run.plan.policy;
  return run.decode_rows() &&
         (!p.coalesced_kv || !p.pack_query_heads || op.path == plan::AttentionPath::general);
}

void attention_ablation_rows(const Run& run, const plan::GatedAttention& op, const plan::QkPrepare* prepare) {
  AttentionAblation p;
  p.coalesced = run.plan.policy.coalesced_kv;
  p.packed = run.plan.policy.pack_query_heads;
  p.split = op.path == plan::AttentionPath::fixed_blocks;
  AttentionDecode& a = p.attention;
  a.q_gate = run.bf16(op.gate);
  a.stride = run.stride(op.gate.value);
  a.prepare = prepare != nullptr || op.prepares();
  if (a.prepare) {
    a.k = run.bf16(prepare != nullptr ? prepare->k : op.k);
    a.v = run.bf16(prepare != nullptr ? prepare->v : op.v);
  } else {
    a.q = run.data<uint16_t>(op.q);
  }
  a.q_norm = run.weights.get({Weight::q_norm, op.layer}).vector;
  a.k_norm = run.weights.get({Weight::k_norm, op.layer}).vector;
  a.epsilon = model::kNormEpsilon;
  a.n_q_heads = run.plan.dims.n_q_heads;
  a.rows = run.step.n_rows();
  a.cache = run.memory.kv(op.layer);
  a.step = run.step.view();
  a.partial = run.extra.attention_partial.get<float>();
  a.counters = run.extra.attention_counters.get<unsigned>();
  a.y = run.data<uint16_t>(op.y);
  launch_attention_ablation(p, run.stream);
}

// ---- simple ops
void unfused(const Run& run, const plan::Linear& op) {
  if (run.weights.get(op.weights.front()).records == nullptr)
    fail(Fault::user, "the cuda backend has no kernel for the router on its own; use its default policy");
  const LinearSource x{run.bf16(op.x), run.stride(op.x.value), false, nullptr};
  linear_rows(run, x, op.weights, op.y, run.rows_of(op.x.value));
}

void unfused(const Run& run, const plan::SwiGlu& op) {
  const bool routed = run.plan.value(op.y).rows == plan::RowSpace::routed;
  const int rows = run.step.n_rows() * (routed ? model::kExpertsPerToken : 1);
  launch_swiglu_rows({run.bf16(op.gate), run.bf16(op.up), run.stride(op.gate.value), run.stride(op.up.value),
                      static_cast<int>(run.stride(op.y)), rows, run.data<uint16_t>(op.y)},
                     run.stream);
}

void unfused(const Run& run, const plan::ExpertsLinear& op) {
  const DeviceWeight& w = run.weights.get(op.weight);
  ExpertsLinearRows p;
  p.x = run.data<uint16_t>(op.x);
  p.by_choice = run.plan.value(op.x).rows == plan::RowSpace::routed;
  p.ids = run.data<int32_t>(op.routing.ids);
  p.records = reinterpret_cast<const unsigned char*>(w.records);
  p.in = static_cast<int>(w.in);
  p.out = static_cast<int>(w.out);
  p.rows = run.step.n_rows();
  p.y = run.data<uint16_t>(op.y);
  launch_experts_linear_rows(p, run.stream);
}

void unfused(const Run& run, const plan::ExpertsCombine& op) {
  ExpertsCombineRows p;
  p.weights = run.data<float>(op.weights);
  p.experts = run.data<uint16_t>(op.experts);
  p.shared = run.data<uint16_t>(op.shared);
  p.shared_logit = run.data<float>(op.shared_gate.value) + op.shared_gate.first_col;
  p.shared_logit_stride = run.stride(op.shared_gate.value);
  p.hidden = run.plan.dims.hidden;
  p.rows = run.step.n_rows();
  p.residual_in = run.data<float>(op.residual_in);
  p.residual_out = run.data<float>(op.residual_out);
  launch_experts_combine_rows(p, run.stream);
}

namespace {

// The mixer's ops on places of any kind: values of the plan, or scratch.
void short_conv(const Run& run, int layer, const plan::View& x, uint16_t* y) {
  ShortConvRows p;
  p.x = run.bf16(x);
  p.stride = run.stride(x.value);
  p.conv = run.weights.get({Weight::conv, layer}).bf16;
  p.conv_state = run.memory.conv_state(layer);
  p.slot_stride = run.memory.conv_slot_stride();
  p.channels = run.plan.dims.conv_channels();
  p.n_segments = static_cast<int>(run.step.segments().size());
  p.step = run.step.view();
  p.y = y;
  launch_short_conv_rows(p, run.stream);
}

struct DeltaPlaces {
  float *q, *k, *g, *beta;
};

void delta_prepare(const Run& run, int layer, const uint16_t* mixed, int64_t mixed_stride,
                   const plan::View& b, const plan::View& a, const DeltaPlaces& to) {
  DeltaPrepareRows p;
  p.mixed = mixed;
  p.mixed_stride = mixed_stride;
  p.b = run.bf16(b);
  p.a = run.bf16(a);
  p.gate_stride = run.stride(a.value);
  p.a_log = run.weights.get({Weight::a_log, layer}).vector;
  p.dt_bias = run.weights.get({Weight::dt_bias, layer}).vector;
  p.n_key_heads = run.plan.dims.n_key_heads;
  p.rows = run.step.n_rows();
  p.q = to.q;
  p.k = to.k;
  p.g = to.g;
  p.beta = to.beta;
  launch_delta_prepare_rows(p, run.stream);
}

void delta_rule(const Run& run, int layer, const DeltaPlaces& from, const uint16_t* v, int64_t v_stride,
                float* o) {
  DeltaRuleRows p;
  p.q = from.q;
  p.k = from.k;
  p.g = from.g;
  p.beta = from.beta;
  p.v = v;
  p.v_stride = v_stride;
  p.state = run.memory.delta_state(layer);
  p.slot_stride = run.memory.delta_slot_stride();
  p.n_key_heads = run.plan.dims.n_key_heads;
  p.n_segments = static_cast<int>(run.step.segments().size());
  p.step = run.step.view();
  p.o = o;
  launch_delta_rule_rows(p, run.stream);
}

void gated_norm(const Run& run, int layer, const float* o, const plan::View& z, plan::ValueId y) {
  GatedNormRows p;
  p.o = o;
  p.z = run.bf16(z);
  p.z_stride = run.stride(z.value);
  p.norm = run.weights.get({Weight::delta_norm, layer}).vector;
  p.epsilon = model::kNormEpsilon;
  p.n_value_heads = run.plan.dims.n_value_heads;
  p.rows = run.step.n_rows();
  p.y = run.data<uint16_t>(y);
  launch_gated_norm_rows(p, run.stream);
}

}  // namespace

void unfused_delta_mixer(const Run& run, const plan::DeltaMixer& op) {
  const Extra& e = run.extra;
  auto* mixed = e.mixed.get<uint16_t>();
  const int64_t channels = run.plan.dims.conv_channels();
  const DeltaPlaces places{e.delta_q.get<float>(), e.delta_k.get<float>(), e.delta_g.get<float>(),
                           e.delta_beta.get<float>()};
  short_conv(run, op.layer, op.qkv, mixed);
  delta_prepare(run, op.layer, mixed, channels, op.b, op.a, places);
  delta_rule(run, op.layer, places, mixed + 2 * run.plan.dims.key_width(), channels, e.delta_o.get<float>());
  gated_norm(run, op.layer, e.delta_o.get<float>(), op.z, op.y);
}

void unfused(const Run& run, const plan::ShortConv& op) {
  short_conv(run, op.layer, op.x, run.data<uint16_t>(op.y));
}

void unfused(const Run& run, const plan::DeltaPrepare& op) {
  LILY_CHECK(op.q_in.value == op.k_in.value && op.k_in.first_col == op.q_in.first_col + op.q_in.n_cols,
             "keys stand behind queries");
  delta_prepare(
      run, op.layer, run.bf16(op.q_in), run.stride(op.q_in.value), op.b, op.a,
      {run.data<float>(op.q), run.data<float>(op.k), run.data<float>(op.g), run.data<float>(op.beta)});
}

void unfused(const Run& run, const plan::DeltaRule& op) {
  delta_rule(run, op.layer,
             {run.data<float>(op.q), run.data<float>(op.k), run.data<float>(op.g), run.data<float>(op.beta)},
             run.bf16(op.v), run.stride(op.v.value), run.data<float>(op.o));
}

void unfused(const Run& run, const plan::GatedNorm& op) {
  gated_norm(run, op.layer, run.data<float>(op.o), op.z, op.y);
}

void unfused(const Run& run, const plan::HeadNormRope& op) {
  HeadNormRopeRows p;
  p.x = run.bf16(op.x);
  p.stride = run.stride(op.x.value);
  p.head_stride = op.head_stride;
  p.weight = run.weights.get(op.weight).vector;
  p.epsilon = model::kNormEpsilon;
  p.n_heads = static_cast<int>(run.stride(op.y) / model::kHeadDim);
  p.rows = run.step.n_rows();
  p.step = run.step.view();
  p.y = run.data<uint16_t>(op.y);
  launch_head_norm_rope_rows(p, run.stream);
}

void unfused(const Run& run, const plan::KvAppend& op) {
  KvAppendRows p;
  p.k = run.data<uint16_t>(op.k);
  p.v = run.bf16(op.v);
  p.v_stride = run.stride(op.v.value);
  p.rows = run.step.n_rows();
  p.cache = run.memory.kv(op.layer);
  p.step = run.step.view();
  launch_kv_append_rows(p, run.stream);
}

}  // namespace lily::cuda
