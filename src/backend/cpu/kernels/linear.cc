#include "backend/cpu/kernels/linear.h"

#include <algorithm>

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/linear.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/dot_tile-inl.h"
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

LILY_BEFORE_DOT_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

// Activation rows that stay in L2 while the tiles of a call pass: at 2,048 columns 4 KiB a row.
constexpr int64_t kRowBlock = 64;

void store_tile(const float* values, int64_t row, int64_t tile, int64_t n_out, const OutputRows& out) {
  const int n = static_cast<int>(std::min<int64_t>(16, n_out - tile * 16));
  const int64_t at = row * out.stride + out.first_col + tile * 16;
  float* y = out.y + at;
  if (out.residual == nullptr) {
    for (int i = 0; i < n; ++i) y[i] = values[i];
  } else {
    const float* residual = out.residual + at;
    for (int i = 0; i < n; ++i) y[i] = residual[i] + values[i];
  }
}

// Adds the products with what the planes of the rows leave over.
void add_rest(const TileMatrix& w, int64_t tile, const RowRef* rows, int n, float (*values)[16]) {
  if (!w.quantised() || rows[0].rest_planes == nullptr) return;
  RowRef rest[kMaxTileRows];
  for (int r = 0; r < n; ++r) rest[r] = {.planes = rows[r].rest_planes, .scales = rows[r].rest_scales};
  alignas(64) float products[kMaxTileRows][16];
  dot_tile_rows(w, tile, rest, n, products);
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < 16; ++i) values[r][i] += products[r][i];
}

void linear(const TileMatrix& w, int64_t tile_begin, int64_t tile_end, const InputRows& x, int64_t n_rows,
            const OutputRows& out) {
  alignas(64) float values[2][kMaxTileRows][16];
  RowRef rows[kMaxTileRows];
  for (int64_t block = 0; block < n_rows; block += kRowBlock) {
    const int64_t block_end = std::min(block + kRowBlock, n_rows);
    for (int64_t tile = tile_begin; tile < tile_end; tile += 2) {
      const bool two = tile + 1 < tile_end;
      for (int64_t first = block; first < block_end; first += kMaxTileRows) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxTileRows, block_end - first));
        for (int r = 0; r < n; ++r) rows[r] = x.row(first + r);
        if (two) dot_two_tiles_rows(w, tile, w, tile + 1, rows, n, values[0], values[1]);
        else dot_tile_rows(w, tile, rows, n, values[0]);
        add_rest(w, tile, rows, n, values[0]);
        if (two) add_rest(w, tile + 1, rows, n, values[1]);
        for (int r = 0; r < n; ++r) {
          store_tile(values[0][r], first + r, tile, w.rows, out);
          if (two) store_tile(values[1][r], first + r, tile + 1, w.rows, out);
        }
      }
    }
  }
}

void gate_up(const TileMatrix& gate, const TileMatrix& up, int64_t tile_begin, int64_t tile_end,
             const InputRows& x, int64_t n_rows, const OutputRows& out) {
  const TileF32 d;
  alignas(64) float gates[kMaxTileRows][16];
  alignas(64) float ups[kMaxTileRows][16];
  RowRef rows[kMaxTileRows];
  for (int64_t block = 0; block < n_rows; block += kRowBlock) {
    const int64_t block_end = std::min(block + kRowBlock, n_rows);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      for (int64_t first = block; first < block_end; first += kMaxTileRows) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxTileRows, block_end - first));
        for (int r = 0; r < n; ++r) rows[r] = x.row(first + r);
        dot_two_tiles_rows(gate, tile, up, tile, rows, n, gates, ups);
        add_rest(gate, tile, rows, n, gates);
        add_rest(up, tile, rows, n, ups);
        for (int r = 0; r < n; ++r) {
          for (size_t i = 0; i < 16; i += hn::Lanes(d)) {
            const auto act = silu_of(d, hn::Load(d, gates[r] + i));
            hn::Store(hn::Mul(act, hn::Load(d, ups[r] + i)), d, gates[r] + i);
          }
          store_tile(gates[r], first + r, tile, gate.rows, out);
        }
      }
    }
  }
}

void accumulate(const TileMatrix& w, int64_t tile, const RowRef& x, float weight, float* HWY_RESTRICT out) {
  const TileF32 d;
  alignas(64) float values[1][16];
  dot_tile_rows(w, tile, &x, 1, values);
  add_rest(w, tile, &x, 1, values);
  for (size_t i = 0; i < 16; i += hn::Lanes(d))
    hn::StoreU(hn::MulAdd(hn::Set(d, weight), hn::Load(d, values[0] + i), hn::LoadU(d, out + i)), d, out + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(linear);
HWY_EXPORT(gate_up);
HWY_EXPORT(accumulate);

void linear_tiles(const TileMatrix& w, int64_t tile_begin, int64_t tile_end, const InputRows& x,
                  int64_t n_rows, const OutputRows& out) {
  HWY_DYNAMIC_DISPATCH(linear)(w, tile_begin, tile_end, x, n_rows, out);
}

void gate_up_tiles(const TileMatrix& gate, const TileMatrix& up, int64_t tile_begin, int64_t tile_end,
                   const InputRows& x, int64_t n_rows, const OutputRows& out) {
  HWY_DYNAMIC_DISPATCH(gate_up)(gate, up, tile_begin, tile_end, x, n_rows, out);
}

void accumulate_tile(const TileMatrix& w, int64_t tile, const RowRef& x, float weight, float* out) {
  HWY_DYNAMIC_DISPATCH(accumulate)(w, tile, x, weight, out);
}

}  // namespace lily::backend::cpu
#endif
