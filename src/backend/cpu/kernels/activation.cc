#include "backend/cpu/kernels/activation.h"

#include <algorithm>
#include <cmath>

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/activation.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

void swiglu_rows(const float* gate, const float* up, float* y, int64_t n) {
  const hn::CappedTag<float, 16> d;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(silu_of(d, hn::LoadU(d, gate + i)), hn::LoadU(d, up + i)), d, y + i);
}

void sigmoid_gate_rows(const float* o, const float* gate, float* y, int64_t n) {
  const hn::CappedTag<float, 16> d;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(hn::LoadU(d, o + i), sigmoid_of(d, hn::LoadU(d, gate + i))), d, y + i);
}

void add(const float* x, const float* residual, float* y, int64_t n) {
  const hn::CappedTag<float, 16> d;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Add(hn::LoadU(d, residual + i), hn::LoadU(d, x + i)), d, y + i);
}

void muladd(const float* x, float factor, float* y, int64_t n) {
  const hn::CappedTag<float, 16> d;
  const auto f = hn::Set(d, factor);
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::MulAdd(f, hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, y + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(swiglu_rows);
HWY_EXPORT(sigmoid_gate_rows);
HWY_EXPORT(add);
HWY_EXPORT(muladd);

void swiglu(const float* gate, const float* up, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(swiglu_rows)(gate, up, y, n);
}

void sigmoid_gate(const float* o, const float* gate, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(sigmoid_gate_rows)(o, gate, y, n);
}

void add_rows(const float* x, const float* residual, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(add)(x, residual, y, n);
}

void multiply_add(const float* x, float factor, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(muladd)(x, factor, y, n);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float log_decay(float a_log, float a, float dt_bias) {
  const float y = a + dt_bias;
  const float softplus = std::max(y, 0.0f) + std::log1p(std::exp(-std::abs(y)));
  return -std::exp(a_log) * softplus;
}

}  // namespace lily::backend::cpu
#endif
