// Products of 4-bit weight tiles with blocks of 16 activation rows on the processor's matrix unit (AMX int8
// tiles, x86-64 under Linux): P6.
//
// The weights' codes are the unsigned operand, one plane of the rows the signed one: the layouts of
// pack/cpu_tiles.h and quantise.h are those of the unit's operands, a group of 64 columns is one product of
// 16 x 64 with 64 x 16. Integer sums are exact and groups are folded as in dot_tile-inl.h, so the results are
// those of the vector path to the bit. Bound by folding (about six vector operations for 16 outputs of a
// group and row, four with one plane), not by the products.
#pragma once

#include <cstdint>
#include <span>

namespace lily::backend::cpu {

// This processor has the unit and the system lets this process use it. Asks the system once.
bool matrix_unit_present();

inline constexpr int64_t kMatrixRows = 16;
// What linear layers do at a time: activation rows that are packed (256 KiB of planes at 2,048 columns, in
// L2), and tiles that share the loading of a block of them.
inline constexpr int64_t kMatrixBlock = 64;
inline constexpr int kMatrixTiles = 4;

// 16 quantised rows, 64-byte aligned.
struct MatrixRows {
  const int8_t* planes = nullptr;  // [n_groups][n_planes][16][64]
  const float* scales = nullptr;   // [n_groups][16]
  const float* sums = nullptr;     // [n_groups][16]
  int n_planes = 2;                // or 1
};

// A q4 tile as it is packed, and its codes as bytes.
struct MatrixTile {
  const uint8_t* packed = nullptr;
  const uint8_t* codes = nullptr;  // [n_groups][1024]
};

// The unit's shapes are set for the calling thread while this lives.
class MatrixUnit {
 public:
  MatrixUnit();
  ~MatrixUnit();
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  // The codes of a q4 tile as bytes, 64-byte aligned.
  static void unpack_codes(const uint8_t* tile, int64_t n_groups, uint8_t* codes);
  // out[t][row][i] = output i of tile t for each of the 16 rows; 64-byte aligned.
  static void multiply(std::span<const MatrixTile> tiles, int64_t n_groups, const MatrixRows& rows,
                       float (*out)[16][16]);
  // n products of 16 x 64 with 64 x 16 of whatever the unit holds, for measuring its rate; how many
  // multiplications that were.
  static int64_t run_products(int64_t n);
};

}  // namespace lily::backend::cpu
