#include "backend/cpu/lower.h"

#include <algorithm>

#include "backend/cpu/kernels/norm.h"
#include "backend/cpu/lower_parts.h"
#include "base/error.h"

namespace lily::backend::cpu {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Lowered lower(const plan::Op& op, const LowerContext& context) {
  return std::visit([&](const auto& o) { return lower_op(o, context); }, op);
}

int64_t reserve_extra(const LowerContext& context, Lowered& op, int64_t bytes) {
  const int64_t offset = context.extra_offset + op.extra_bytes;
  op.extra_bytes += aligned(bytes);
  return offset;
}

int64_t reserve_worker(Lowered& op, int64_t bytes) {
  const int64_t offset = op.worker_bytes;
  op.worker_bytes += aligned(bytes);
  return offset;
}

PreparedRows::PreparedRows(const LowerContext& context, Lowered& op, plan::View x,
                           std::optional<plan::WeightId> norm, int n_planes, plan::ValueId normed_copy)
    : x_(x),
      n_planes_(n_planes),
      keep_rest_(n_planes == 2 && context.plan.policy.kv == plan::KvType::f32),
      in_worker_(context.is_small()),
      normed_copy_(normed_copy),
      rows_bound_(plan::rows_bound(context.plan, context.plan.value(x.value))) {
  const auto reserve = [&](int64_t bytes) {
    return in_worker_ ? reserve_worker(op, bytes) : reserve_extra(context, op, bytes);
  };
  if (norm) {
    norm_ = context.weights.vector(*norm).data();
    offset_ = reserve(rows_bound_ * x.n_cols * 4);
  }
  if (n_planes > 0) quantised_offset_ = reserve(quantised_bytes(rows_bound_, x.n_cols, n_planes));
  if (keep_rest_) rest_offset_ = reserve(quantised_bytes(rows_bound_, x.n_cols, n_planes));
  if (n_planes > 0 && context.uses_matrix_unit())
    matrix_offset_ = reserve_worker(op, matrix_scratch_bytes(x.n_cols));
}

std::byte* PreparedRows::base(const Step& step, const Worker& worker) const {
  return in_worker_ ? worker.scratch : step.extra(0);
}

InputRows PreparedRows::rows(const Step& step, const Worker& worker) const {
  InputRows rows;
  rows.x = norm_ != nullptr ? reinterpret_cast<const float*>(base(step, worker) + offset_) : step.data(x_);
  rows.x_stride = norm_ != nullptr ? x_.n_cols : step.stride(x_);
  if (n_planes_ > 0)
    rows.quantised =
        quantised_rows(base(step, worker) + quantised_offset_, rows_bound_, x_.n_cols, n_planes_);
  if (keep_rest_)
    rows.rest = quantised_rows(base(step, worker) + rest_offset_, rows_bound_, x_.n_cols, n_planes_);
  if (matrix_offset_ >= 0) rows.matrix_scratch = worker.scratch + matrix_offset_;
  return rows;
}

void PreparedRows::fill(const Step& step, const Worker& worker, int64_t row) const {
  const InputRows to = rows(step, worker);
  const float* x = step.data(x_) + row * step.stride(x_);
  if (norm_ != nullptr) {
    auto* normed = reinterpret_cast<float*>(base(step, worker) + offset_) + row * x_.n_cols;
    rms_norm(x, norm_, normed, x_.n_cols);
    x = normed;
  }
  if (n_planes_ > 0) quantise_row(x, to.quantised, row);
  if (keep_rest_) quantise_rest(x, to.quantised, to.rest, row);
}

void PreparedRows::add_phase(Lowered& op) const {
  if (in_worker_ || (norm_ == nullptr && n_planes_ == 0)) return;
  add_row_phase(op, x_.value, [rows = *this](const Step& step, Worker& worker, int64_t row) {
    rows.fill(step, worker, row);
    rows.keep_normed(step, worker, row);
  });
}

void PreparedRows::keep_normed(const Step& step, const Worker& worker, int64_t row) const {
  if (normed_copy_ == plan::kNoValue) return;
  std::copy_n(rows(step, worker).x + row * x_.n_cols, x_.n_cols,
              step.data(normed_copy_) + row * step.stride(normed_copy_));
}

void PreparedRows::keep_normed_rows(const Step& step, const Worker& worker) const {
  if (!in_worker_) return;
  for (int64_t row = 0; row < step.rows(x_); ++row) keep_normed(step, worker, row);
}

std::function<void(const Step&, Worker&)> PreparedRows::prepare() const {
  if (!in_worker_ || (norm_ == nullptr && n_planes_ == 0)) return {};
  return [rows = *this](const Step& step, Worker& worker) {
    for (int64_t row = 0; row < step.rows(rows.x_); ++row) rows.fill(step, worker, row);
  };
}

int64_t tiles_per_unit(const LowerContext& context, const TileMatrix& w) {
  // Enough units for many threads, and enough bytes that handing them out costs nothing.
  constexpr int64_t kUnits = 32, kBytes = 65536;
  // The matrix unit packs the rows of a unit once, for all its tiles.
  constexpr int64_t kLeastForMatrixUnit = 8;
  const int64_t n = std::clamp(w.n_tiles() / kUnits, int64_t{1}, std::max<int64_t>(1, kBytes / w.tile_bytes));
  return context.uses_matrix_unit() ? std::max(n, kLeastForMatrixUnit) : n;
}

std::vector<TileRange> tile_ranges(const LowerContext& context, const std::vector<TileMatrix>& weights) {
  std::vector<TileRange> ranges;
  int64_t first_col = 0;
  for (const TileMatrix& w : weights) {
    const int64_t step = tiles_per_unit(context, w);
    for (int64_t tile = 0; tile < w.n_tiles(); tile += step)
      ranges.push_back({w, first_col, tile, std::min(tile + step, w.n_tiles())});
    first_col += w.rows;
  }
  return ranges;
}

std::vector<TileMatrix> matrices(const LowerContext& context, const std::vector<plan::WeightId>& ids) {
  std::vector<TileMatrix> result;
  result.reserve(ids.size());
  for (const plan::WeightId id : ids) result.push_back(context.weights.linear(id).first);
  return result;
}

int planes_of(const LowerContext& context, const std::vector<TileMatrix>& weights) {
  int n_planes = 0;
  for (const TileMatrix& w : weights)
    if (w.quantised())
      n_planes =
          std::max(n_planes, w.storage == model::Storage::q8 ? 2 : context.plan.policy.activation_planes);
  return n_planes;
}

void add_row_phase(Lowered& op, plan::ValueId row_space,
                   std::function<void(const Step&, Worker&, int64_t row)> run) {
  op.phases.push_back({[row_space](const Step& step) { return step.rows(row_space); }, std::move(run), {}});
}

}  // namespace lily::backend::cpu
