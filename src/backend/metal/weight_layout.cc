#include "backend/metal/weight_layout.h"

#include "base/error.h"

namespace lily::metal {
namespace {

constexpr int64_t kAlignment = 256;
int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

int code_bits(model::Storage storage) {
  switch (storage) {
    case model::Storage::q4:
      return 4;
    case model::Storage::q8:
      return 8;
    case model::Storage::bf16:
      return 16;
    case model::Storage::f32:
      break;
  }
  LILY_CHECK(false, "storage {} has no codes", static_cast<int>(storage));
  return 0;
}

WeightLayout weight_layout(const model::Dims& dims, model::WeightId id, model::Storage storage) {
  const model::WeightSpec spec = model::weight_spec(dims, id);
  WeightLayout l;
  l.storage = spec.quantisable ? storage : model::Storage::f32;  // small weights are widened while loading
  l.in = spec.shape.back();
  l.rows = spec.n_elements() / l.in;
  if (l.storage == model::Storage::f32) {
    l.codes_bytes = l.bytes = aligned(spec.n_elements() * 4);
    return l;
  }
  const int bits = code_bits(l.storage);
  l.codes_bytes = spec.n_elements() * bits / 8;
  l.bytes = aligned(l.codes_bytes);
  if (bits == 16) return l;
  const int64_t group_bytes = spec.n_elements() / model::kQuantGroup * 2;
  l.scales = l.bytes;
  l.biases = l.scales + aligned(group_bytes);
  l.bytes = l.biases + aligned(group_bytes);
  return l;
}

}  // namespace lily::metal
