#include "backend/metal/tensor_check.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "backend/metal/dispatch.h"
#include "backend/metal/kernels/params.h"
#include "base/half.h"

namespace lily::metal {
namespace {

// Two row tiles of the larger kind, the second one ragged; two tiles of outputs; several groups of weights.
constexpr uint32_t kIn = 256, kOut = 128;

// A product whose weights are 4-bit codes; results are fp32, [rows, kOut].
class Product {
 public:
  Product(Device& gpu, uint32_t rows, uint64_t seed) : rows_(rows) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<Bf16> x(size_t{rows} * kIn);
    for (Bf16& v : x) v = to_bf16(normal(random));
    std::vector<uint8_t> codes(size_t{kOut} * kIn / 2);
    for (uint8_t& c : codes) c = static_cast<uint8_t>(random());
    std::vector<Bf16> scales(size_t{kOut} * kIn / kernels::kGroup), biases(scales.size());
    for (size_t i = 0; i < scales.size(); ++i) {
      scales[i] = to_bf16(0.01f * normal(random));
      biases[i] = to_bf16(0.05f * normal(random));
    }
    scales_at_ = codes.size();
    biases_at_ = scales_at_ + scales.size() * sizeof(Bf16);
    x_ = gpu.make_buffer(x.size() * sizeof(Bf16), BufferUse::mutable_data, "tensor check: x");
    w_ = gpu.make_buffer(biases_at_ + biases.size() * sizeof(Bf16), BufferUse::weights,
                         "tensor check: weights");
    x_->write(0, std::as_bytes(std::span(x)));
    w_->write(0, std::as_bytes(std::span(codes)));
    w_->write(scales_at_, std::as_bytes(std::span(scales)));
    w_->write(biases_at_, std::as_bytes(std::span(biases)));

    // Two sums of n fp32 products in different orders are apart by at most 2 n 2^-24 of the sum of their
    // sizes.
    bounds_.resize(size_t{rows} * kOut);
    for (size_t r = 0; r < rows; ++r)
      for (size_t n = 0; n < kOut; ++n) {
        double sizes = 0;
        for (size_t k = 0; k < kIn; ++k) {
          const size_t at = n * kIn + k;
          const int code = codes[at / 2] >> (4 * (at % 2)) & 15;
          const size_t group = at / kernels::kGroup;
          sizes += std::abs(static_cast<double>(to_float(x[r * kIn + k])) *
                            (to_float(scales[group]) * code + to_float(biases[group])));
        }
        bounds_[r * kOut + n] = std::ldexp(2.0 * kIn, -24) * sizes;
      }
  }

  std::vector<float> run(Device& gpu, Library& library, const std::string& kernel, uint32_t tile_rows,
                         int64_t timeout_ms) const {
    const auto pipeline = library.make_pipeline(kernel);
    std::vector<float> result(size_t{rows_} * kOut, std::nanf(""));
    const auto y = gpu.make_buffer(result.size() * sizeof(float), BufferUse::mutable_data, "tensor check: y");
    y->write(0, std::as_bytes(std::span(result)));
    kernels::LinearParams p{.in = kIn, .x_stride = kIn, .y_stride = kOut, .store = kernels::kStoreF32};
    p.n_weights = 1;
    p.end[0] = kOut;
    p.scales[0] = static_cast<uint32_t>(scales_at_);
    p.biases[0] = static_cast<uint32_t>(biases_at_);
    const auto work = gpu.make_command_buffer("tensor check");
    Encoder& encoder = work->make_encoder();
    encoder.set_pipeline(*pipeline);
    encoder.set_buffer(0, *x_);
    encoder.set_buffer(1, *y);
    encoder.set_buffer(2, *w_);  // not used
    encoder.set_buffer(4, *w_);
    encoder.set_value(kParamsIndex, p);
    encoder.set_value(kHeaderIndex, kernels::StepHeader{.n_rows = rows_});
    const std::array<Access, 3> accesses = {{{x_.get(), 0, x_->length(), Access::Kind::read},
                                             {w_.get(), 0, w_->length(), Access::Kind::read},
                                             {y.get(), 0, y->length(), Access::Kind::write}}};
    encoder.dispatch_threadgroups({kOut / 64, (rows_ + tile_rows - 1) / tile_rows, 1}, {128, 1, 1}, accesses);
    encoder.end();
    work->commit();
    work->wait_until_completed(timeout_ms);
    y->read(0, std::as_writable_bytes(std::span(result)));
    return result;
  }

  const std::vector<double>& bounds() const { return bounds_; }

 private:
  uint32_t rows_;
  size_t scales_at_ = 0, biases_at_ = 0;
  std::unique_ptr<Buffer> x_, w_;
  std::vector<double> bounds_;
};

}  // namespace

std::optional<std::string> tensor_fault(Device& gpu, Library& simdgroup, Library& tensor,
                                        int64_t timeout_ms) {
  for (const auto& [rows, tile] : {std::pair{13u, 16u}, std::pair{45u, 32u}}) {
    const Product product(gpu, rows, rows);
    const auto expected =
        product.run(gpu, simdgroup, fmt::format("linear_prefill_q4_{}", tile), tile, timeout_ms);
    const auto got =
        product.run(gpu, tensor, fmt::format("linear_prefill_tensor_q4_{}", tile), tile, timeout_ms);
    for (size_t i = 0; i < expected.size(); ++i)
      if (!(std::abs(static_cast<double>(expected[i]) - got[i]) <= product.bounds()[i]))
        return fmt::format(
            "a product of {} rows gives {} at [{}, {}], simdgroup matrices give {}, and the order of a sum "
            "explains {:.2g}",
            rows, got[i], i / kOut, i % kOut, expected[i], product.bounds()[i]);
  }
  return std::nullopt;
}

}  // namespace lily::metal
