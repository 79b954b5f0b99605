// Y^T = W X^T by mma.sync: the products of prefill on chips without warpgroup products. Runs on every chip
// from Hopper on; two to three times slower there than prefill_linear.cu.
//
// Persistent blocks of 8 warps; a warp has two tiles of 16 outputs (one of the gate and the same of the up
// projection) and up to 64 rows at a time. Weights go from memory into A fragments without a stop: a record
// of mma_q4 is in their order. Rows go through two buffers of [64 rows][64] bf16 with the 128-byte swizzle.
// Bound by the matrix rate of mma.sync and by turning codes into operands. fp32 accumulation in one chain an
// (output, row), as in prefill_linear.cu.
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/nibbles.h"
#include "backend/cuda/kernels/prefill_items.h"

namespace lily::cuda {
namespace {

constexpr int kWarps = 8;
constexpr unsigned kThreads = kWarps * 32;
constexpr int kRows = 64;  // at a time
constexpr uint32_t kTileBytes = kRows * 128;

// A lane's part of the records of both tiles in one group of columns.
struct Records {
  uint4 codes[2];
  uint2 scales[2];
};

template <Epilogue kEpilogue>
__device__ __forceinline__ void multiply_rows(const ProductParams& p, const Item& item, int first_row,
                                              uint32_t x) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = static_cast<int>(lane_id());
  const int n_rows = min(kRows, item.n_rows - first_row), n_pairs = (n_rows + 15) / 16;
  const int n_groups = p.n_cols / q4::kGroup;
  const auto tile_of = [&](int i) {
    return item.first_tile + (kEpilogue == Epilogue::swiglu ? warp : 2 * warp + i);
  };
  const unsigned char* records[2];
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::byte* matrix = kEpilogue == Epilogue::swiglu && i == 1 ? item.weights_up : item.weights;
    records[i] = reinterpret_cast<const unsigned char*>(matrix) +
                 static_cast<size_t>(tile_of(i)) * static_cast<size_t>(n_groups) * q4::kRecordBytes;
    exists[i] = tile_of(i) * q4::kTileRows < item.n_outputs;
  }
  const auto load = [&](int group) {
    Records r{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists[i]) continue;
      const unsigned char* record = records[i] + static_cast<size_t>(group) * q4::kRecordBytes;
      r.codes[i] = reinterpret_cast<const uint4*>(record)[lane];
      r.scales[i] = reinterpret_cast<const uint2*>(record + q4::kCodeBytes)[lane / 4];
    }
    return r;
  };
  // Pieces thread and thread + 256 of a tile's 512; rows past the end repeat the last one, and are not
  // stored.
  const unsigned char* from[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = item.first_row + first_row + min(thread / 8 + 32 * i, n_rows - 1);
    if (p.token_of_row) row = p.token_of_row[row];
    from[i] = reinterpret_cast<const unsigned char*>(p.x + static_cast<size_t>(row) *
                                                               static_cast<size_t>(p.n_cols)) +
              thread % 8 * 16;
  }
  const auto fetch = [&](int group) {
    const uint32_t to = x + static_cast<uint32_t>(group % 2) * kTileBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy_16(swizzled(to, thread / 8 + 32 * i, thread % 8), from[i] + static_cast<size_t>(group) * 128);
    copies_commit();
  };
  float acc[2][kRows / 8][4] = {};
  Records next = load(0);
  fetch(0);
  for (int group = 0; group < n_groups; ++group) {
    const Records now = next;
    copies_wait<0>();
    block_sync();  // the tile is there, and everyone has left the one before
    if (group + 1 < n_groups) {
      fetch(group + 1);
      next = load(group + 1);
    }
    const uint32_t tile = x + static_cast<uint32_t>(group % 2) * kTileBytes;
    uint32_t scale[2][2], bias[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) spread_scales(now.scales[i], scale[i], bias[i]);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) dequantise(a[i], word_of(now.codes[i], step), scale[i], bias[i]);
#pragma unroll
      for (int pair = 0; pair < kRows / 16; ++pair) {
        if (pair >= n_pairs) continue;
        uint32_t b[4];
        load_matrices(b, swizzled(tile, 16 * pair + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_16816(acc[i][2 * pair], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
          mma_16816(acc[i][2 * pair + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
        }
      }
    }
  }
  block_sync();  // before the buffers are filled for the next rows
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 8 * n + 2 * (lane % 4) + e % 2, in_tile = lane / 4 + e / 2 * 8;
      if (row >= n_rows) continue;
      if constexpr (kEpilogue == Epilogue::swiglu) {
        const int output = tile_of(0) * q4::kTileRows + in_tile;
        const float weight = p.row_weight[item.first_row + first_row + row];
        if (output < item.n_outputs)
          store_one<kEpilogue>(p, item, first_row + row, output, gated(acc[0][n][e], acc[1][n][e], weight));
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int output = tile_of(i) * q4::kTileRows + in_tile;
          if (output < item.n_outputs) store_one<kEpilogue>(p, item, first_row + row, output, acc[i][n][e]);
        }
      }
    }
}

template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads) linear_q4_mma_kernel(const __grid_constant__ ProductParams p) {
  pdl_wait();
  pdl_trigger();
  const uint32_t x = shared_address(shared_memory());
  const int per_expert = blocks_per_expert<kEpilogue>(p), n_items = count_items(p, per_expert);
  for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
    const Item item = find_item<kEpilogue>(p, index, per_expert);
    for (int row = 0; row < item.n_rows; row += kRows) multiply_rows<kEpilogue>(p, item, row, x);
  }
}

}  // namespace

void launch_products_mma(const ProductParams& p, Epilogue epilogue, int n_blocks, cudaStream_t stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(n_blocks)), kThreads, 2 * kTileBytes};
  switch (epilogue) {
    case Epilogue::bf16:
      return launch(linear_q4_mma_kernel<Epilogue::bf16>, p, shape, stream);
    case Epilogue::residual:
      return launch(linear_q4_mma_kernel<Epilogue::residual>, p, shape, stream);
    case Epilogue::floats:
      return launch(linear_q4_mma_kernel<Epilogue::floats>, p, shape, stream);
    case Epilogue::swiglu:
      return launch(linear_q4_mma_kernel<Epilogue::swiglu>, p, shape, stream);
  }
}

}  // namespace lily::cuda
