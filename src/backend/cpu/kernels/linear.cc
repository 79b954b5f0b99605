#include "backend/cpu/kernels/linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/cpu/kernels/matrix_unit.h"

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
  dot_tile_rows(w, tile, w.tile(tile), rest, n, products);
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < 16; ++i) values[r][i] += products[r][i];
}

#if HWY_TARGET == HWY_AVX3_DL
// For fewer rows the vector loop is as fast as a block of the unit.
constexpr int64_t kLeastMatrixRows = 6;

// The rows of products that the matrix unit computes: all, or all but a short last block.
int64_t matrix_rows(const TileMatrix& w, const InputRows& x, int64_t n_rows) {
  if (x.matrix_scratch == nullptr || w.storage != model::Storage::q4 || x.rest.planes != nullptr) return 0;
  return n_rows % kMatrixRows >= kLeastMatrixRows ? n_rows : n_rows / kMatrixRows * kMatrixRows;
}

// Activation rows and the codes of some tiles as the matrix unit wants them.
class MatrixOperands {
 public:
  MatrixOperands(std::byte* scratch, int64_t n_groups, int n_planes)
      : n_groups_(n_groups),
        n_planes_(n_planes),
        codes_(reinterpret_cast<uint8_t*>(scratch)),
        planes_(reinterpret_cast<int8_t*>(codes_ + kMatrixTiles * n_groups * 1024)),
        scales_(reinterpret_cast<float*>(planes_ + kMatrixBlock * n_groups * 128)),
        sums_(scales_ + kMatrixBlock * n_groups) {}

  // Rows that do not fill a block are followed by copies of the last one.
  void pack_rows(const InputRows& x, int64_t first, int64_t n_rows) {
    for (int64_t i = 0; i < (n_rows + kMatrixRows - 1) / kMatrixRows * kMatrixRows; ++i) {
      const RowRef row = x.row(first + std::min(i, n_rows - 1));
      const int64_t block = i / kMatrixRows * n_groups_, r = i % kMatrixRows;
      for (int64_t group = 0; group < n_groups_; ++group) {
        int8_t* to = planes_ + ((block + group) * n_planes_ * kMatrixRows + r) * 64;
        for (int64_t plane = 0; plane < n_planes_; ++plane)
          std::memcpy(to + plane * kMatrixRows * 64, row.planes + (group * n_planes_ + plane) * 64, 64);
        scales_[(block + group) * kMatrixRows + r] = row.scales[group].scale;
        sums_[(block + group) * kMatrixRows + r] = row.scales[group].sum;
      }
    }
  }
  MatrixRows rows(int64_t block) const {
    block *= n_groups_;
    return {planes_ + block * n_planes_ * kMatrixRows * 64, scales_ + block * kMatrixRows,
            sums_ + block * kMatrixRows, n_planes_};
  }
  MatrixTile tile(int i, const uint8_t* packed) {
    uint8_t* codes = codes_ + i * n_groups_ * 1024;
    MatrixUnit::unpack_codes(packed, n_groups_, codes);
    return {packed, codes};
  }

 private:
  const int64_t n_groups_;
  const int n_planes_;
  uint8_t* const codes_;  // [kMatrixTiles][n_groups][1024]
  int8_t* const planes_;  // [kMatrixBlock / 16][n_groups][n_planes][16][64]
  float* const scales_;   // [kMatrixBlock / 16][n_groups][16]
  float* const sums_;     // likewise
};

// Runs n_rows rows through pairs of tiles: tiles 2i and 2i + 1 of a pass come from tile(i), and
// emit(i, row, a, b) gets their outputs for a row.
template <class TilesOf, class Emit>
void multiply_pairs(const InputRows& x, int64_t n_rows, int64_t n_groups, int64_t n_pairs, TilesOf tiles_of,
                    Emit emit) {
  alignas(64) float out[kMatrixTiles][kMatrixRows][16];
  MatrixOperands operands(x.matrix_scratch, n_groups, x.quantised.n_planes);
  MatrixUnit unit;
  for (int64_t first = 0; first < n_rows; first += kMatrixBlock) {
    const int64_t n = std::min(kMatrixBlock, n_rows - first);
    operands.pack_rows(x, first, n);
    for (int64_t pair = 0; pair < n_pairs; pair += kMatrixTiles / 2) {
      MatrixTile tiles[kMatrixTiles];
      const int n_tiles = static_cast<int>(std::min<int64_t>(kMatrixTiles, 2 * (n_pairs - pair)));
      for (int i = 0; i < n_tiles; i += 2) {
        const auto [a, b] = tiles_of(pair + i / 2);
        tiles[i] = operands.tile(i, a);
        tiles[i + 1] = operands.tile(i + 1, b);
      }
      for (int64_t block = 0; block * kMatrixRows < n; ++block) {
        unit.multiply({tiles, static_cast<size_t>(n_tiles)}, n_groups, operands.rows(block), out);
        for (int i = 0; i < n_tiles; i += 2)
          for (int64_t r = 0; r < std::min<int64_t>(kMatrixRows, n - block * kMatrixRows); ++r)
            emit(pair + i / 2, first + block * kMatrixRows + r, out[i][r], out[i + 1][r]);
      }
    }
  }
}
#else
int64_t matrix_rows(const TileMatrix&, const InputRows&, int64_t) { return 0; }
#endif

void linear(const TileMatrix& w, int64_t tile_begin, int64_t tile_end, const InputRows& x, int64_t n_rows,
            const OutputRows& out) {
  alignas(64) float values[2][kMaxTileRows][16];
  RowRef rows[kMaxTileRows];
  const int64_t n_matrix = matrix_rows(w, x, n_rows);
#if HWY_TARGET == HWY_AVX3_DL
  if (n_matrix > 0)
    multiply_pairs(
        x, n_matrix, w.cols / model::kQuantGroup, (tile_end - tile_begin + 1) / 2,
        [&](int64_t pair) {  // an odd last tile is its own partner
          const int64_t a = tile_begin + 2 * pair;
          return std::pair(w.tile(a), w.tile(std::min(a + 1, tile_end - 1)));
        },
        [&](int64_t pair, int64_t row, const float* a, const float* b) {
          const int64_t tile = tile_begin + 2 * pair;
          store_tile(a, row, tile, w.rows, out);
          if (tile + 1 < tile_end) store_tile(b, row, tile + 1, w.rows, out);
        });
#endif
  for (int64_t block = n_matrix; block < n_rows; block += kRowBlock) {
    const int64_t block_end = std::min(block + kRowBlock, n_rows);
    for (int64_t tile = tile_begin; tile < tile_end; tile += 2) {
      const bool two = tile + 1 < tile_end;
      for (int64_t first = block; first < block_end; first += kMaxTileRows) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxTileRows, block_end - first));
        for (int r = 0; r < n; ++r) rows[r] = x.row(first + r);
        if (two) dot_two_tiles_rows(w, tile, w, tile + 1, w.tile(tile + 2), rows, n, values[0], values[1]);
        else dot_tile_rows(w, tile, w.tile(tile + 1), rows, n, values[0]);
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

// gates = silu(gates) * ups, 16 of them.
HWY_INLINE void silu_times(float* HWY_RESTRICT gates, const float* HWY_RESTRICT ups) {
  const TileF32 d;
  for (size_t i = 0; i < 16; i += hn::Lanes(d))
    hn::Store(hn::Mul(silu_of(d, hn::Load(d, gates + i)), hn::Load(d, ups + i)), d, gates + i);
}

void gate_up(const TileMatrix& gate, const TileMatrix& up, int64_t tile_begin, int64_t tile_end,
             const InputRows& x, int64_t n_rows, const OutputRows& out) {
  alignas(64) float gates[kMaxTileRows][16];
  alignas(64) float ups[kMaxTileRows][16];
  RowRef rows[kMaxTileRows];
  const int64_t n_matrix = up.storage == gate.storage ? matrix_rows(gate, x, n_rows) : 0;
#if HWY_TARGET == HWY_AVX3_DL
  if (n_matrix > 0)
    multiply_pairs(
        x, n_matrix, gate.cols / model::kQuantGroup, tile_end - tile_begin,
        [&](int64_t pair) { return std::pair(gate.tile(tile_begin + pair), up.tile(tile_begin + pair)); },
        [&](int64_t pair, int64_t row, float* g, const float* u) {
          silu_times(g, u);
          store_tile(g, row, tile_begin + pair, gate.rows, out);
        });
#endif
  for (int64_t block = n_matrix; block < n_rows; block += kRowBlock) {
    const int64_t block_end = std::min(block + kRowBlock, n_rows);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      for (int64_t first = block; first < block_end; first += kMaxTileRows) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxTileRows, block_end - first));
        for (int r = 0; r < n; ++r) rows[r] = x.row(first + r);
        dot_two_tiles_rows(gate, tile, up, tile, gate.tile(tile + 1), rows, n, gates, ups);
        add_rest(gate, tile, rows, n, gates);
        add_rest(up, tile, rows, n, ups);
        for (int r = 0; r < n; ++r) {
          silu_times(gates[r], ups[r]);
          store_tile(gates[r], first + r, tile, gate.rows, out);
        }
      }
    }
  }
}

void accumulate(const TileMatrix& w, int64_t tile, const uint8_t* next, const RowRef& x, float weight,
                float* HWY_RESTRICT out) {
  const TileF32 d;
  alignas(64) float values[1][16];
  dot_tile_rows(w, tile, next, &x, 1, values);
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

int64_t matrix_scratch_bytes(int64_t cols) {
  const int64_t n_groups = cols / model::kQuantGroup;
  return n_groups * (kMatrixTiles * 1024 + kMatrixBlock * (128 + 2 * static_cast<int64_t>(sizeof(float))));
}

void linear_tiles(const TileMatrix& w, int64_t tile_begin, int64_t tile_end, const InputRows& x,
                  int64_t n_rows, const OutputRows& out) {
  HWY_DYNAMIC_DISPATCH(linear)(w, tile_begin, tile_end, x, n_rows, out);
}

void gate_up_tiles(const TileMatrix& gate, const TileMatrix& up, int64_t tile_begin, int64_t tile_end,
                   const InputRows& x, int64_t n_rows, const OutputRows& out) {
  HWY_DYNAMIC_DISPATCH(gate_up)(gate, up, tile_begin, tile_end, x, n_rows, out);
}

void accumulate_tile(const TileMatrix& w, int64_t tile, const uint8_t* next, const RowRef& x, float weight,
                     float* out) {
  HWY_DYNAMIC_DISPATCH(accumulate)(w, tile, next, x, weight, out);
}

}  // namespace lily::backend::cpu
#endif
