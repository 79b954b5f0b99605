// linear_q4_decode. Grid: one block of 16 warps an SM, each with consecutive 16-row tiles of the
// row-concatenated weight. Bound by weight bytes: a block asks the copy engine for all its tiles before it
// waits for the kernel in front, stages (and normalises) the activation, then multiplies tile after tile as
// they arrive. Weights too large for that (the head) go through a ring of slots, one ring a warp, and need no
// sums between warps.
#include "backend/cuda/kernels/linear_decode.h"

#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/q4_gemv.h"

namespace lily::cuda {
namespace {

constexpr int kWarps = 16;
constexpr unsigned kThreads = kWarps * 32;
constexpr unsigned kSharedLimit = 224 << 10;  // bytes of dynamic shared memory a block may ask for
constexpr int kMaxTilesPerBlock = 16;
// Clock cycles before a layer's first projections ask for their weights: the small reads of the kernel in
// front, the experts' down projection, would otherwise wait behind 14 MB, and its end with them.
constexpr unsigned kDelay = 2000;
constexpr int kRingGroups = 4;  // records of a ring slot
constexpr int kRingSlots = 4;   // slots of a warp

// Shared memory, in this order.
struct Layout {
  unsigned records, x, sums, partial, squares, barriers, total;  // squares: [rows][kWarps] of the norm
};
__host__ __device__ Layout layout(const LinearDecode& p, int padded_rows, bool ring) {
  const unsigned n_groups = static_cast<unsigned>(p.in / kGroupCols),
                 rows = static_cast<unsigned>(padded_rows);
  Layout l{};
  l.records = 0;
  l.x = ring ? kWarps * kRingSlots * kRingGroups * kRecordBytes
             : static_cast<unsigned>(p.tiles_per_block) * n_groups * kRecordBytes;
  l.sums = l.x + rows * staged_row_bytes(p.in) + kStagedSlack;
  l.partial = l.sums + (rows * n_groups * 8 + 15) / 16 * 16;
  l.squares =
      l.partial +
      (ring ? 0u : static_cast<unsigned>(p.tiles_per_block * p.units_per_tile) * rows * kTileRows * 4);
  l.barriers = l.squares + rows * kWarps * 4;
  l.total = l.barriers + (ring ? kWarps * kRingSlots : kMaxTilesPerBlock) * 8u;
  return l;
}

__device__ __forceinline__ const unsigned char* tile_records(const LinearDecode& p, int tile, int* piece,
                                                             int* first_row) {
  int i = 0;
  while (true) {
    const int n = (p.pieces[i].n_rows + kTileRows - 1) / kTileRows;
    if (tile < n || i + 1 == p.n_pieces) break;
    tile -= n;
    ++i;
  }
  *piece = i;
  *first_row = tile * kTileRows;
  return p.pieces[i].records +
         static_cast<size_t>(tile) * static_cast<size_t>(p.in / kGroupCols) * kRecordBytes;
}

template <int kRows>
__device__ __forceinline__ void stage(const LinearDecode& p, const NormPart& norm, unsigned char* shared,
                                      const Layout& l) {
  auto* scales = reinterpret_cast<GroupScale*>(shared + l.sums);
  for (int r = 0; r < kRows; ++r) {
    unsigned char* staged = shared + l.x + static_cast<unsigned>(r) * staged_row_bytes(p.in);
    if (r >= p.rows) {  // columns of B without a row: their sums are not stored
      for (unsigned i = threadIdx.x; i < static_cast<unsigned>(p.in) / 2; i += kThreads)
        reinterpret_cast<uint32_t*>(staged)[i] = 0;
      for (unsigned i = threadIdx.x; i < static_cast<unsigned>(p.in / kGroupCols); i += kThreads)
        scales[i * kRows + static_cast<unsigned>(r)] = make_float2(0, 0);
      continue;
    }
    const size_t offset = static_cast<size_t>(r) * static_cast<size_t>(p.x_stride);
    const void* row = p.x_f32 ? static_cast<const void*>(static_cast<const float*>(p.x) + offset)
                              : static_cast<const void*>(static_cast<const uint16_t*>(p.x) + offset);
    if (p.norm != nullptr)
      stage_norm_part(
          weigh_row(row, p.x_f32, norm, p.in, reinterpret_cast<float*>(shared + l.squares) + r * kWarps),
          p.in, staged, scales + r, kRows);
    else stage_bf16_row(static_cast<const uint16_t*>(row), p.in, staged, scales + r, kRows);
  }
}

__device__ __forceinline__ void finish(const LinearDecode& p, int col, int row, float sum, float residual) {
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(p.y_stride) + static_cast<size_t>(col);
  if (p.residual_in != nullptr) {
    p.residual_out[at] = residual + sum;
    return;
  }
  if (p.n_tokens != 0 && col >= p.n_tokens) sum = -INFINITY;
  if (p.y_f32) static_cast<float*>(p.y)[at] = sum;
  else static_cast<uint16_t*>(p.y)[at] = static_cast<uint16_t>(bf16_bits(sum));
}

template <int kRows>
__global__ void __launch_bounds__(kThreads) linear_q4_decode(LinearDecode p) {
  unsigned char* shared = shared_memory();
  const Layout l = layout(p, kRows, false);
  auto* barriers = reinterpret_cast<MBarrier*>(shared + l.barriers);
  const int block = static_cast<int>(blockIdx.x), n_blocks = static_cast<int>(gridDim.x);
  const int first_tile = block * p.n_tiles / n_blocks,
            n_tiles = (block + 1) * p.n_tiles / n_blocks - first_tile;
  const int n_groups = p.in / kGroupCols;
  const unsigned tile_bytes = static_cast<unsigned>(n_groups) * kRecordBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < n_tiles; ++i) mbarrier_init(&barriers[i], 1);
    mbarrier_init_fence();
    if (p.norm != nullptr) spin(kDelay);
    for (int i = 0; i < n_tiles; ++i) {
      int piece, row;
      const unsigned char* records = tile_records(p, first_tile + i, &piece, &row);
      mbarrier_expect(&barriers[i], tile_bytes);
      bulk_copy(shared + static_cast<unsigned>(i) * tile_bytes, records, tile_bytes, &barriers[i]);
    }
  }
  // The column that this thread finishes first (mostly the only one); -1: padding.
  const auto column_of = [&](int tile) {
    int piece, first_row;
    tile_records(p, first_tile + tile, &piece, &first_row);
    const int weight_row = first_row + static_cast<int>(threadIdx.x) % kTileRows;
    return weight_row < p.pieces[piece].n_rows ? p.pieces[piece].first_col + weight_row : -1;
  };
  const auto residual_at = [&](int row, int col) {
    return p.residual_in == nullptr || col < 0
               ? 0.0f
               : load_l2(p.residual_in + static_cast<size_t>(row) * static_cast<size_t>(p.y_stride) +
                         static_cast<size_t>(col));
  };
  constexpr int kTilesAtOnce = static_cast<int>(kThreads) / kTileRows;
  const int my_tile =
      static_cast<int>(threadIdx.x) / kTileRows;  // and every kTilesAtOnce-th from there, row by row
  int col = my_tile < n_tiles ? column_of(my_tile) : -1;
  const NormPart norm = load_norm_weight(p.norm, p.in);
  pdl_wait();
  pdl_trigger();
  float residual = residual_at(0, col);  // wanted at the end, asked for now
  stage<kRows>(p, norm, shared, l);
  block_sync();

  auto* partial = reinterpret_cast<float*>(shared + l.partial);
  const auto* scales = reinterpret_cast<const GroupScale*>(shared + l.sums);
  const auto factor_of = [&](int row) {
    return p.norm == nullptr
               ? 1.0f
               : norm_factor<kWarps>(reinterpret_cast<const float*>(shared + l.squares) + row * kWarps, p.in,
                                     p.epsilon);
  };
  const int n_units = n_tiles * p.units_per_tile;
  int tile = 0, in_tile = static_cast<int>(threadIdx.x / 32);
  for (int unit = in_tile; unit < n_units; unit += kWarps, in_tile += kWarps) {
    for (; in_tile >= p.units_per_tile; in_tile -= p.units_per_tile) ++tile;
    const int first = in_tile * p.groups_per_unit;
    const int n = n_groups - first < p.groups_per_unit ? n_groups - first : p.groups_per_unit;
    mbarrier_wait(&barriers[tile], 0);
    const auto sum = sum_groups<kRows>(
        shared + static_cast<unsigned>(tile) * tile_bytes + static_cast<unsigned>(first) * kRecordBytes, n,
        shared + l.x + first * 2 * kGroupCols, staged_row_bytes(p.in), scales + first * kRows);
    store_unit<kRows>(sum, partial + unit * kRows * kTileRows);
  }
  float factor = factor_of(0);
  block_sync();
  for (int row = 0; row < p.rows; ++row) {
    if (row > 0) factor = factor_of(row);
    for (int i = my_tile; i < n_tiles; i += kTilesAtOnce) {
      if (row > 0 || i >= kTilesAtOnce) {
        col = column_of(i);
        residual = residual_at(row, col);
      }
      if (col < 0) continue;
      const float* first_unit = partial + (i * p.units_per_tile * kRows + row) * kTileRows +
                                static_cast<int>(threadIdx.x) % kTileRows;
      finish(p, col, row, factor * sum_units(first_unit, p.units_per_tile, kRows * kTileRows), residual);
    }
  }
}

// Warp w of block b takes tiles w * n_blocks + b and every n_warps-th from there, so that all SMs have as
// many; each is summed by one warp from its own ring.
template <int kRows>
__global__ void __launch_bounds__(kThreads) linear_q4_decode_ring(LinearDecode p) {
  unsigned char* shared = shared_memory();
  const Layout l = layout(p, kRows, true);
  constexpr unsigned kSlotBytes = kRingGroups * kRecordBytes;
  const unsigned warp = threadIdx.x / 32, lane = lane_id();
  unsigned char* ring = shared + warp * kRingSlots * kSlotBytes;
  auto* barriers = reinterpret_cast<MBarrier*>(shared + l.barriers) + warp * kRingSlots;
  const int n_groups = p.in / kGroupCols, slots_per_tile = (n_groups + kRingGroups - 1) / kRingGroups;
  const int first_tile = static_cast<int>(warp * gridDim.x + blockIdx.x),
            step = static_cast<int>(gridDim.x) * kWarps;
  const int my_tiles = first_tile < p.n_tiles ? (p.n_tiles - first_tile + step - 1) / step : 0;
  const int n_slots = my_tiles * slots_per_tile;
  const auto request = [&](int slot) {  // by one lane
    const int tile = first_tile + slot / slots_per_tile * step, first = slot % slots_per_tile * kRingGroups;
    const int n = n_groups - first < kRingGroups ? n_groups - first : kRingGroups;
    int piece, row;
    const unsigned char* records =
        tile_records(p, tile, &piece, &row) + static_cast<size_t>(first) * kRecordBytes;
    MBarrier* b = &barriers[slot % kRingSlots];
    mbarrier_expect(b, static_cast<unsigned>(n) * kRecordBytes);
    bulk_copy(ring + static_cast<unsigned>(slot % kRingSlots) * kSlotBytes, records,
              static_cast<unsigned>(n) * kRecordBytes, b);
  };
  if (lane == 0) {
    for (int i = 0; i < kRingSlots; ++i) mbarrier_init(&barriers[i], 1);
    mbarrier_init_fence();
    for (int i = 0; i < kRingSlots && i < n_slots; ++i) request(i);
  }
  const NormPart norm = load_norm_weight(p.norm, p.in);
  pdl_wait();
  pdl_trigger();
  stage<kRows>(p, norm, shared, l);
  block_sync();

  const auto* scales = reinterpret_cast<const GroupScale*>(shared + l.sums);
  UnitSum<kRows> total{};
  for (int slot = 0; slot < n_slots; ++slot) {
    const int first = slot % slots_per_tile * kRingGroups;
    const int n = n_groups - first < kRingGroups ? n_groups - first : kRingGroups;
    mbarrier_wait(&barriers[slot % kRingSlots], static_cast<unsigned>(slot / kRingSlots) & 1);
    const auto sum = sum_groups<kRows>(ring + static_cast<unsigned>(slot % kRingSlots) * kSlotBytes, n,
                                       shared + l.x + first * 2 * kGroupCols, staged_row_bytes(p.in),
                                       scales + first * kRows);
#pragma unroll
    for (int h = 0; h < UnitSum<kRows>::kHalves; ++h) {
      total.acc[h][0] += sum.acc[h][0];
      total.acc[h][1] += sum.acc[h][1];
    }
    warp_sync();
    if (lane == 0 && slot + kRingSlots < n_slots) request(slot + kRingSlots);
    if (slot % slots_per_tile != slots_per_tile - 1) continue;
    int piece, first_row;
    tile_records(p, first_tile + slot / slots_per_tile * step, &piece, &first_row);
    const unsigned g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row_in_weight = first_row + static_cast<int>(g) + 8 * half;
      if (row_in_weight >= p.pieces[piece].n_rows) continue;
      const int col = p.pieces[piece].first_col + row_in_weight;
      const auto finish_row = [&](int row, float y) {
        const size_t at =
            static_cast<size_t>(row) * static_cast<size_t>(p.y_stride) + static_cast<size_t>(col);
        const float factor =
            p.norm == nullptr
                ? 1.0f
                : norm_factor<kWarps>(reinterpret_cast<const float*>(shared + l.squares) + row * kWarps, p.in,
                                      p.epsilon);
        finish(p, col, row, factor * y, p.residual_in == nullptr ? 0.0f : p.residual_in[at]);
      };
#pragma unroll
      for (int h = 0; h < UnitSum<kRows>::kHalves; ++h) {
        const int row = static_cast<int>(t) + h * kRowsAtOnce;
        if (row < p.rows) finish_row(row, total.acc[h][half]);
      }
    }
#pragma unroll
    for (auto& half : total.acc) half[0] = half[1] = 0;
  }
}

}  // namespace

void launch_linear_decode(LinearDecode p, int n_sms, cudaStream_t stream) {
  p.n_tiles = 0;
  for (int i = 0; i < p.n_pieces; ++i) p.n_tiles += (p.pieces[i].n_rows + kTileRows - 1) / kTileRows;
  p.tiles_per_block = (p.n_tiles + n_sms - 1) / n_sms;
  const int n_groups = p.in / kGroupCols, padded = p.rows == 1 ? 1 : kMaxRows;
  const UnitSplit split = split_units(p.tiles_per_block, n_groups, kWarps);
  p.units_per_tile = split.units_per_tile;
  p.groups_per_unit = split.groups_per_unit;
  // The same choice for 1 and for 8 rows: it decides the order of sums.
  const bool ring = p.tiles_per_block > kMaxTilesPerBlock || layout(p, kMaxRows, false).total > kSharedLimit;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.grid = dim3(static_cast<unsigned>(ring || p.n_tiles > n_sms ? n_sms : p.n_tiles));
  shape.shared_bytes = alone_on_an_sm(layout(p, padded, ring).total);
  if (ring)
    launch(p.rows == 1 ? linear_q4_decode_ring<1> : linear_q4_decode_ring<kMaxRows>, p, shape, stream);
  else launch(p.rows == 1 ? linear_q4_decode<1> : linear_q4_decode<kMaxRows>, p, shape, stream);
}

}  // namespace lily::cuda
