#include "backend/cpu/kernels/embed.h"

#include <cstring>

#include "base/half.h"
#include "pack/cpu_tiles.h"

namespace lily::backend::cpu {
namespace {

uint32_t word(const uint8_t* line) {
  uint32_t x;
  std::memcpy(&x, line, sizeof x);
  return x;
}

float low_half(uint32_t x) { return to_float(Bf16{static_cast<uint16_t>(x)}); }
float high_half(uint32_t x) { return to_float(Bf16{static_cast<uint16_t>(x >> 16)}); }

}  // namespace

void embed_row(const TileMatrix& w, int64_t row, float* y) {
  constexpr int kLine = pack::kCpuLineBytes;
  const uint8_t* lines = w.tile(row / pack::kCpuTileRows) + row % pack::kCpuTileRows * 4;
  if (w.storage == model::Storage::bf16) {
    for (int64_t c = 0; c < w.cols; c += 2, lines += kLine) {
      y[c] = low_half(word(lines));
      y[c + 1] = high_half(word(lines));
    }
    return;
  }
  const bool q4 = w.storage == model::Storage::q4;
  const int n_lines = q4 ? 8 : 16;
  for (int64_t group = 0; group < w.cols / model::kQuantGroup; ++group, lines += (n_lines + 1) * kLine) {
    const uint32_t scales = word(lines + n_lines * kLine);
    const float scale = low_half(scales), bias = high_half(scales);
    for (int eight = 0; eight < 8; ++eight, y += 8) {
      if (q4) {
        const uint32_t codes = word(lines + eight * kLine);
        for (int i = 0; i < 8; ++i) y[i] = scale * static_cast<float>(codes >> (4 * i) & 15u) + bias;
      } else {
        const uint32_t even = word(lines + 2 * eight * kLine), odd = word(lines + (2 * eight + 1) * kLine);
        for (int i = 0; i < 8; ++i) {
          const uint32_t codes = i % 2 == 0 ? even : odd;
          y[i] = scale * static_cast<float>(codes >> (8 * (i / 2)) & 255u) + bias;
        }
      }
    }
  }
}

}  // namespace lily::backend::cpu
