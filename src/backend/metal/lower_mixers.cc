// Lowering of what stands between a mixer's projections.
#include <cmath>
#include <numbers>

#include "backend/metal/lowering.h"
#include "base/error.h"

namespace lily::metal {

using kernels::AttentionParams;
using kernels::DeltaParams;
using kernels::HeadParams;
using kernels::RowsParams;
using model::Weight;
using PlaceKind = Place::Kind;

namespace {

constexpr uint32_t kConvRows = 64;  // of a thread in short_conv

}  // namespace

void Lowering::rows_of_sequences() {
  segments();
  rows();
  header();
}
void Lowering::rows_and_blocks() {
  step(kBlocksIndex, Place::Part::blocks);
  rows_of_sequences();
}

// ---- Gated DeltaNet

DeltaParams Lowering::delta_params() const {
  return {.n_key_heads = u(dims().n_key_heads), .n_value_heads = u(dims().n_value_heads)};
}

void Lowering::lower(const plan::ShortConv& o) {
  begin("short_conv", {fixed((dims().conv_channels() + 127) / 128), per(Count::rows, kConvRows), fixed(1)},
        {128, 1, 1});
  read(0, o.x.value);
  write(1, o.y);
  weight(2, Weight::conv, o.layer);
  state(3, PlaceKind::conv_state, o.layer, Kind::read_write);
  DeltaParams p = delta_params();
  p.qkv_stride = cols(o.x.value);
  p.qkv_first = u(o.x.first_col);
  p.y_stride = cols(o.y);
  params(p);
  rows_of_sequences();
}

void Lowering::lower(const plan::DeltaPrepare& o) {
  LILY_CHECK(o.q_in.value == o.k_in.value && o.b.value == o.a.value, "delta_prepare reads two values");
  begin("delta_prepare", {fixed(dims().n_key_heads), per(Count::rows), fixed(1)}, {32, 1, 1});
  read(0, o.q_in.value);
  read(1, o.b.value);
  weight(2, Weight::a_log, o.layer);
  weight(3, Weight::dt_bias, o.layer);
  write(4, o.q);
  write(5, o.k);
  write(6, o.g);
  write(7, o.beta);
  DeltaParams p = delta_params();
  p.qkv_stride = cols(o.q_in.value);
  p.qkv_first = u(o.q_in.first_col);
  p.v_first = u(o.k_in.first_col);
  p.a_stride = p.b_stride = cols(o.a.value);
  p.a_first = u(o.a.first_col);
  p.b_first = u(o.b.first_col);
  params(p);
  header();
}

// The arguments that the kernels of DeltaRule and DeltaRuleNorm have in common.
template <typename Rule>
DeltaParams Lowering::delta_rule(const Rule& o, plan::ValueId y) {
  read(0, o.q);
  read(1, o.k);
  read(2, o.v.value);
  read(3, o.g);
  read(4, o.beta);
  state(5, PlaceKind::delta_state, o.layer, Kind::read_write);
  write(6, y);
  DeltaParams p = delta_params();
  p.v_stride = cols(o.v.value);
  p.v_first = u(o.v.first_col);
  p.y_stride = cols(y);
  return p;
}

void Lowering::lower(const plan::DeltaRule& o) {
  const bool in_blocks = o.scan == plan::DeltaScan::in_blocks;
  begin(in_blocks ? "delta_rule_blocks" : "delta_rule",
        {fixed(dims().n_value_heads * (in_blocks ? 4 : 8)), per(Count::segments), fixed(1)}, {128, 1, 1});
  params(delta_rule(o, o.o));
  segments();
  header();
}

void Lowering::lower(const plan::GatedNorm& o) {
  begin("gated_norm", {fixed(dims().n_value_heads), per(Count::rows), fixed(1)}, {32, 1, 1});
  read(0, o.o);
  read(1, o.z.value);
  write(2, o.y);
  weight(3, Weight::delta_norm, o.layer);
  params(RowsParams{.width = cols(o.o),
                    .per_row = 1,
                    .a_stride = cols(o.o),
                    .b_stride = cols(o.z.value),
                    .b_first = u(o.z.first_col),
                    .y_stride = cols(o.y)});
  header();
}

// The fused kernels keep the state in registers whatever the scan of the op: they are for few rows, where
// blocks have nothing to win.
void Lowering::lower(const plan::DeltaRuleNorm& o) {
  begin("delta_rule_norm", {fixed(dims().n_value_heads), per(Count::segments), fixed(1)}, {1024, 1, 1});
  DeltaParams p = delta_rule(o, o.y);
  read(7, o.z.value);
  weight(8, Weight::delta_norm, o.layer);
  p.z_stride = cols(o.z.value);
  p.z_first = u(o.z.first_col);
  params(p);
  segments();
  header();
}

void Lowering::lower(const plan::DeltaMixer& o) {
  LILY_CHECK(o.qkv.value == o.z.value && o.qkv.value == o.b.value && o.qkv.value == o.a.value,
             "delta_mixer reads one value");
  begin("delta_mixer", {fixed(dims().n_value_heads), per(Count::segments), fixed(1)}, {1024, 1, 1});
  read(0, o.qkv.value);
  write(1, o.y);
  weight(2, Weight::conv, o.layer);
  weight(3, Weight::a_log, o.layer);
  weight(4, Weight::dt_bias, o.layer);
  weight(5, Weight::delta_norm, o.layer);
  state(6, PlaceKind::conv_state, o.layer, Kind::read_write);
  state(7, PlaceKind::delta_state, o.layer, Kind::read_write);
  DeltaParams p = delta_params();
  p.qkv_stride = cols(o.qkv.value);
  p.qkv_first = u(o.qkv.first_col);
  p.z_first = u(o.z.first_col);
  p.b_first = u(o.b.first_col);
  p.a_first = u(o.a.first_col);
  p.y_stride = cols(o.y);
  params(p);
  segments();
  header();
}

// ---- Attention

std::string Lowering::of_cache(std::string kernel) const {
  return plan_.policy.kv == plan::KvType::int8 ? std::move(kernel) + "_int8" : kernel;
}

namespace {

void set_turns(uint64_t* turns, double theta) {
  for (size_t i = 0; i < kernels::kRotaryPairs; ++i) {
    const double radians = std::pow(theta, -static_cast<double>(i) / kernels::kRotaryPairs);
    turns[i] = static_cast<uint64_t>(std::ldexp(radians / (2 * std::numbers::pi), 64));
  }
}

}  // namespace

HeadParams Lowering::head_params() const {
  HeadParams p{.n_q_heads = u(dims().n_q_heads), .n_kv_heads = u(dims().n_kv_heads)};
  set_turns(p.turns, dims().rope_theta);
  return p;
}

void Lowering::lower(const plan::HeadNormRope& o) {
  const int64_t n_heads = cols(o.y) / kernels::kAttentionHead;
  begin("head_norm_rope", {fixed(n_heads), per(Count::rows), fixed(1)}, {32, 1, 1});
  read(0, o.x.value);
  write(1, o.y);
  weight(2, o.weight);
  HeadParams p = head_params();
  p.x_stride = cols(o.x.value);
  p.x_first = u(o.x.first_col);
  p.head_stride = u(o.head_stride);
  p.y_stride = cols(o.y);
  params(p);
  rows();
  header();
}

void Lowering::lower(const plan::KvAppend& o) {
  begin(of_cache("kv_append"), {fixed(dims().n_kv_heads), per(Count::rows), fixed(1)}, {32, 1, 1});
  read(0, o.k);
  read(1, o.v.value);
  state(2, PlaceKind::k_cache, o.layer, Kind::write);
  state(3, PlaceKind::v_cache, o.layer, Kind::write);
  HeadParams p = head_params();
  p.k_stride = cols(o.k);
  p.v_stride = cols(o.v.value);
  p.v_first = u(o.v.first_col);
  params(p);
  rows_and_blocks();
}

void Lowering::lower(const plan::QkPrepare& o) {
  LILY_CHECK(o.q_gate.value == o.k.value && o.k.value == o.v.value, "qk_prepare reads one value");
  begin(of_cache("qk_prepare"), {fixed(dims().n_q_heads + dims().n_kv_heads), per(Count::rows), fixed(1)},
        {32, 1, 1});
  read(0, o.q_gate.value);
  write(1, o.q);
  weight(2, Weight::q_norm, o.layer);
  weight(3, Weight::k_norm, o.layer);
  state(4, PlaceKind::k_cache, o.layer, Kind::write);
  state(5, PlaceKind::v_cache, o.layer, Kind::write);
  HeadParams p = head_params();
  p.x_stride = p.k_stride = p.v_stride = cols(o.k.value);
  p.x_first = u(o.q_gate.first_col);
  p.head_stride = 2 * kernels::kAttentionHead;
  p.k_first = u(o.k.first_col);
  p.v_first = u(o.v.first_col);
  p.y_stride = cols(o.q);
  params(p);
  rows_and_blocks();
}

// Many rows take tiles of queries on either path: the paths differ in how few rows share the cache.
void Lowering::attention(int layer, plan::AttentionPath path, plan::ValueId q,
                         const plan::GatedAttention* gated, plan::ValueId y) {
  const plan::View* gate = gated != nullptr ? &gated->gate : nullptr;
  const bool prepares = gated != nullptr && gated->prepares();
  if (prepares && !is_few(y))
    fail(Fault::user,
         "policy.decode.qk_in_attention: the Metal backend prepares at most {} rows inside attention",
         kFewRows);
  AttentionParams p{.n_q_heads = u(dims().n_q_heads),
                    .n_kv_heads = u(dims().n_kv_heads),
                    .q_stride = prepares ? 0 : cols(q),
                    .y_stride = cols(y)};
  if (prepares) {
    LILY_CHECK(gate->value == gated->k.value && gate->value == gated->v.value, "attention reads one value");
    set_turns(p.turns, dims().rope_theta);
    p.prepares = 1;
    p.k_first = u(gated->k.first_col);
    p.v_first = u(gated->v.first_col);
  }
  if (gate != nullptr) {
    p.gated = 1;
    p.gate_stride = cols(gate->value);
    p.gate_first = u(gate->first_col);
  }
  const auto caches = [&] {
    state(2, PlaceKind::k_cache, layer, prepares ? Kind::read_write : Kind::read);
    state(3, PlaceKind::v_cache, layer, prepares ? Kind::read_write : Kind::read);
    weight(5, Weight::q_norm, layer);
    weight(6, Weight::k_norm, layer);
    step(kBlocksIndex, Place::Part::blocks);
    segments();
  };
  const auto gate_or_query = [&] { read(4, gate != nullptr ? gate->value : q); };
  const auto query = [&] { read(0, prepares ? gate->value : q); };
  const int64_t n_heads = dims().n_q_heads;

  if (!is_few(y)) {
    begin(of_cache("attention_prefill"),
          {per(Count::query_tiles), fixed(n_heads / kernels::kPackedHeads), fixed(1)}, {128, 1, 1});
    read(0, q);
    write(1, y);
    caches();
    gate_or_query();
    step(kTilesIndex, Place::Part::tiles);
    params(p);
    rows();
    header();
    return;
  }

  const plan::Policy& policy = plan_.policy;
  const char* variant = policy.coalesced_kv ? (policy.pack_query_heads ? "" : "_one_head")
                                            : (policy.pack_query_heads ? "_strided" : "_one_head_strided");
  const int64_t groups = n_heads / (policy.pack_query_heads ? kernels::kPackedHeads : 1);
  if (path == plan::AttentionPath::general) {
    begin(of_cache(fmt::format("attention_decode{}", variant)), {fixed(groups), per(Count::rows), fixed(1)},
          {512, 1, 1});
    query();
    write(1, y);
    caches();
    gate_or_query();
    params(p);
    rows();
    header();
    return;
  }
  p.n_parts = u((plan_.shape.context + kernels::kSplitTokens - 1) / kernels::kSplitTokens);
  const Place partial =
      work(rows_bound(plan_, plan_.value(y)) * n_heads * p.n_parts * (kernels::kAttentionHead + 2) * 4);
  begin(of_cache(fmt::format("attention_part{}", variant)),
        {fixed(p.n_parts), fixed(groups), per(Count::rows)}, {256, 1, 1});
  query();
  arg(1, partial, Kind::write);
  caches();
  gate_or_query();
  params(p);
  rows();
  header();
  next_phase();
  begin("attention_merge", {fixed(n_heads), per(Count::rows), fixed(1)}, {256, 1, 1});
  arg(0, partial);
  write(1, y);
  gate_or_query();
  params(p);
  rows();
  header();
}

void Lowering::lower(const plan::Attention& o) { attention(o.layer, o.path, o.q, nullptr, o.o); }
void Lowering::lower(const plan::GatedAttention& o) { attention(o.layer, o.path, o.q, &o, o.y); }

void Lowering::lower(const plan::AttentionGate& o) {
  each_element("attention_gate", o.y,
               {.width = cols(o.o),
                .per_row = 1,
                .a_stride = cols(o.o),
                .b_stride = cols(o.gate.value),
                .b_first = u(o.gate.first_col),
                .y_stride = cols(o.y)});
  read(0, o.o);
  read(1, o.gate.value);
  write(2, o.y);
}

}  // namespace lily::metal
