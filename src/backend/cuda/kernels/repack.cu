// repack_q4. One thread a word of the result; bound by bytes, and far faster than any file.
#include "backend/cuda/kernels/repack.h"

#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/q4_gemv.h"

namespace lily::cuda {
namespace {

constexpr int kWords = kRecordBytes / 4, kCodeWords = kRecordCodeBytes / 4;
constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads) repack_q4(RepackQ4 p) {
  pdl_wait();
  pdl_trigger();
  const size_t groups = static_cast<size_t>(p.cols) / kGroupCols, row_words = static_cast<size_t>(p.cols) / 8;
  const size_t n = static_cast<size_t>((p.rows + kTileRows - 1) / kTileRows) * groups * kWords;
  for (size_t i = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * kThreads) {
    const size_t record = i / kWords, tile = record / groups, group = record % groups;
    const int word = static_cast<int>(i % kWords);
    uint32_t out = 0;
    if (word < kCodeWords) {
      // Lane l owns words 4 l .. 4 l + 3; nibble i and i + 4 are columns 2 t and 2 t + 1 of register i.
      const int lane = word / 4, step = word % 4, t = lane % 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const size_t row = tile * kTileRows + static_cast<size_t>(lane / 4 + 8 * half);
        if (row >= static_cast<size_t>(p.rows)) continue;
        const uint32_t* from = p.codes + row * row_words + group * 8 + static_cast<size_t>(2 * step);
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const uint32_t pair = from[upper] >> (8 * t);
          out |= (pair & 15u) << (4 * (half + 2 * upper)) | (pair >> 4 & 15u) << (4 * (half + 2 * upper + 4));
        }
      }
    } else {
      const int at = word - kCodeWords;
      const size_t row = tile * kTileRows + static_cast<size_t>(at / 2 + 8 * (at % 2));
      if (row < static_cast<size_t>(p.rows))
        out = p.scales[row * groups + group] | static_cast<uint32_t>(p.biases[row * groups + group]) << 16;
    }
    p.records[i] = out;
  }
}

}  // namespace

void launch_repack_q4(const RepackQ4& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.grid = dim3(264);
  launch(repack_q4, p, shape, stream);
}

}  // namespace lily::cuda
