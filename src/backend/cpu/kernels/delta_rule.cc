#include "backend/cpu/kernels/delta_rule.h"

#include <cmath>
#include <cstdint>

#include "model/dims.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels/delta_rule.cc"
#include "backend/cpu/kernels/simd_targets-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backend/cpu/kernels/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace lily::backend::cpu {
namespace HWY_NAMESPACE {

constexpr int kDim = model::kDeltaHeadDim;
constexpr int kVecs = 2;  // of columns at a time

// Columns [first, first + kVecs * lanes) of the state through all rows.
void scan_columns(const DeltaArgs& a, int64_t first) {
  const hn::CappedTag<float, 16> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kLanes = HWY_MAX_BYTES / 4;
  constexpr int kCols = kVecs * kLanes;
  alignas(64) float s[kDim * kCols];
  // The columns after these come meanwhile: lines so far apart are not what the processor's own prefetchers
  // look for.
  const float* ahead = a.state_in != nullptr && first + kCols < kDim ? a.state_in + first + kCols : nullptr;
  for (int i = 0; i < kDim; ++i) {
    if (ahead != nullptr)
      for (int c = 0; c < kCols; c += 16) __builtin_prefetch(ahead + i * kDim + c, 0, 2);
    for (int c = 0; c < kVecs; ++c) {
      const auto value =
          a.state_in != nullptr ? hn::LoadU(d, a.state_in + i * kDim + first + c * kLanes) : hn::Zero(d);
      hn::Store(value, d, s + i * kCols + c * kLanes);
    }
  }
  // The update of the row before, applied while this row reads: S = decay * S + k delta.
  const float* last_k = nullptr;
  V last_decay = hn::Zero(d);
  V delta[kVecs];
  for (V& v : delta) v = hn::Zero(d);
  for (int64_t t = 0; t < a.n_rows; ++t) {
    const float* k = a.k + t * a.qk_stride;
    const float* q = a.q + t * a.qk_stride;
    V read[kVecs], out[kVecs];
    for (int c = 0; c < kVecs; ++c) read[c] = out[c] = hn::Zero(d);
    for (int i = 0; i < kDim; ++i) {
      const V ki = hn::Set(d, k[i]), qi = hn::Set(d, q[i]);
      for (int c = 0; c < kVecs; ++c) {
        float* at = s + i * kCols + c * kLanes;
        V value = hn::Load(d, at);
        if (last_k != nullptr) {
          value = hn::MulAdd(hn::Set(d, last_k[i]), delta[c], hn::Mul(last_decay, value));
          hn::Store(value, d, at);
        }
        read[c] = hn::MulAdd(ki, value, read[c]);
        out[c] = hn::MulAdd(qi, value, out[c]);
      }
    }
    const V decay = hn::Set(d, std::exp(a.g[t * a.gate_stride]));
    const V beta = hn::Set(d, a.beta[t * a.gate_stride]);
    const V qk = hn::Set(d, dot_of(q, k, kDim));
    for (int c = 0; c < kVecs; ++c) {
      const auto v = hn::LoadU(d, a.v + t * a.v_stride + first + c * kLanes);
      delta[c] = hn::Mul(beta, hn::NegMulAdd(decay, read[c], v));
      hn::StoreU(hn::MulAdd(qk, delta[c], hn::Mul(decay, out[c])), d,
                 a.o + t * a.o_stride + first + c * kLanes);
    }
    last_k = k;
    last_decay = decay;
  }
  for (int i = 0; i < kDim; ++i) {
    for (int c = 0; c < kVecs; ++c) {
      V value = hn::Load(d, s + i * kCols + c * kLanes);
      if (last_k != nullptr) value = hn::MulAdd(hn::Set(d, last_k[i]), delta[c], hn::Mul(last_decay, value));
      hn::StoreU(value, d, a.state_out + i * kDim + first + c * kLanes);
    }
  }
}

// One row that comes to a state: rows of the state pass by (all 128 columns of them where registers hold
// their sums, which memory gives fastest; else 32 or 16), once for the sums and, out of L2, once for the
// update. The same operations in the same order for every element as in a scan. What follows the state, which
// is that of the next head, comes meanwhile.
constexpr int kStepVecs = HWY_MAX_BYTES == 64 ? 8 : 4;

void step_columns(const DeltaArgs& a, int64_t first) {
  const hn::CappedTag<float, 16> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kLanes = HWY_MAX_BYTES / 4;
  constexpr intptr_t kHeadBytes = intptr_t{kDim} * kDim * sizeof(float);
  V read[kStepVecs], out[kStepVecs];
  for (int c = 0; c < kStepVecs; ++c) read[c] = out[c] = hn::Zero(d);
  for (int i = 0; i < kDim; ++i) {
    const float* row = a.state_in + i * kDim + first;
    const V ki = hn::Set(d, a.k[i]), qi = hn::Set(d, a.q[i]);
    for (int c = 0; c < kStepVecs; ++c) {
      const V value = hn::LoadU(d, row + c * kLanes);
      read[c] = hn::MulAdd(ki, value, read[c]);
      out[c] = hn::MulAdd(qi, value, out[c]);
    }
    // A number: what stands there need not belong to the state.
    const intptr_t next = reinterpret_cast<intptr_t>(row) + kHeadBytes;
    for (int c = 0; c < kStepVecs * kLanes; c += 16)
      __builtin_prefetch(reinterpret_cast<const void*>(next + c * int64_t{sizeof(float)}), 0, 2);
  }
  const V decay = hn::Set(d, std::exp(a.g[0])), beta = hn::Set(d, a.beta[0]);
  const V qk = hn::Set(d, dot_of(a.q, a.k, kDim));
  for (int c = 0; c < kStepVecs; ++c) {
    const V v = hn::LoadU(d, a.v + first + c * kLanes);
    read[c] = hn::Mul(beta, hn::NegMulAdd(decay, read[c], v));  // delta
    hn::StoreU(hn::MulAdd(qk, read[c], hn::Mul(decay, out[c])), d, a.o + first + c * kLanes);
  }
  for (int i = 0; i < kDim; ++i) {
    const float* row = a.state_in + i * kDim + first;
    const V ki = hn::Set(d, a.k[i]);
    for (int c = 0; c < kStepVecs; ++c) {
      const V value = hn::MulAdd(ki, read[c], hn::Mul(decay, hn::LoadU(d, row + c * kLanes)));
      hn::StoreU(value, d, a.state_out + i * kDim + first + c * kLanes);
    }
  }
}

void scan(const DeltaArgs& args) {
  if (args.n_rows == 1 && args.state_in != nullptr) {
    for (int64_t first = 0; first < kDim; first += kStepVecs * HWY_MAX_BYTES / 4) step_columns(args, first);
    return;
  }
  for (int64_t first = 0; first < kDim; first += kVecs * HWY_MAX_BYTES / 4) scan_columns(args, first);
}

}  // namespace HWY_NAMESPACE
}  // namespace lily::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lily::backend::cpu {

HWY_EXPORT(scan);

void delta_rule_scan(const DeltaArgs& args) { HWY_DYNAMIC_DISPATCH(scan)(args); }

}  // namespace lily::backend::cpu
#endif
