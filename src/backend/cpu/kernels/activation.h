// Elementwise functions of fp32 rows; lengths are multiples of 16. Output may be one of the inputs.
#pragma once

#include <cstdint>

namespace lily::backend::cpu {

void swiglu(const float* gate, const float* up, float* y, int64_t n);       // y = silu(gate) * up
void sigmoid_gate(const float* o, const float* gate, float* y, int64_t n);  // y = o * sigmoid(gate)
void add_rows(const float* x, const float* residual, float* y, int64_t n);  // y = residual + x
void multiply_add(const float* x, float factor, float* y, int64_t n);       // y += factor * x

float sigmoid(float x);
// (18) log decay -exp(a_log) * softplus(a + dt_bias), at most 0.
float log_decay(float a_log, float a, float dt_bias);

}  // namespace lily::backend::cpu
