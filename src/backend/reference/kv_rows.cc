#include "backend/reference/kv_rows.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "model/int8_group.h"

namespace lily::backend::reference {

using model::kInt8Group;

KvRows::KvRows(plan::KvType type, size_t n_values) {
  constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();
  if (type != plan::KvType::int8) {
    values_.assign(n_values, kUnwritten);
    return;
  }
  codes_.assign(n_values, 0);
  scales_.assign(n_values / kInt8Group, to_f16(kUnwritten));
}

void KvRows::write(size_t first, std::span<const float> x) {
  if (codes_.empty()) {
    std::copy(x.begin(), x.end(), values_.begin() + static_cast<std::ptrdiff_t>(first));
    return;
  }
  LILY_CHECK(first % kInt8Group == 0 && x.size() % kInt8Group == 0, "{} values from {}", x.size(), first);
  for (size_t i = 0; i < x.size(); i += kInt8Group)
    scales_[(first + i) / kInt8Group] = model::to_int8_group(
        x.subspan(i).first<kInt8Group>(), std::span(codes_).subspan(first + i).first<kInt8Group>());
}

void KvRows::read(size_t first, std::span<float> x) const {
  if (codes_.empty()) {
    std::copy_n(values_.begin() + static_cast<std::ptrdiff_t>(first), x.size(), x.begin());
    return;
  }
  LILY_CHECK(first % kInt8Group == 0 && x.size() % kInt8Group == 0, "{} values from {}", x.size(), first);
  for (size_t i = 0; i < x.size(); i += kInt8Group)
    model::from_int8_group(scales_[(first + i) / kInt8Group],
                           std::span(codes_).subspan(first + i).first<kInt8Group>(),
                           x.subspan(i).first<kInt8Group>());
}

}  // namespace lily::backend::reference
