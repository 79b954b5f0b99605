#include "backend/cuda/kernels/unfused_ablation.h"
#include "tests/backend/cuda/kernel_fixture.h"

namespace lily::cuda {
namespace {

struct UnfusedShape {
  int in, out, rows;
  bool by_choice;
};

class ExpertsLinearTest : public KernelTest, public ::testing::WithParamInterface<UnfusedShape> {};

// Rows shorter than the four groups that are read at once as well: nothing may be read beyond what the kernel
// asked for.
TEST_P(ExpertsLinearTest, IsTheExactProductOfTheChosenExperts) {
  constexpr int kExperts = 12, kChosen = 8;
  const UnfusedShape& s = GetParam();
  const Q4Weight weight(random, kExperts * s.out, s.in);
  const auto in = static_cast<size_t>(s.in), out = static_cast<size_t>(s.out),
             listed = static_cast<size_t>(s.rows) * kChosen,
             n_x = s.by_choice ? listed : static_cast<size_t>(s.rows);
  std::vector<uint16_t> x(n_x * in);
  for (auto& v : x) v = to_bf16(normal()).bits;
  std::vector<int32_t> ids;
  for (size_t i = 0; i < listed; ++i) ids.push_back(static_cast<int32_t>(random() % kExperts));
  DeviceBuffer<uint16_t> d_x(x), y(listed * out);
  DeviceBuffer<int32_t> d_ids(ids);
  DeviceBuffer<unsigned char> records(weight.packed);
  ExpertsLinearRows p;
  p.x = d_x.get();
  p.by_choice = s.by_choice;
  p.ids = d_ids.get();
  p.records = records.get();
  p.in = s.in;
  p.out = s.out;
  p.rows = s.rows;
  p.y = y.get();
  launch_experts_linear_rows(p, nullptr);
  const auto got = y.download();
  Comparison comparison;
  for (size_t i = 0; i < listed; ++i) {
    const std::vector<double> row = widened(std::span(x).subspan((s.by_choice ? i : i / kChosen) * in, in));
    for (size_t o = 0; o < out; ++o) {
      const auto want = weight.multiply(ids[i] * s.out + static_cast<int>(o), row);
      comparison.add(to_float(Bf16{got[i * out + o]}), want.y, want.error + std::fabs(want.y) * kBf16Half,
                     static_cast<int>(i), static_cast<int>(o));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsLinearTest,
                         ::testing::Values(UnfusedShape{64, 256, 1, true}, UnfusedShape{128, 256, 2, true},
                                           UnfusedShape{192, 128, 1, false}, UnfusedShape{256, 128, 2, false},
                                           UnfusedShape{320, 64, 1, true}));

}  // namespace
}  // namespace lily::cuda
