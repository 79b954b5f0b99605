// (1) one row of the embedding, dequantised in fp32 from packed tiles.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels/linear.h"

namespace lily::backend::cpu {

void embed_row(const TileMatrix& w, int64_t row, float* y);

}  // namespace lily::backend::cpu
