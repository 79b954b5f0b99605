// Blocks of the 8-bit cache on their way into prefill's tiles of bf16: 128 threads copy a head's codes and
// scales as they lie into a place of shared memory, and when they have landed turn them into values, each
// rounded to bf16 once. A warp has rows 2 w and 2 w + 1 of every 8, so that no more than a warp has to meet.
#pragma once

#include "backend/cuda/kernels/kv_int8.h"
#include "backend/cuda/kernels/kv_layout.h"
#include "backend/cuda/kernels/prefill_ops.h"

namespace lily::cuda {

constexpr uint32_t kInt8StageBytes = kv_head_bytes(KvForm::int8);
constexpr uint32_t kInt8StageCodes = kKvBlock * kv_row_bytes(KvForm::int8);

// rows: of the head in its block. The caller commits the copies.
__device__ __forceinline__ void stage_int8_block(uint32_t stage, const unsigned char* rows, int thread) {
  const uint32_t own = static_cast<uint32_t>(thread) * 16u;  // row thread / 16, 16 codes
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) copy_16(stage + own + i * 2048u, rows + own + i * 2048u);
  const uint32_t warp = static_cast<uint32_t>(thread) / 32u, lane = static_cast<uint32_t>(thread) % 32u;
  const uint32_t scales = kInt8StageCodes + (8u * lane + 2u * warp) * kKvScaleBytes;  // of two rows
  if (lane < 8) copy_16(stage + scales, rows + scales);
}

// The thread's copies into the stage have landed. tile: quarters of quarter_bytes, 64 columns each, swizzled
// (prefill_ops.h). Rows from n_rows on become zeros.
__device__ __forceinline__ void expand_int8_block(uint32_t tile, uint32_t quarter_bytes, uint32_t stage,
                                                  int thread, int n_rows) {
  const int piece = thread % 16;
  const uint32_t quarter = tile + static_cast<uint32_t>(piece / 4) * quarter_bytes;
  // Quarters share their banks: lanes of odd ones store their second half first.
  const bool swapped = piece / 4 % 2 != 0;
  const int first = 2 * (piece % 4) + swapped, second = 2 * (piece % 4) + !swapped;
  warp_sync();
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {
    const int row = thread / 16 + 8 * i;
    const auto from = stage + static_cast<uint32_t>(thread) * 16u + static_cast<uint32_t>(i) * 2048u;
    const uint4 codes = *reinterpret_cast<const uint4*>(shared_at(from));
    const uint32_t at_scale = stage + kInt8StageCodes + static_cast<uint32_t>(row) * kKvScaleBytes +
                              static_cast<uint32_t>(piece / 4) * 2u;
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(shared_at(at_scale));
    const float scale = row < n_rows ? f16_value(bits) : 0.0f;
    const uint2 low = make_uint2(codes.x, codes.y), high = make_uint2(codes.z, codes.w);
    *reinterpret_cast<uint4*>(shared_at(swizzled(quarter, row, first))) =
        dequantised(swapped ? high : low, scale);
    *reinterpret_cast<uint4*>(shared_at(swizzled(quarter, row, second))) =
        dequantised(swapped ? low : high, scale);
  }
  warp_sync();  // the stage may be filled again
}

}  // namespace lily::cuda
