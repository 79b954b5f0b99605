#include "pack/mma_q4.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace lily::pack::mma_q4 {
namespace {

constexpr int kWords = kRecordBytes / 4;
constexpr int kCodeWords = kCodeBytes / 4;

void check_shapes(size_t n_codes, size_t n_scales, size_t n_biases, size_t n_packed, int n_rows, int n_cols) {
  LILY_CHECK(n_rows > 0 && n_cols > 0 && n_cols % kGroup == 0, "{} x {}", n_rows, n_cols);
  const auto rows = static_cast<size_t>(n_rows), cols = static_cast<size_t>(n_cols);
  LILY_CHECK(n_codes == rows * cols / 8, "{} code words for {} x {}", n_codes, n_rows, n_cols);
  LILY_CHECK(n_scales == rows * cols / kGroup && n_biases == n_scales, "{} scales, {} biases", n_scales,
             n_biases);
  LILY_CHECK(n_packed == packed_bytes(n_rows, n_cols), "{} packed bytes", n_packed);
}

}  // namespace

void pack(std::span<const uint32_t> codes, std::span<const uint16_t> scales, std::span<const uint16_t> biases,
          int n_rows, int n_cols, std::span<std::byte> out) {
  check_shapes(codes.size(), scales.size(), biases.size(), out.size(), n_rows, n_cols);
  const size_t n_groups = static_cast<size_t>(groups(n_cols)), row_words = static_cast<size_t>(n_cols) / 8;
  for (int tile = 0; tile < row_tiles(n_rows); ++tile) {
    for (size_t group = 0; group < n_groups; ++group) {
      uint32_t record[kWords] = {};
      for (int r = 0; r < std::min(kTileRows, n_rows - tile * kTileRows); ++r) {
        const size_t row = static_cast<size_t>(tile * kTileRows + r);
        for (int c = 0; c < kGroup; ++c) {
          const uint32_t code =
              codes[row * row_words + group * 8 + static_cast<size_t>(c / 8)] >> (4 * (c % 8)) & 15u;
          const CodePlace place = code_place(r, c);
          record[place.word] |= code << (4 * place.nibble);
        }
        const size_t s = row * n_groups + group;
        record[kCodeWords + scale_place(r)] = uint32_t{scales[s]} | uint32_t{biases[s]} << 16;
      }
      std::memcpy(out.data() + (static_cast<size_t>(tile) * n_groups + group) * kRecordBytes, record,
                  kRecordBytes);
    }
  }
}

void unpack(std::span<const std::byte> packed, int n_rows, int n_cols, std::span<uint32_t> codes,
            std::span<uint16_t> scales, std::span<uint16_t> biases) {
  check_shapes(codes.size(), scales.size(), biases.size(), packed.size(), n_rows, n_cols);
  const size_t n_groups = static_cast<size_t>(groups(n_cols)), row_words = static_cast<size_t>(n_cols) / 8;
  std::fill(codes.begin(), codes.end(), 0u);
  for (size_t row = 0; row < static_cast<size_t>(n_rows); ++row) {
    for (size_t group = 0; group < n_groups; ++group) {
      uint32_t record[kWords];
      std::memcpy(record, packed.data() + (row / kTileRows * n_groups + group) * kRecordBytes, kRecordBytes);
      const int r = static_cast<int>(row % kTileRows);
      for (int c = 0; c < kGroup; ++c) {
        const CodePlace place = code_place(r, c);
        const uint32_t code = record[place.word] >> (4 * place.nibble) & 15u;
        codes[row * row_words + group * 8 + static_cast<size_t>(c / 8)] |= code << (4 * (c % 8));
      }
      scales[row * n_groups + group] = static_cast<uint16_t>(record[kCodeWords + scale_place(r)]);
      biases[row * n_groups + group] = static_cast<uint16_t>(record[kCodeWords + scale_place(r)] >> 16);
    }
  }
}

}  // namespace lily::pack::mma_q4
