#include "backend/cuda/kernels/repack.h"
#include "tests/backend/cuda/kernel_fixture.h"

namespace lily::cuda {
namespace {

TEST_F(KernelTest, RepackingOnTheDeviceIsThePackOfTheHost) {
  for (const auto& [rows, cols] : {std::pair{64, 128}, {20, 320}, {1, 64}}) {
    const size_t n = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    std::vector<uint32_t> codes(n / 8);
    std::vector<uint16_t> scales(n / 64), biases(n / 64);
    for (auto& c : codes) c = static_cast<uint32_t>(random());
    for (auto& s : scales) s = static_cast<uint16_t>(random());
    for (auto& b : biases) b = static_cast<uint16_t>(random());
    std::vector<uint32_t> expected(pack::mma_q4::packed_bytes(rows, cols) / 4);
    pack::mma_q4::pack(codes, scales, biases, rows, cols, std::as_writable_bytes(std::span(expected)));
    DeviceBuffer<uint32_t> d_codes(codes), records(expected.size());
    DeviceBuffer<uint16_t> d_scales(scales), d_biases(biases);
    RepackQ4 p;
    p.codes = d_codes.get();
    p.scales = d_scales.get();
    p.biases = d_biases.get();
    p.rows = rows;
    p.cols = cols;
    p.records = records.get();
    launch_repack_q4(p, nullptr);
    EXPECT_EQ(records.download(), expected) << rows << " x " << cols;
  }
}

}  // namespace
}  // namespace lily::cuda
