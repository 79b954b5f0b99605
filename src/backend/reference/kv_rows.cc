#include "backend/reference/kv_rows.h"

#include <array>
#include <cstring>

#include "base/error.h"
#include "base/half.h"
#include "model/int8_group.h"

namespace lily::backend::reference {

using model::kInt8Group;

size_t KvRows::n_bytes(plan::KvType type, size_t n_values) {
  return type == plan::KvType::int8 ? n_values / kInt8Group * model::kInt8GroupBytes
                                    : n_values * sizeof(float);
}

std::byte* KvRows::group(size_t first) const {
  LILY_CHECK(first % kInt8Group == 0, "a group from value {} on", first);
  return bytes_.subspan(first / kInt8Group * model::kInt8GroupBytes, model::kInt8GroupBytes).data();
}

void KvRows::write(size_t first, std::span<const float> x) {
  if (!is_int8_) {
    std::memcpy(bytes_.subspan(first * sizeof(float), x.size_bytes()).data(), x.data(), x.size_bytes());
    return;
  }
  LILY_CHECK(x.size() % kInt8Group == 0, "{} values", x.size());
  for (size_t i = 0; i < x.size(); i += kInt8Group) {
    std::array<int8_t, kInt8Group> codes{};
    const F16 scale = model::to_int8_group(x.subspan(i).first<kInt8Group>(), codes);
    std::memcpy(group(first + i), codes.data(), kInt8Group);
    std::memcpy(group(first + i) + kInt8Group, &scale, sizeof scale);
  }
}

void KvRows::read(size_t first, std::span<float> x) const {
  if (!is_int8_) {
    std::memcpy(x.data(), bytes_.subspan(first * sizeof(float), x.size_bytes()).data(), x.size_bytes());
    return;
  }
  LILY_CHECK(x.size() % kInt8Group == 0, "{} values", x.size());
  for (size_t i = 0; i < x.size(); i += kInt8Group) {
    std::array<int8_t, kInt8Group> codes;
    F16 scale;
    std::memcpy(codes.data(), group(first + i), kInt8Group);
    std::memcpy(&scale, group(first + i) + kInt8Group, sizeof scale);
    model::from_int8_group(scale, codes, x.subspan(i).first<kInt8Group>());
  }
}

}  // namespace lily::backend::reference
