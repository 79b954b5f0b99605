#include "pack/cpu_tiles.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "model/dims.h"

namespace lily::pack {
namespace {

using model::kQuantGroup;
using model::Storage;

uint32_t load_u32(const std::byte* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

void store_u32(std::byte* p, uint32_t x) { std::memcpy(p, &x, sizeof x); }

// Eight consecutive bytes a0 a1 ... a7 as the words (a0 a2 a4 a6) and (a1 a3 a5 a7).
struct EvenOdd {
  uint32_t even, odd;
};

EvenOdd split_bytes(uint32_t low, uint32_t high) {
  const auto evens = [](uint32_t x) { return (x & 0xffu) | ((x >> 8) & 0xff00u); };
  return {evens(low) | (evens(high) << 16), evens(low >> 8) | (evens(high >> 8) << 16)};
}

EvenOdd join_bytes(uint32_t even, uint32_t odd) {
  const auto spread = [](uint32_t x) { return (x & 0xffu) | ((x & 0xff00u) << 8); };
  return {spread(even) | (spread(odd) << 8), spread(even >> 16) | (spread(odd >> 16) << 8)};
}

int code_lines(Storage storage) { return storage == Storage::q4 ? 8 : 16; }

int64_t row_code_bytes(Storage storage, int64_t cols) {
  return storage == Storage::q4 ? cols / 2 : storage == Storage::q8 ? cols : 2 * cols;
}

void check_shape(Storage storage, int64_t rows, int64_t cols) {
  LILY_CHECK(storage != Storage::f32, "linear weights are q4, q8 or bf16");
  LILY_CHECK(rows > 0 && cols > 0 && cols % (storage == Storage::bf16 ? 2 : kQuantGroup) == 0,
             "shape [{}, {}]", rows, cols);
}

// Bytes between the lines of consecutive groups, and of the pair word of row `lane` in the scale line.
int64_t group_bytes(Storage storage) { return (code_lines(storage) + 1) * kCpuLineBytes; }

void pack_row(const MatrixBytes& m, int64_t row, int lane, std::byte* tile) {
  const int64_t n_bytes = row_code_bytes(m.storage, m.cols);
  const std::byte* codes = m.codes.data() + row * n_bytes;
  std::byte* out = tile + 4 * lane;
  if (m.storage == Storage::bf16) {
    for (int64_t word = 0; word < m.cols / 2; ++word)
      store_u32(out + word * kCpuLineBytes, load_u32(codes + 4 * word));
    return;
  }
  const int n_lines = code_lines(m.storage);
  const int64_t n_groups = m.cols / kQuantGroup;
  const std::byte* scales = m.scales.data() + row * n_groups * 2;
  const std::byte* biases = m.biases.data() + row * n_groups * 2;
  for (int64_t group = 0; group < n_groups; ++group, out += group_bytes(m.storage), codes += 4 * n_lines) {
    if (m.storage == Storage::q4) {
      for (int line = 0; line < n_lines; ++line)
        store_u32(out + line * kCpuLineBytes, load_u32(codes + 4 * line));
    } else {
      for (int line = 0; line < n_lines; line += 2) {
        const EvenOdd words = split_bytes(load_u32(codes + 4 * line), load_u32(codes + 4 * line + 4));
        store_u32(out + line * kCpuLineBytes, words.even);
        store_u32(out + (line + 1) * kCpuLineBytes, words.odd);
      }
    }
    std::memcpy(out + n_lines * kCpuLineBytes, scales + 2 * group, 2);
    std::memcpy(out + n_lines * kCpuLineBytes + 2, biases + 2 * group, 2);
  }
}

void unpack_row(Storage storage, int64_t cols, int64_t row, int lane, const std::byte* tile,
                const MutableMatrixBytes& m) {
  std::byte* codes = m.codes.data() + row * row_code_bytes(storage, cols);
  const std::byte* in = tile + 4 * lane;
  if (storage == Storage::bf16) {
    for (int64_t word = 0; word < cols / 2; ++word)
      store_u32(codes + 4 * word, load_u32(in + word * kCpuLineBytes));
    return;
  }
  const int n_lines = code_lines(storage);
  const int64_t n_groups = cols / kQuantGroup;
  for (int64_t group = 0; group < n_groups; ++group, in += group_bytes(storage), codes += 4 * n_lines) {
    if (storage == Storage::q4) {
      for (int line = 0; line < n_lines; ++line)
        store_u32(codes + 4 * line, load_u32(in + line * kCpuLineBytes));
    } else {
      for (int line = 0; line < n_lines; line += 2) {
        const EvenOdd words =
            join_bytes(load_u32(in + line * kCpuLineBytes), load_u32(in + (line + 1) * kCpuLineBytes));
        store_u32(codes + 4 * line, words.even);
        store_u32(codes + 4 * line + 4, words.odd);
      }
    }
    std::memcpy(m.scales.data() + (row * n_groups + group) * 2, in + n_lines * kCpuLineBytes, 2);
    std::memcpy(m.biases.data() + (row * n_groups + group) * 2, in + n_lines * kCpuLineBytes + 2, 2);
  }
}

}  // namespace

int64_t cpu_tile_bytes(Storage storage, int64_t cols) {
  check_shape(storage, 1, cols);
  if (storage == Storage::bf16) return cols / 2 * kCpuLineBytes;
  return cols / kQuantGroup * group_bytes(storage);
}

void pack_cpu_tiles(const MatrixBytes& matrix, int64_t tile_begin, int64_t tile_end,
                    std::span<std::byte> out) {
  check_shape(matrix.storage, matrix.rows, matrix.cols);
  const int64_t tile_bytes = cpu_tile_bytes(matrix.storage, matrix.cols);
  LILY_CHECK(0 <= tile_begin && tile_begin <= tile_end && tile_end <= cpu_tiles(matrix.rows),
             "tiles {}..{} of {} rows", tile_begin, tile_end, matrix.rows);
  LILY_CHECK(std::ssize(out) == (tile_end - tile_begin) * tile_bytes, "{} bytes for {} tiles", out.size(),
             tile_end - tile_begin);
  const int64_t n_code_bytes = row_code_bytes(matrix.storage, matrix.cols);
  LILY_CHECK(std::ssize(matrix.codes) == matrix.rows * n_code_bytes, "{} bytes of codes",
             matrix.codes.size());
  if (matrix.storage != Storage::bf16) {
    const int64_t n_scale_bytes = matrix.rows * (matrix.cols / kQuantGroup) * 2;
    LILY_CHECK(std::ssize(matrix.scales) == n_scale_bytes && std::ssize(matrix.biases) == n_scale_bytes,
               "{} and {} bytes of scales and biases", matrix.scales.size(), matrix.biases.size());
  }
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    std::byte* to = out.data() + (tile - tile_begin) * tile_bytes;
    const int64_t first = tile * kCpuTileRows;
    const int n_rows = static_cast<int>(std::min<int64_t>(kCpuTileRows, matrix.rows - first));
    if (n_rows < kCpuTileRows) std::memset(to, 0, static_cast<size_t>(tile_bytes));
    for (int lane = 0; lane < n_rows; ++lane) pack_row(matrix, first + lane, lane, to);
  }
}

void unpack_cpu_tiles(Storage storage, int64_t rows, int64_t cols, std::span<const std::byte> tiles,
                      const MutableMatrixBytes& out) {
  check_shape(storage, rows, cols);
  LILY_CHECK(std::ssize(tiles) == cpu_packed_bytes(storage, rows, cols), "{} bytes for [{}, {}]",
             tiles.size(), rows, cols);
  const int64_t tile_bytes = cpu_tile_bytes(storage, cols);
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* tile = tiles.data() + row / kCpuTileRows * tile_bytes;
    unpack_row(storage, cols, row, static_cast<int>(row % kCpuTileRows), tile, out);
  }
}

}  // namespace lily::pack
