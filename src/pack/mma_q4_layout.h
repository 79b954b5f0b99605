// "mma_q4": the one resident layout of 4-bit group-64 affine weights on CUDA, for decode and prefill alike.
//
//   W [n_rows, n_cols], w = scale * code + bias, one bf16 scale and bias a row and group of 64 columns
//
// Rows are cut into tiles of 16 (the last one padded with codes, scales and biases of 0), columns into groups
// of 64. One tile of one group is a record of 576 bytes; the records of a row tile lie one after another, so
// that a decode warp and a prefill tile both stream contiguous bytes: record(tile, group) = tile * n_groups +
// group.
//
// Bytes 0..511: codes in the register order of a 16 x 16 bf16 A fragment, which mma.m16n8k16 and
// wgmma.m64nNk16 share (each warp of a warpgroup holds 16 of the 64 rows). Lane l owns 16 bytes at 16 * l;
// word s of them is its fragment of columns 16 s .. 16 s + 15. Nibble i of the word is the low half of
// register i, nibble i + 4 the high half: (word >> 4 i) & 0x000f000f spreads exactly register i. With
// g = l / 4 and t = l % 4:
//   register 0: row g,     columns 2 t, 2 t + 1
//   register 1: row g + 8, columns 2 t, 2 t + 1
//   register 2: row g,     columns 2 t + 8, 2 t + 9
//   register 3: row g + 8, columns 2 t + 8, 2 t + 9
//
// Bytes 512..575: 16 words scale | bias << 16. Word 2 g is row g, word 2 g + 1 row g + 8: a lane reads its
// two rows with one 8-byte load at 512 + 8 g.
//
// Constants and index functions only, for C++17 device code too; mma_q4.h packs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lily::pack::mma_q4 {

inline constexpr int kTileRows = 16;
inline constexpr int kGroup = 64;
inline constexpr int kCodeBytes = 512;
inline constexpr int kScaleBytes = 64;
inline constexpr int kRecordBytes = kCodeBytes + kScaleBytes;

constexpr int row_tiles(int n_rows) { return (n_rows + kTileRows - 1) / kTileRows; }
constexpr int groups(int n_cols) { return n_cols / kGroup; }
constexpr size_t packed_bytes(int n_rows, int n_cols) {
  return size_t{kRecordBytes} * static_cast<size_t>(row_tiles(n_rows)) * static_cast<size_t>(groups(n_cols));
}

// Where code (row, col) of a 16 x 64 tile lies: the 32-bit word of the record, and the nibble in it.
struct CodePlace {
  int word;    // 0 .. 127
  int nibble;  // 0 .. 7
};
constexpr CodePlace code_place(int row, int col) {
  const int step = col / 16, c = col % 16;
  const int lane = (row % 8) * 4 + (c % 8) / 2;
  const int reg = (row / 8) + 2 * (c / 8);
  return {lane * 4 + step, reg + 4 * (c % 2)};
}
// Index of a row's scale-and-bias word among the 16 of a record.
constexpr int scale_place(int row) { return (row % 8) * 2 + row / 8; }

}  // namespace lily::pack::mma_q4
