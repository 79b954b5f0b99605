// attention_decode without one of its mechanisms: D5 (coalesced reads), D6 (one reading of a key for all its
// query heads), D7 (the cache cut into splits).
#pragma once

#include "backend/cuda/kernels/attention_decode.h"

namespace lily::cuda {

struct AttentionAblation {
  AttentionDecode attention;  // `partial` has attention_ablation_partial_floats
  bool coalesced = true;      // D5
  bool packed = true;         // D6
  bool split = true;          // D7
};
inline constexpr int kAblationSplits = 64;  // of a KV head, at most
constexpr size_t attention_ablation_partial_floats(int rows, int n_q_heads) {
  return static_cast<size_t>(rows) * static_cast<size_t>(n_q_heads) * kAblationSplits * 260;
}
void launch_attention_ablation(const AttentionAblation& p, cudaStream_t stream);

}  // namespace lily::cuda
