// Which matrix kernel a product of prefill takes, and how its rows are cut into tiles
// (prefill_linear_kernel.h has the kernel for Hopper, prefill_linear_mma.cu the one for other chips).
#include <algorithm>

#include "backend/cuda/kernels/prefill_linear_kernel.h"

namespace lily::cuda {
namespace {

template <Epilogue kEpilogue, int kTile = kMaxTileTokens>
void start(const ProductParams& p, int n_blocks, cudaStream_t stream) {
  launch(linear_q4_kernel<kEpilogue, kTile, false>, p,
         LaunchShape{dim3(static_cast<unsigned>(n_blocks)), kThreads, Layout<kTile, false>::kSharedBytes},
         stream);
}

ProductParams expert_params(const ExpertArgs& args) {
  ProductParams p{};
  p.x = args.x;
  p.n_cols = args.n_cols;
  p.tiles = args.tiles;
  p.n_tiles = args.n_tiles;
  p.n_experts = args.n_experts;
  p.token_of_row = args.token_of_row;
  p.row_weight = args.row_weight;
  p.weights = args.weights;
  p.weights_up = args.weights_up;
  p.shared = args.shared;
  p.shared_up = args.shared_up;
  p.segments[0] = {nullptr, args.n_rows, args.out, args.n_rows};
  return p;
}

template <Epilogue kEpilogue>
void start_experts(const ExpertArgs& args, int n_multiprocessors, cudaStream_t stream) {
  const ProductParams p = expert_params(args);
  const int tile_rows = args.tile_rows;
  require(tile_rows == kMaxTileTokens || tile_rows == kFewTileTokens || tile_rows == kLeastTileTokens,
          "experts: tiles of 16, 32 or 128 rows");
  // Blocks of the other units: two an SM.
  if (args.expanded) return launch_products_expanded(p, kEpilogue, n_multiprocessors, stream);
  if (args.unit == ProductUnit::mma) return launch_products_mma(p, kEpilogue, 2 * n_multiprocessors, stream);
  if (args.unit == ProductUnit::fma) return launch_products_fma(p, kEpilogue, 2 * n_multiprocessors, stream);
  if (tile_rows <= kFewTileTokens) start<kEpilogue, kFewTileTokens>(p, 2 * n_multiprocessors, stream);
  else start<kEpilogue>(p, n_multiprocessors, stream);
}

// Rows a tile so that the last wave of blocks is as full as may be: waves * (time of a tile), where a tile
// costs its rows plus a fixed part for dequantising and storing.
int choose_tile_tokens(int n_tokens, int n_output_blocks, int n_multiprocessors) {
  constexpr int kFixedRows = 40;
  int best = kMaxTileTokens;
  int64_t best_cost = INT64_MAX;
  for (int tile = kMaxTileTokens; tile >= 16; tile -= 16) {
    const int64_t items = int64_t{n_output_blocks} * ((n_tokens + tile - 1) / tile);
    const int64_t waves = (items + n_multiprocessors - 1) / n_multiprocessors;
    const int64_t cost = waves * (tile + kFixedRows);
    if (cost < best_cost) best = tile, best_cost = cost;
  }
  return best;
}

}  // namespace

void linear_q4_prefill(const LinearArgs& args, int n_multiprocessors, cudaStream_t stream) {
  require(args.n_tokens > 0 && args.n_cols > 0 && args.n_cols % q4::kGroup == 0,
          "linear: rows, or columns of groups of 64");
  require(args.n_segments >= 1 && args.n_segments <= kMaxSegments, "linear: 1 to 4 segments");
  ProductParams p{};
  p.x = args.x;
  p.n_cols = args.n_cols;
  p.n_tokens = args.n_tokens;
  p.n_segments = args.n_segments;
  p.residual = args.residual;
  int n_blocks = 0;
  for (int s = 0; s < args.n_segments; ++s) {
    require(args.segments[s].n_rows % 8 == 0 || args.output == LinearOutput::floats,
            "linear: outputs in eights");
    p.segments[s] = args.segments[s];
    p.segment_items[s] = (args.segments[s].n_rows + kItemOutputs - 1) / kItemOutputs;
    n_blocks += p.segment_items[s];
  }
  p.tile_tokens = choose_tile_tokens(args.n_tokens, n_blocks, n_multiprocessors);
  p.n_token_tiles = (args.n_tokens + p.tile_tokens - 1) / p.tile_tokens;
  for (int s = 0; s < args.n_segments; ++s) p.segment_items[s] *= p.n_token_tiles;
  const int grid = std::min(n_blocks * p.n_token_tiles, n_multiprocessors);
  if (args.unit != ProductUnit::wgmma) {
    const Epilogue epilogue = args.output == LinearOutput::bf16       ? Epilogue::bf16
                              : args.output == LinearOutput::residual ? Epilogue::residual
                                                                      : Epilogue::floats;
    const auto start_other = args.unit == ProductUnit::mma ? launch_products_mma : launch_products_fma;
    return start_other(p, epilogue, std::min(n_blocks * p.n_token_tiles, 2 * n_multiprocessors), stream);
  }
  switch (args.output) {
    case LinearOutput::bf16:
      return start<Epilogue::bf16>(p, grid, stream);
    case LinearOutput::residual:
      return start<Epilogue::residual>(p, grid, stream);
    case LinearOutput::floats:
      return start<Epilogue::floats>(p, grid, stream);
  }
}

void experts_gate_up_q4_prefill(const ExpertArgs& args, int n_multiprocessors, cudaStream_t stream) {
  require(args.n_rows % 128 == 0 && args.n_cols % q4::kGroup == 0, "experts: width in 128s, hidden in 64s");
  start_experts<Epilogue::swiglu>(args, n_multiprocessors, stream);
}

void experts_down_q4_prefill(const ExpertArgs& args, int n_multiprocessors, cudaStream_t stream) {
  require(args.n_rows % 8 == 0 && args.n_cols % q4::kGroup == 0, "experts: hidden in 8s, width in 64s");
  start_experts<Epilogue::bf16>(args, n_multiprocessors, stream);
}

}  // namespace lily::cuda
