// The CPU backend's weight layout: tiles of 16 output rows whose 32-bit words are interleaved, so that one
// 64-byte line holds the same columns of 16 rows and a SIMD lane owns a row: dot products need no horizontal
// sums.
//
// A q4 tile is a sequence of groups of 64 columns; a group is 8 code lines and 1 scale line (576 bytes, as
// many as in the file):
//   code line j    [16 rows] u32: columns 8j..8j+7 of the row, nibble i = column 8j + i (the file's own
//   words) scale line     [16 rows] u32: bf16 scale in the low half, bf16 bias in the high half
// A q8 group is 16 code lines and 1 scale line. Line 2j holds the codes of columns 8j + {0, 2, 4, 6}, line 2j
// + 1 those of 8j + {1, 3, 5, 7}: the order in which the low and the high nibbles of a q4 word come, so that
// one quantised activation serves both formats. A bf16 tile is [cols / 2][16 rows] u32: columns 2j (low half)
// and 2j + 1 of the row.
//
// Rows beyond the matrix, in its last tile, are zero in every field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "model/weight.h"

namespace lily::pack {

inline constexpr int kCpuTileRows = 16;
inline constexpr int kCpuLineBytes = 4 * kCpuTileRows;
inline constexpr int kCpuQ4GroupBytes = 9 * kCpuLineBytes;
inline constexpr int kCpuQ8GroupBytes = 17 * kCpuLineBytes;

// One matrix as the checkpoint stores it, row-major; spans need no alignment.
struct MatrixBytes {
  model::Storage storage = model::Storage::q4;  // q4, q8 or bf16
  int64_t rows = 0;
  int64_t cols = 0;                        // a multiple of 64 for q4 and q8, of 2 for bf16
  std::span<const std::byte> codes;        // [rows, cols * bits / 8]; for bf16 the elements themselves
  std::span<const std::byte> scales = {};  // [rows, cols / 64] bf16; empty for bf16
  std::span<const std::byte> biases = {};  // [rows, cols / 64] bf16; empty for bf16
};

inline int64_t cpu_tiles(int64_t rows) { return (rows + kCpuTileRows - 1) / kCpuTileRows; }
int64_t cpu_tile_bytes(model::Storage storage, int64_t cols);
inline int64_t cpu_packed_bytes(model::Storage storage, int64_t rows, int64_t cols) {
  return cpu_tiles(rows) * cpu_tile_bytes(storage, cols);
}

// Writes tiles [tile_begin, tile_end) of the matrix to `out`, which is the memory of those tiles alone. Calls
// for disjoint ranges may run in parallel.
void pack_cpu_tiles(const MatrixBytes& matrix, int64_t tile_begin, int64_t tile_end,
                    std::span<std::byte> out);

// The inverse: fills the three arrays of a row-major matrix from all its tiles.
struct MutableMatrixBytes {
  std::span<std::byte> codes, scales, biases;
};
void unpack_cpu_tiles(model::Storage storage, int64_t rows, int64_t cols, std::span<const std::byte> tiles,
                      const MutableMatrixBytes& out);

}  // namespace lily::pack
