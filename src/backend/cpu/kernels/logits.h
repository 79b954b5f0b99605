// Scans over one row of logits; what they are for is in lower_ending.cc. NaN counts as minus infinity. Any
// thread.
#pragma once

#include <cstdint>

namespace lily::backend::cpu {

inline constexpr int64_t kLogitChunk = 128;

// maxima[i] = the largest of logits[kLogitChunk * i ..], for the ceil(n / kLogitChunk) chunks of n logits.
void chunk_maxima(const float* logits, int64_t n, float* maxima);

// The sum of exp(logits[i] - largest) over n of them, none of which is larger; a chunk is summed in fp32, the
// rest in double. 0 if `largest` is minus infinity.
double sum_of_exponentials(const float* logits, int64_t n, float largest);

}  // namespace lily::backend::cpu
