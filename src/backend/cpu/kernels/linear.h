// Linear layers over packed weight tiles: y = x * W^T, for any number of rows.
//
// A call covers some tiles (16 output rows each) and all activation rows; threads divide the tiles. Every
// output is summed by one thread in one order (dot_tile-inl.h). A tile is read from memory once per kRowBlock
// rows and stays in L1 while those rows pass over it, eight at a time; 4-bit codes are unpacked in registers.
// Where there is a matrix unit, blocks of 16 rows go through it; the results are the same to the bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernels/quantise.h"
#include "model/weight.h"

namespace lily::backend::cpu {

inline constexpr int kMaxTileRows = 8;  // activation rows a tile is multiplied by at a time

// A weight in the layout of pack/cpu_tiles.h, 64-byte aligned. Does not own.
struct TileMatrix {
  model::Storage storage = model::Storage::q4;
  const uint8_t* tiles = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t tile_bytes = 0;

  int64_t n_tiles() const { return (rows + 15) / 16; }
  const uint8_t* tile(int64_t i) const { return tiles + i * tile_bytes; }
  bool quantised() const { return storage != model::Storage::bf16; }
};

// One activation row, in the form that the weight's storage needs.
struct RowRef {
  const int8_t* planes = nullptr;      // q4, q8
  const GroupScale* scales = nullptr;  // q4, q8
  int n_planes = 2;                    // q4: the same for all rows of a call; q8 has no loop for one
  const float* x = nullptr;            // bf16
  // What the planes leave over, in planes of its own, or null (quantise.h).
  const int8_t* rest_planes = nullptr;
  const GroupScale* rest_scales = nullptr;
};

// Activation rows of a linear layer; row i of the product is row `ids ? ids[i] / per_row : i` here.
struct InputRows {
  QuantisedRows quantised;
  QuantisedRows rest;        // of `quantised`; without planes: not used
  const float* x = nullptr;  // [rows, x_stride]
  int64_t x_stride = 0;
  const int32_t* ids = nullptr;
  int32_t per_row = 1;
  // Memory of the calling thread, matrix_scratch_bytes() of it, 64-byte aligned; null: without the matrix
  // unit.
  std::byte* matrix_scratch = nullptr;

  // The same from product row `first` on.
  InputRows from(int64_t first) const {
    InputRows rows = *this;
    if (ids != nullptr) {
      rows.ids += first;
      return rows;
    }
    rows.x += first * x_stride;
    if (quantised.planes != nullptr) {
      rows.quantised.planes = quantised.row_planes(first);
      rows.quantised.scales = quantised.row_scales(first);
    }
    if (rest.planes != nullptr) {
      rows.rest.planes = rest.row_planes(first);
      rows.rest.scales = rest.row_scales(first);
    }
    return rows;
  }
  int64_t source(int64_t i) const { return ids != nullptr ? ids[i] / per_row : i; }
  RowRef row(int64_t i) const {
    const int64_t from = source(i);
    RowRef row{.n_planes = quantised.n_planes, .x = x + from * x_stride};
    if (quantised.planes != nullptr) {
      row.planes = quantised.row_planes(from);
      row.scales = quantised.row_scales(from);
    }
    if (rest.planes != nullptr) {
      row.rest_planes = rest.row_planes(from);
      row.rest_scales = rest.row_scales(from);
    }
    return row;
  }
};

// y[i, first_col + output row] for product row i; added to `residual`, same shape, unless that is null.
struct OutputRows {
  float* y = nullptr;
  int64_t stride = 0;
  int64_t first_col = 0;
  const float* residual = nullptr;

  OutputRows from(int64_t first) const {
    return {y + first * stride, stride, first_col, residual == nullptr ? nullptr : residual + first * stride};
  }
};

// What products of weights of so many columns need to run on the matrix unit (matrix_unit.h).
int64_t matrix_scratch_bytes(int64_t cols);

void linear_tiles(const TileMatrix& w, int64_t tile_begin, int64_t tile_end, const InputRows& x,
                  int64_t n_rows, const OutputRows& out);

// y = silu(x * G^T) * (x * U^T) for two matrices of one shape (D4a): neither product is stored.
void gate_up_tiles(const TileMatrix& gate, const TileMatrix& up, int64_t tile_begin, int64_t tile_end,
                   const InputRows& x, int64_t n_rows, const OutputRows& out);

// out[0 .. 16) += weight * (row `x` times one tile of w). `next` is the tile that the caller reads then,
// asked for meanwhile.
void accumulate_tile(const TileMatrix& w, int64_t tile, const uint8_t* next, const RowRef& x, float weight,
                     float* out);

}  // namespace lily::backend::cpu
