// (19) the gated delta rule of one value head over consecutive rows of one sequence.
//
// State S [128 key dims][128 value dims] fp32. Threads divide (sequence, value head). A head's state passes
// in blocks of 32 columns, which stay in L1 for all rows: one load, one store and four FMAs per 16 elements a
// token, since
//   r = d S'k and o = q (d S + k delta) = d S'q + (q.k) delta
// let the update of a token be joined with the reads of the next one. A single row (decode) reads the state
// row by row instead, and writes it best where it was read. Bound by FMAs in a chunk, by the
// state's bytes in decode. All sums fp32, over key dims in rising order; the result does not depend on how
// rows are cut into chunks.
#pragma once

#include <cstdint>

namespace lily::backend::cpu {

struct DeltaArgs {
  const float* q = nullptr;  // [n_rows, qk_stride]: 128 values a row, normalised and scaled
  const float* k = nullptr;
  int64_t qk_stride = 0;
  const float* v = nullptr;  // [n_rows, v_stride]: 128 values a row
  int64_t v_stride = 0;
  const float* g = nullptr;  // [n_rows, gate_stride]: log decay, at most 0
  const float* beta = nullptr;
  int64_t gate_stride = 0;
  float* o = nullptr;  // [n_rows, o_stride]
  int64_t o_stride = 0;
  int64_t n_rows = 0;
  const float* state_in = nullptr;  // [128, 128]; null: zeros
  float* state_out = nullptr;       // [128, 128]; may be state_in
};

void delta_rule_scan(const DeltaArgs& args);

// P4's ablation: the same in blocks of 32 tokens in WY form (delta_rule_ablation.cc).
void delta_rule_blocks(const DeltaArgs& args);

}  // namespace lily::backend::cpu
