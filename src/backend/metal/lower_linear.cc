// Lowering of projections and of what is done row by row.
#include "backend/metal/lowering.h"
#include "base/error.h"

namespace lily::metal {

using kernels::LinearParams;
using kernels::RowsParams;
using plan::RowSpace;

const char* storage_name(int bits) { return bits == 4 ? "q4" : bits == 8 ? "q8" : "bf16"; }

const char* unit_name(plan::MatrixUnit unit) {
  switch (unit) {
    case plan::MatrixUnit::vector:
      return "vector_";
    case plan::MatrixUnit::tensor:
      return "tensor_";
    case plan::MatrixUnit::simdgroup:
      break;
  }
  return "";
}

LoweredOp Lowering::op(const plan::Op& op) {
  op_ = {};
  phase_ = 0;
  std::visit([&](const auto& o) { lower(o); }, op);
  return std::move(op_);
}

Dispatch& Lowering::begin(std::string kernel, std::array<Extent, 3> grid, Size3 threads) {
  Dispatch d;
  d.kernel = std::move(kernel);
  d.grid = grid;
  d.threads = threads;
  d.phase = phase_;
  op_.dispatches.push_back(std::move(d));
  return op_.dispatches.back();
}

void Lowering::arg(int index, Place place, Kind access) {
  op_.dispatches.back().arguments.push_back({index, place, access});
}

Place Lowering::work(int64_t bytes) {
  const Place place{.kind = Place::Kind::work, .offset = work_used_, .bytes = bytes};
  work_used_ += (bytes + 255) / 256 * 256;
  work_bytes_ = std::max(work_bytes_, work_used_);
  return place;
}

Lowering::Count Lowering::count_of(plan::ValueId id) const {
  switch (plan_.value(id).rows) {
    case RowSpace::outputs:
      return Count::outputs;
    case RowSpace::routed:
      return Count::assignments;
    default:
      return Count::rows;
  }
}

bool Lowering::is_few(plan::ValueId rows_of) const {
  return rows_bound(plan_, plan_.value(rows_of)) <= kFewRows;
}

void Lowering::rms_norm(model::WeightId w, plan::ValueId x, const Place& y) {
  begin("rms_norm", {per(count_of(x)), fixed(1), fixed(1)}, {256, 1, 1});
  read(0, x);
  arg(1, y, Kind::write);
  weight(2, w);
  params(RowsParams{.width = cols(x), .of_outputs = of_outputs(x), .per_row = 1});
  header();
}

// (D1) Few rows: weights of one storage, up to four, whose rows begin at a multiple of what a simdgroup
// takes, share a dispatch.
void Lowering::gemv(const Product& p) {
  constexpr int64_t kOut = 4;  // rows of a simdgroup
  LinearParams params{};
  int64_t first = 0;  // output row at which the next weight begins
  size_t i = 0;
  while (i < p.weights.size()) {
    const int w_bits = bits(p.weights[i]);
    params = {.in = static_cast<uint32_t>(layout(p.weights[i]).in),
              .x_stride = cols(p.x.value),
              .x_first = static_cast<uint32_t>(p.x.first_col),
              .y_stride = cols(p.y),
              .y_first = static_cast<uint32_t>(first),
              .of_outputs = of_outputs(p.y)};
    params.store = p.residual != plan::kNoValue               ? kernels::kAddResidual
                   : plan_.value(p.y).type == plan::Type::f32 ? kernels::kStoreF32
                                                              : kernels::kStoreBf16;
    std::vector<model::WeightId> together;
    int64_t n = 0;
    while (i < p.weights.size() && together.size() < 4 && bits(p.weights[i]) == w_bits && n % kOut == 0) {
      const WeightLayout l = layout(p.weights[i]);
      n += l.rows;
      params.end[together.size()] = static_cast<uint32_t>(n);
      params.scales[together.size()] = static_cast<uint32_t>(l.scales);
      params.biases[together.size()] = static_cast<uint32_t>(l.biases);
      together.push_back(p.weights[i++]);
    }
    params.n_weights = static_cast<uint32_t>(together.size());
    const bool is_one = rows_bound(plan_, plan_.value(p.y)) == 1;
    begin(
        fmt::format("{}linear_decode_{}_{}", p.has_norm ? "norm_" : "", storage_name(w_bits), is_one ? 1 : 8),
        {fixed((n + 2 * kOut - 1) / (2 * kOut)), fixed(1), fixed(1)}, {64, 1, 1});
    read(0, p.x.value);
    write(1, p.y);
    // What a kernel does not use is bound to something that it may read anyway.
    if (p.residual != plan::kNoValue) read(2, p.residual);
    else weight(2, together[0]);
    if (p.has_norm) weight(3, p.norm);
    else weight(3, together[0]);
    for (size_t k = 0; k < 4; ++k) weight(static_cast<int>(4 + k), together[k < together.size() ? k : 0]);
    this->params(params);
    header();
    first += n;
  }
}

void Lowering::gemm(const Product& p, const Place& x, LinearParams params) {
  const bool is_small = rows_bound(plan_, plan_.value(p.y)) <= 16;
  const uint32_t tile = is_small ? 16 : 32;
  for (const model::WeightId id : p.weights) {
    const WeightLayout l = layout(id);
    params.end[0] = static_cast<uint32_t>(l.rows);
    params.scales[0] = static_cast<uint32_t>(l.scales);
    params.biases[0] = static_cast<uint32_t>(l.biases);
    begin(fmt::format("linear_prefill_{}{}_{}", unit_name(plan_.policy.matrix_unit),
                      storage_name(code_bits(l.storage)), tile),
          {fixed((l.rows + 63) / 64), per(count_of(p.y), tile), fixed(1)}, {128, 1, 1});
    arg(0, x);
    write(1, p.y);
    if (p.residual != plan::kNoValue) read(2, p.residual);
    else weight(2, id);
    weight(4, id);
    this->params(params);
    header();
    params.y_first += static_cast<uint32_t>(l.rows);
  }
}

void Lowering::product(const Product& p) {
  if (plan_.policy.row_parallel_gemv && is_few(p.y)) return gemv(p);
  LinearParams params{.in = static_cast<uint32_t>(layout(p.weights[0]).in),
                      .x_stride = cols(p.x.value),
                      .x_first = static_cast<uint32_t>(p.x.first_col),
                      .y_stride = cols(p.y),
                      .of_outputs = of_outputs(p.y),
                      .n_weights = 1};
  params.store = p.residual != plan::kNoValue               ? kernels::kAddResidual
                 : plan_.value(p.y).type == plan::Type::f32 ? kernels::kStoreF32
                                                            : kernels::kStoreBf16;
  if (!p.has_norm) return gemm(p, place_of(plan_, lowered_, p.x.value), params);
  // The matrix kernels read normalised rows.
  const Place normed = work(rows_bound(plan_, plan_.value(p.x.value)) * cols(p.x.value) * 2);
  rms_norm(p.norm, p.x.value, normed);
  next_phase();
  gemm(p, normed, params);
}

void Lowering::lower(const plan::Embed& o) {
  const WeightLayout l = layout({model::Weight::embed, model::kNoLayer});
  begin(fmt::format("embed_{}", storage_name(code_bits(l.storage))), {per(Count::rows), fixed(1), fixed(1)},
        {128, 1, 1});
  weight(0, model::Weight::embed, model::kNoLayer);
  write(1, o.y);
  arg(2, {.kind = Place::Kind::token_slots});
  LinearParams p{.in = static_cast<uint32_t>(l.in)};
  p.scales[0] = static_cast<uint32_t>(l.scales);
  p.biases[0] = static_cast<uint32_t>(l.biases);
  params(p);
  segments();
  rows();
  header();
}

void Lowering::lower(const plan::RmsNorm& o) { rms_norm(o.weight, o.x, place_of(plan_, lowered_, o.y)); }

void Lowering::lower(const plan::Linear& o) { product({.weights = o.weights, .x = o.x, .y = o.y}); }

void Lowering::lower(const plan::NormLinear& o) {
  product({.weights = o.weights, .x = {o.x, 0, cols(o.x)}, .y = o.y, .norm = o.norm, .has_norm = true});
}

void Lowering::lower(const plan::LinearAdd& o) {
  product({.weights = {o.weight}, .x = {o.x, 0, cols(o.x)}, .y = o.residual_out, .residual = o.residual_in});
}

// A thread an element of `like`'s rows and p.width columns.
void Lowering::each_element(const std::string& kernel, plan::ValueId like, const RowsParams& p) {
  begin(kernel, {fixed((p.width + 255) / 256), per(count_of(like)), fixed(1)}, {256, 1, 1});
  params(p);
  header();
}

void Lowering::lower(const plan::Add& o) {
  each_element("add", o.residual_out, {.width = cols(o.x), .per_row = 1});
  read(0, o.x);
  read(1, o.residual_in);
  write(2, o.residual_out);
}

void Lowering::lower(const plan::SwiGlu& o) {
  const bool routed = plan_.value(o.y).rows == RowSpace::routed;
  each_element("swiglu", o.y,
               {.width = static_cast<uint32_t>(o.gate.n_cols),
                .per_row = routed ? kernels::kTopK : 1,
                .a_stride = cols(o.gate.value),
                .a_first = static_cast<uint32_t>(o.gate.first_col),
                .b_stride = cols(o.up.value),
                .b_first = static_cast<uint32_t>(o.up.first_col),
                .y_stride = cols(o.y)});
  read(0, o.gate.value);
  read(1, o.up.value);
  write(2, o.y);
}

void Lowering::lower(const plan::GatherRows& o) {
  begin("gather_rows", {per(Count::outputs), fixed(1), fixed(1)}, {256, 1, 1});
  read(0, o.x);
  write(1, o.y);
  step(2, Place::Part::output_rows);
  params(RowsParams{.width = cols(o.x)});
  header();
}

}  // namespace lily::metal
