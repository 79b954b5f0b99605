// The ends of a step: token to embedding row, wanted rows to logits, logits to a token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"
#include "backend/cuda/kernels/step.h"

namespace lily::cuda {

// y[t] = row token[t] of the 4-bit embedding (file layout), rounded to bf16. Also fills step.rope.
struct EmbedRows {
  const uint32_t* codes = nullptr;                      // [vocab, hidden / 8]
  const uint16_t *scales = nullptr, *biases = nullptr;  // [vocab, hidden / 64] bf16
  const double* rope_frequency = nullptr;               // [32]
  int hidden = 0, vocab = 0, rows = 1;
  StepView step{};
  void* y = nullptr;  // [rows, hidden]
  bool y_f32 = true;
};
void launch_embed_rows(const EmbedRows& p, cudaStream_t stream);

// y[o] = x[output_rows[o]], rows of row_bytes (a multiple of 16).
struct GatherRows {
  const void* x = nullptr;
  void* y = nullptr;
  int row_bytes = 0, outputs = 1;
  StepView step{};
};
void launch_gather_rows(const GatherRows& p, cudaStream_t stream);

// Largest number of candidates, and of top_k that is served without searching the whole row.
inline constexpr int kMaxCandidates = 128;
inline constexpr int kScanBlocks = 128, kScanWarps = 16, kChunks = kScanBlocks * kScanWarps;

enum class Choice : int32_t { greedy, sample, candidates };

// docs/numerics.md, "Sampling"; the meaning is plan/sample.h's. Weights are held as multiples of 2^-40, so
// that sums do not depend on their order.
struct ChooseToken {
  Choice choice = Choice::greedy;
  const float* logits = nullptr;  // [outputs, vocab]
  int vocab = 0, outputs = 1, n_candidates = 0;
  StepView step{};
  int32_t* token = nullptr;        // [outputs]: greedy and sample
  TokenReport* reports = nullptr;  // [outputs], the host's memory: greedy and sample; null: none
  int32_t* ids = nullptr;          // [outputs, n_candidates]
  float* values = nullptr;         // [outputs, n_candidates]
  float* logsumexp = nullptr;      // [outputs]
  float* chunk_max = nullptr;      // scratch [outputs, kChunks]
  int32_t* chunk_id = nullptr;     // scratch [outputs, kChunks]: lowest id of the chunk's maximum
  float* chunk_sum = nullptr;      // scratch [outputs, kChunks]: sum of exp(x - chunk_max)
  uint64_t* weights = nullptr;     // scratch [outputs, vocab], for samples without a small top_k
};
void launch_choose_token(const ChooseToken& p, cudaStream_t stream);

}  // namespace lily::cuda
