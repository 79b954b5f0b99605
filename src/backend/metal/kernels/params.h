// What host and kernels share: fixed argument indices, and the structures behind them. Fixed-width scalars
// only; sizes are checked on both sides.
#ifndef LILY_METAL_PARAMS_H
#define LILY_METAL_PARAMS_H

#ifdef __METAL_VERSION__
#define LILY_CONSTANT constant constexpr
#else
#include <cstdint>
namespace lily::metal::kernels {
#define LILY_CONSTANT inline constexpr
#endif

LILY_CONSTANT uint32_t kTopK = 8;             // experts a token
LILY_CONSTANT uint32_t kAttentionHead = 256;  // values of an attention head
LILY_CONSTANT uint32_t kRotaryPairs = 32;     // leading pairs (i, i + 32) that rotate
LILY_CONSTANT uint32_t kDeltaHead = 128;      // values of a delta-net head
LILY_CONSTANT uint32_t kTaps = 4;             // of the short convolution
LILY_CONSTANT uint32_t kMixerChannels = 384;  // q, k and v channels that one value head convolves
LILY_CONSTANT uint32_t kCacheTokens = 64;     // in a KV block
LILY_CONSTANT uint32_t kWordBytes = 16;       // of a word that strides and copies count
LILY_CONSTANT uint32_t kGroup = 64;           // weights that share a scale
LILY_CONSTANT float kEpsilon = 1e-6f;         // of every norm
LILY_CONSTANT uint32_t kPackedHeads = 4;      // query heads of a threadgroup (D6)
LILY_CONSTANT uint32_t kSplitTokens = 1024;   // keys of a part in fixed-block attention (D7)
LILY_CONSTANT uint32_t kMaxTileRows = 32;     // rows of x in a tile of a matrix product
LILY_CONSTANT uint32_t kQueryTile = 8;        // rows of a prefill attention tile
LILY_CONSTANT uint32_t kScanBlock = 32;       // tokens of a block in the block-wise delta scan
LILY_CONSTANT uint32_t kMaxRanked = 256;      // candidates that the vocabulary kernels can rank
LILY_CONSTANT uint32_t kSampleRanked = 64;  // largest top-k that sampling ranks; beyond, it reads all logits
LILY_CONSTANT uint32_t kRankChunk = 2048;   // logits that one threadgroup ranks

// What an output element becomes.
LILY_CONSTANT uint32_t kStoreBf16 = 0;
LILY_CONSTANT uint32_t kStoreF32 = 1;
LILY_CONSTANT uint32_t kAddResidual = 2;  // fp32: residual + value

// The step, written by the host before each one.
struct StepHeader {
  uint32_t n_rows;
  uint32_t n_outputs;
  uint32_t n_segments;
  uint32_t n_tokens;  // real ids of the vocabulary; the rest is padding
  uint32_t n_query_tiles;
  // From one state slot to the next, and from one KV block to the next, in words of kWordBytes. Kernels are
  // given one layer's part of the first.
  uint32_t slot_words;
  uint32_t block_words;
  uint32_t reserved;
};

struct StepRow {
  int32_t token;  // -1: read the segment's token_in
  uint32_t segment;
  uint32_t position;
  uint32_t reserved;
};

struct StepSegment {
  uint32_t first_row;
  uint32_t n_rows;
  uint32_t position;  // of the first row
  int32_t src;        // state slot, -1: zero
  uint32_t dst;
  uint32_t first_block;  // in the block table
  int32_t token_in;      // token slot, -1: none
  int32_t token_out;
};

struct QueryTile {  // at most kQueryTile rows of one segment
  uint32_t first_row;
  uint32_t n_rows;
};

struct StepSampling {
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
  uint32_t seed_low;
  uint32_t seed_high;
  uint32_t sequence;
  uint32_t step;
};

// A linear weight is one range of memory: codes (or bf16 values) first; scales and biases, the fields of
// these names here, are bytes from its start.

// y = x W^T for up to four weights whose output rows follow one another.
struct LinearParams {
  uint32_t in;
  uint32_t x_stride;  // values
  uint32_t x_first;   // first column of x
  uint32_t y_stride;
  uint32_t y_first;
  uint32_t store;       // kStoreBf16 ...
  uint32_t of_outputs;  // rows are the step's outputs, else its tokens
  uint32_t n_weights;
  uint32_t end[4];  // last output row + 1 of each weight
  uint32_t scales[4];
  uint32_t biases[4];
};

struct RowsParams {  // norms, sums, copies
  uint32_t width;
  uint32_t of_outputs;
  uint32_t per_row;  // rows of the value for each row of the step: 1 or kTopK
  uint32_t a_stride, a_first;
  uint32_t b_stride, b_first;
  uint32_t y_stride;
};

struct DeltaParams {
  uint32_t n_key_heads, n_value_heads;
  uint32_t qkv_stride, qkv_first;
  uint32_t z_stride, z_first;
  uint32_t b_stride, b_first;
  uint32_t a_stride, a_first;
  uint32_t v_stride, v_first;
  uint32_t y_stride;
};

struct HeadParams {    // query and key preparation
  uint64_t turns[32];  // 2^64 parts of a turn that pair i rotates by for each position
  uint32_t n_q_heads, n_kv_heads;
  uint32_t x_stride, x_first, head_stride;
  uint32_t k_stride, k_first;
  uint32_t v_stride, v_first;
  uint32_t y_stride;
};

struct AttentionParams {
  uint64_t turns[32];  // as in HeadParams
  uint32_t n_q_heads, n_kv_heads;
  uint32_t q_stride;
  uint32_t gate_stride, gate_first;
  uint32_t y_stride;
  uint32_t gated;
  uint32_t n_parts;  // bound, fixed-block attention
  // Queries, keys and values of the step before their preparation, all in one value; queries are in front of
  // their gates.
  uint32_t prepares;
  uint32_t k_first, v_first;
  uint32_t reserved[3];
};

struct RouterParams {
  uint32_t n_experts;
  uint32_t stride, first;
  uint32_t tile_small, tile_large, large_from;
};

struct ExpertsParams {
  uint32_t in, out;
  uint32_t x_stride;
  uint32_t y_stride;
  uint32_t from_tokens;              // x has a row a token, else a row an assignment
  uint32_t first_slot;               // slot 0 .. 7: routed, kTopK: shared
  uint32_t shared_in;                // the shared expert's width
  uint32_t shared_bits;              // of its weights
  uint32_t shared_given;             // its result is an input, in `shared`
  uint32_t gate_stride, gate_first;  // of its gate's logit
  uint32_t n_experts;                // with routing inside
  uint32_t router_stride, router_first;
  uint32_t scales[2], biases[2];  // gate and up, or the one weight
  uint32_t shared_scales[2], shared_biases[2];
};

struct VocabularyParams {
  uint32_t stride;    // of a row of logits
  uint32_t n_chunks;  // parts of the previous level
  uint32_t n_kept;    // by each part
  uint32_t chunk;     // logits a part
  uint32_t n_wanted;  // candidates of the op
  uint32_t n_out;     // parts of this level
};

struct CopyParams {
  uint32_t n;       // 16-byte words of a slot
  uint32_t stride;  // from slot to slot, in words
  int32_t from;     // slot, -1: zeros
  uint32_t to;
};

#ifdef __METAL_VERSION__
static_assert(sizeof(LinearParams) == 80, "shared with the host");
static_assert(sizeof(HeadParams) == 296, "shared with the host");
static_assert(sizeof(ExpertsParams) == 88, "shared with the host");
static_assert(sizeof(AttentionParams) == 312, "shared with the host");
#else
static_assert(sizeof(LinearParams) == 80 && sizeof(HeadParams) == 296 && sizeof(ExpertsParams) == 88);
static_assert(sizeof(AttentionParams) == 312);
static_assert(sizeof(StepHeader) == 32 && sizeof(StepRow) == 16 && sizeof(StepSegment) == 32);
}  // namespace lily::metal::kernels
#endif
#undef LILY_CONSTANT

#endif
