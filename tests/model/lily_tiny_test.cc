// The bundled model, against outputs of an independent implementation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "model/checkpoint.h"
#include "model/weight_store.h"

namespace lily::model {
namespace {

using testing::IsEmpty;

// A tensor of the golden file.
template <typename T>
std::vector<T> golden(const std::string& name) {
  const File file = File::open("tests/golden/lily-tiny/layers.safetensors");
  const SafetensorsHeader header = read_safetensors_header(file);
  for (const TensorEntry& entry : header.tensors) {
    if (entry.name != name) continue;
    std::vector<T> values(static_cast<size_t>(entry.n_bytes()) / sizeof(T));
    file.read_at(header.data_start + entry.begin, std::as_writable_bytes(std::span(values)));
    return values;
  }
  ADD_FAILURE() << "no golden " << name;
  return {};
}

TEST(LilyTiny, HasTheCataloguesTensorsAndBytes) {
  const Checkpoint checkpoint = Checkpoint::open("models/lily-tiny");
  EXPECT_EQ(checkpoint.dims(), lily_tiny());
  const CheckpointReport& report = checkpoint.report();
  EXPECT_EQ(report.n_text_tensors, 357);
  EXPECT_EQ(report.text_bytes, 20'784'144);
  EXPECT_EQ(report.tensors.size(), 357u);
  EXPECT_THAT(report.notices, IsEmpty());
  EXPECT_EQ(report.mtp, CheckpointReport::Mtp::absent);
  EXPECT_EQ(checkpoint.weight({Weight::a_log, 0}).values.dtype, Dtype::f32);
  EXPECT_EQ(checkpoint.weight({Weight::router, 5}).storage, Storage::q8);
}

// The reference works on weights dequantised to float. w = s * c + b is then off by one rounding of the
// product and one of the sum: 2^-24 (|s c| + |w|), and its bf16 scale and bias times code are exact in
// double.
TEST(LilyTiny, EmbeddingRowsEqualTheReference) {
  const Checkpoint checkpoint = Checkpoint::open("models/lily-tiny");
  ThreadPool pool(2);
  const WeightStore store = WeightStore::load(checkpoint, {{Weight::embed, kNoLayer}}, pool);
  const LinearView embed = store.linear({Weight::embed, kNoLayer});
  ASSERT_EQ(embed.in, 256);
  for (const char* prefix : {"", "decode."}) {
    const std::vector<float> expected = golden<float>(std::string(prefix) + "embed");
    const std::vector<int32_t> ids = golden<int32_t>(*prefix ? "decode.token" : "ids");
    ASSERT_EQ(expected.size(), ids.size() * 256);
    for (size_t t = 0; t < ids.size(); ++t) {
      for (int64_t j = 0; j < embed.in; ++j) {
        const int64_t at = ids[t] * embed.in + j;
        const int code = embed.codes[at / 2] >> (at % 2 * 4) & 15;
        const double product = static_cast<double>(to_float(embed.scales[at / 64])) * code;
        const double w = product + to_float(embed.biases[at / 64]);
        ASSERT_NEAR(w, expected[t * 256 + j], 0x1p-24 * (std::abs(product) + std::abs(w)))
            << "token " << t << ", dim " << j;
      }
    }
  }
}

// input_norm of layer 0 is RMSNorm(embed; w): it fixes the norm weights by the reference.
TEST(LilyTiny, NormWeightsAreThoseOfTheReference) {
  const Checkpoint checkpoint = Checkpoint::open("models/lily-tiny");
  ThreadPool pool(2);
  const WeightStore store = WeightStore::load(checkpoint, {{Weight::input_norm, 0}}, pool);
  const std::span<const float> weight = store.vector({Weight::input_norm, 0});
  const std::vector<float> embed = golden<float>("embed"), expected = golden<float>("layer.0.input_norm");
  for (size_t t = 0; t < embed.size() / 256; ++t) {
    double sum = 0;
    for (size_t j = 0; j < 256; ++j) sum += static_cast<double>(embed[t * 256 + j]) * embed[t * 256 + j];
    const double scale = 1 / std::sqrt(sum / 256 + 1e-6);
    // The reference sums 256 squares in float, at worst one rounding each.
    for (size_t j = 0; j < 256; ++j) {
      const double y = embed[t * 256 + j] * scale * weight[j];
      ASSERT_NEAR(y, expected[t * 256 + j], std::abs(y) * 260 * 0x1p-24) << "token " << t << ", dim " << j;
    }
  }
}

TEST(LilyTiny, LoadsWhole) {
  const Checkpoint checkpoint = Checkpoint::open("models/lily-tiny");
  ThreadPool pool(2);
  std::vector<WeightId> ids;
  for (const WeightSpec& spec : catalogue(checkpoint.dims())) ids.push_back(spec.id);
  const WeightStore store = WeightStore::load(checkpoint, ids, pool);
  // Small vectors take four bytes an element instead of two; A_log has four already.
  int64_t n_widened = 0;
  for (const WeightSpec& spec : catalogue(checkpoint.dims()))
    if (!spec.quantisable && spec.id.weight != Weight::a_log) n_widened += spec.n_elements();
  EXPECT_EQ(store.n_bytes(), 20'784'144 + 2 * n_widened);
}

}  // namespace
}  // namespace lily::model
