// Normalisations of fp32 rows. Statistics, product and weight in fp32; sums run in one fixed order per
// instruction set. All lengths are multiples of 16. Input and output may be the same row.
#pragma once

#include <cstdint>

namespace lily::backend::cpu {

// (2) y = x / sqrt(mean(x^2) + eps) * w.
void rms_norm(const float* x, const float* w, float* y, int64_t n);

// (16) y = x / sqrt(sum(x^2) + eps) * scale: eps inside the sum.
void l2_norm(const float* x, float scale, float* y, int64_t n);

// (20) y = RMSNorm(o) * w * silu(z): norm first, gate second.
void gated_norm(const float* o, const float* w, const float* z, float* y, int64_t n);

}  // namespace lily::backend::cpu
