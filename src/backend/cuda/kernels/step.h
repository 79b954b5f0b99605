// What kernels read of a step (backend::StepInputs), on the device. The host fills one copy a step in flight;
// the pointers are the same in every step.
#pragma once

#include <cstdint>

#include "backend/cuda/kernels/host_types.h"

namespace lily::cuda {

struct SampleRow {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint32_t seed_low, seed_high, sequence, step;
};

struct StepCounts {
  int32_t n_rows, n_outputs, n_segments,
      n_tokens;     // n_tokens: ids from here on are padding of the vocabulary
  uint32_t serial;  // which step this is, for TokenReport
};

// An output's token on its way to the host: one store of a step's last kernel to memory of the host, which
// polls it. A copy and an event would stand between this step's graph and the next one's.
using TokenReport = uint64_t;  // serial << 32 | token

struct StepView {
  const StepCounts* counts;
  const int32_t* tokens;            // [rows] ids, or -1: read the token slot
  const int32_t* positions;         // [rows]
  const int32_t* token_in;          // [rows] token slot
  const int32_t* table_first;       // [rows] first entry of the row's sequence in block_table
  const int32_t* state_src;         // [segments], -1: zero state; of decode rows also [rows]
  const int32_t* state_dst;         // [segments]
  const int32_t* segment_row;       // [segments + 1] first row
  const int32_t* segment_position;  // [segments]
  const int32_t* block_table;
  const int32_t* output_rows;  // [outputs]
  const int32_t* token_out;    // [outputs] token slot of the row's segment, -1: none
  const SampleRow* sampling;   // [outputs]
  int32_t* token_slots;        // all token slots of the device
  float2* rope;  // [rows][32] cos and sin of the row's angles, filled by the first kernel of a step
};

}  // namespace lily::cuda
