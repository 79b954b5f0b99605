#include "pack/cpu_tiles.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lily::pack {
namespace {

using model::Storage;

std::vector<std::byte> random_bytes(size_t n, std::mt19937& random) {
  std::vector<std::byte> bytes(n);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

struct Matrix {
  std::vector<std::byte> codes, scales, biases;
  MatrixBytes view(Storage storage, int64_t rows, int64_t cols) const {
    return {storage, rows, cols, codes, scales, biases};
  }
};

Matrix random_matrix(Storage storage, int64_t rows, int64_t cols, std::mt19937& random) {
  const int64_t bits = storage == Storage::q4 ? 4 : storage == Storage::q8 ? 8 : 16;
  const int64_t n_scales = storage == Storage::bf16 ? 0 : rows * (cols / 64) * 2;
  return {random_bytes(static_cast<size_t>(rows * cols * bits / 8), random),
          random_bytes(static_cast<size_t>(n_scales), random),
          random_bytes(static_cast<size_t>(n_scales), random)};
}

std::vector<std::byte> pack_all(const MatrixBytes& m) {
  std::vector<std::byte> tiles(static_cast<size_t>(cpu_packed_bytes(m.storage, m.rows, m.cols)),
                               std::byte{0xcd});
  pack_cpu_tiles(m, 0, cpu_tiles(m.rows), tiles);
  return tiles;
}

struct Case {
  Storage storage;
  int64_t rows, cols;
};

class CpuTiles : public testing::TestWithParam<Case> {};

TEST_P(CpuTiles, UnpackingGivesTheMatrixBack) {
  const auto [storage, rows, cols] = GetParam();
  std::mt19937 random(7);
  const Matrix m = random_matrix(storage, rows, cols, random);
  const auto tiles = pack_all(m.view(storage, rows, cols));
  Matrix back{std::vector<std::byte>(m.codes.size()), std::vector<std::byte>(m.scales.size()),
              std::vector<std::byte>(m.biases.size())};
  unpack_cpu_tiles(storage, rows, cols, tiles, {back.codes, back.scales, back.biases});
  EXPECT_EQ(back.codes, m.codes);
  EXPECT_EQ(back.scales, m.scales);
  EXPECT_EQ(back.biases, m.biases);
}

TEST_P(CpuTiles, TilesPackedApartEqualTilesPackedTogether) {
  const auto [storage, rows, cols] = GetParam();
  std::mt19937 random(8);
  const Matrix m = random_matrix(storage, rows, cols, random);
  const auto view = m.view(storage, rows, cols);
  const auto whole = pack_all(view);
  const auto tile_bytes = static_cast<size_t>(cpu_tile_bytes(storage, cols));
  for (int64_t tile = 0; tile < cpu_tiles(rows); ++tile) {
    std::vector<std::byte> one(tile_bytes, std::byte{0xee});
    pack_cpu_tiles(view, tile, tile + 1, one);
    EXPECT_TRUE(
        std::equal(one.begin(), one.end(), whole.begin() + static_cast<ptrdiff_t>(tile * tile_bytes)));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CpuTiles,
                         testing::Values(Case{Storage::q4, 16, 64}, Case{Storage::q4, 1, 64},
                                         Case{Storage::q4, 15, 128}, Case{Storage::q4, 17, 192},
                                         Case{Storage::q4, 512, 256}, Case{Storage::q8, 1, 64},
                                         Case{Storage::q8, 16, 128}, Case{Storage::q8, 33, 256},
                                         Case{Storage::bf16, 16, 2}, Case{Storage::bf16, 5, 130},
                                         Case{Storage::bf16, 32, 256}));

std::byte at(const std::vector<std::byte>& tiles, int64_t i) { return tiles[static_cast<size_t>(i)]; }

TEST(CpuTilesLayout, AWordOfALineIsEightCodesOfOneRow) {
  std::mt19937 random(9);
  const Matrix m = random_matrix(Storage::q4, 16, 128, random);
  const auto tiles = pack_all(m.view(Storage::q4, 16, 128));
  // Row 5, columns 64 + 8 * 3 ..: second group, line 3, lane 5; in the file bytes (64 + 24) / 2 of the row.
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(at(tiles, kCpuQ4GroupBytes + 3 * 64 + 5 * 4 + i), at(m.codes, 5 * 64 + 44 + i));
  EXPECT_EQ(at(tiles, kCpuQ4GroupBytes + 8 * 64 + 5 * 4), at(m.scales, (5 * 2 + 1) * 2));
  EXPECT_EQ(at(tiles, kCpuQ4GroupBytes + 8 * 64 + 5 * 4 + 2), at(m.biases, (5 * 2 + 1) * 2));
}

TEST(CpuTilesLayout, EightBitCodesStandInNibbleOrder) {
  std::mt19937 random(10);
  const Matrix m = random_matrix(Storage::q8, 16, 64, random);
  const auto tiles = pack_all(m.view(Storage::q8, 16, 64));
  constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (int i = 0; i < 8; ++i)
    EXPECT_EQ(at(tiles, (4 + i / 4) * 64 + 2 * 4 + i % 4), at(m.codes, 2 * 64 + 16 + kOrder[i]));
}

TEST(CpuTilesLayout, RowsBeyondTheMatrixAreZero) {
  std::mt19937 random(11);
  const Matrix m = random_matrix(Storage::q4, 3, 64, random);
  const auto tiles = pack_all(m.view(Storage::q4, 3, 64));
  for (int line = 0; line < 9; ++line)
    for (int byte = 3 * 4; byte < 64; ++byte) EXPECT_EQ(at(tiles, line * 64 + byte), std::byte{0});
}

TEST(CpuTilesLayout, FourBitTilesAreAsLargeAsTheFile) {
  EXPECT_EQ(cpu_packed_bytes(Storage::q4, 512, 2048), model::storage_bytes(512 * 2048, Storage::q4));
}

}  // namespace
}  // namespace lily::pack
