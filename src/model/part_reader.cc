#include "model/part_reader.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/printable.h"

namespace lily::model {
namespace {

constexpr int64_t kScratchBytes = 1 << 20;

bool is_finite(Bf16 x) { return (x.bits & 0x7f80u) != 0x7f80u; }
bool is_finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }

template <typename T>
void check_finite(const Part& part, int64_t first, std::span<const T> values) {
  bool all_finite = true;  // without an exit from the loop, so that it vectorises
  for (const T value : values) all_finite &= is_finite(value);
  if (all_finite) return;
  const auto it = std::find_if_not(values.begin(), values.end(), [](T value) { return is_finite(value); });
  fail(Fault::model, "{}: element {} is not a finite {}; the file is damaged, download it again",
       printable(part.name), first + (it - values.begin()),
       sizeof(T) == sizeof(Bf16) ? "bfloat16 number" : "number");
}

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void store(float value, float& out) { out = value; }
void store(float value, Bf16& out) { out = to_bf16(value); }

template <typename In, typename Out>
void convert_all(const std::byte* in, std::span<Out> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    if constexpr (std::is_same_v<In, float>) store(load<float>(in + i * sizeof(In)), out[i]);
    else store(to_float(load<In>(in + i * sizeof(In))), out[i]);
  }
}

}  // namespace

void PartReader::read_bytes(const Part& part, int64_t offset, std::span<std::byte> out) {
  checkpoint_.read(part, offset, out);
}

template <typename Out>
void PartReader::convert(const Part& part, int64_t first, std::span<Out> out) {
  const int64_t element_bytes = dtype_bytes(part.dtype);
  const int64_t n_at_once = kScratchBytes / element_bytes;
  const auto n = static_cast<int64_t>(out.size());
  scratch_.resize(static_cast<size_t>(
      std::max<int64_t>(static_cast<int64_t>(scratch_.size()), std::min(n, n_at_once) * element_bytes)));
  for (int64_t done = 0; done < n; done += n_at_once) {
    const std::span<Out> piece = out.subspan(done, std::min(n_at_once, n - done));
    checkpoint_.read(part, (first + done) * element_bytes,
                     std::span(scratch_).first(piece.size() * element_bytes));
    switch (part.dtype) {
      case Dtype::bf16:
        convert_all<Bf16>(scratch_.data(), piece);
        break;
      case Dtype::f16:
        convert_all<F16>(scratch_.data(), piece);
        break;
      case Dtype::f32:
        convert_all<float>(scratch_.data(), piece);
        break;
      default:
        LILY_CHECK(false, "{} has type {}", part.name, to_string(part.dtype));
    }
    check_finite<Out>(part, first + done, piece);
  }
}

void PartReader::read_bf16(const Part& part, int64_t first, std::span<Bf16> out) {
  if (part.dtype != Dtype::bf16) return convert(part, first, out);
  checkpoint_.read(part, first * 2, std::as_writable_bytes(out));
  check_finite<Bf16>(part, first, out);
}

void PartReader::read_f32(const Part& part, int64_t first, std::span<float> out) {
  convert(part, first, out);
}

}  // namespace lily::model
