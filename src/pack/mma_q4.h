// Packing into the layout of mma_q4_layout.h: pure functions bytes -> bytes, each with its inverse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pack/mma_q4_layout.h"

namespace lily::pack::mma_q4 {

// codes: the file's [n_rows, n_cols / 8] words, scales and biases its bf16 bits [n_rows, n_cols / 64].
// n_cols is a multiple of 64; out has packed_bytes(n_rows, n_cols) bytes.
void pack(std::span<const uint32_t> codes, std::span<const uint16_t> scales, std::span<const uint16_t> biases,
          int n_rows, int n_cols, std::span<std::byte> out);
void unpack(std::span<const std::byte> packed, int n_rows, int n_cols, std::span<uint32_t> codes,
            std::span<uint16_t> scales, std::span<uint16_t> biases);

}  // namespace lily::pack::mma_q4
