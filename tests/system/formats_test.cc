// The rows of docs/models.md that say "loads", by the program itself: the bundled model in each of these
// forms gives its answer.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "model/safetensors.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/temp_folder.h"
#include "tests/system/program.h"

namespace lily::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const char* const kAnswer = "river (noun): a large natural stream of water (larger than a creek)\n";
constexpr std::string_view kWeight = ".weight";

std::vector<Tensor> tensors_of(const fs::path& file) {
  const std::string bytes = read_file(file);
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  const model::SafetensorsHeader header = model::parse_safetensors({data, bytes.size()}, "lily-tiny");
  std::vector<Tensor> tensors;
  for (const model::TensorEntry& entry : header.tensors)
    tensors.push_back({entry.name,
                       entry.dtype_name,
                       entry.shape,
                       {data + header.data_start + entry.begin, data + header.data_start + entry.end}});
  return tensors;
}

class Formats : public testing::Test {
 protected:
  Formats() : tensors(tensors_of("models/lily-tiny/model.safetensors")) {
    for (const char* file : {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                             "chat_template.jinja", "config.json"})
      fs::copy_file(fs::path("models/lily-tiny") / file, folder.path() / file);
    config = Json::parse(read_file(folder.path() / "config.json"));
  }

  Tensor* find(const std::string& name) {
    for (Tensor& tensor : tensors)
      if (tensor.name == name) return &tensor;
    return nullptr;
  }
  // Names of the quantised modules.
  std::vector<std::string> modules() const {
    std::vector<std::string> names;
    for (const Tensor& tensor : tensors)
      if (tensor.dtype == "U32") names.push_back(tensor.name.substr(0, tensor.name.size() - kWeight.size()));
    return names;
  }
  int bits_of(const std::string& module) {
    return static_cast<int>(find(module + ".weight")->shape.back() * 32 /
                            (find(module + ".scales")->shape.back() * 64));
  }

  // The same codes in words of four: not one value of the weight changes.
  void widen(const std::string& module) {
    if (bits_of(module) == 8) return;
    Tensor& codes = *find(module + ".weight");
    std::vector<std::byte> wide;
    for (const std::byte two : codes.data) {
      wide.push_back(two & std::byte{15});
      wide.push_back(two >> 4);
    }
    codes.data = std::move(wide);
    codes.shape.back() *= 2;
    for (const char* block : {"quantization", "quantization_config"})
      config[block][module] = {{"group_size", 64}, {"bits", 8}};
  }

  // Plain values, w = scale * code + bias, each rounded to bfloat16.
  void unquantise(const std::string& module) {
    Tensor& codes = *find(module + ".weight");
    const int bits = bits_of(module);
    const std::vector<double> scales = values_of(*find(module + ".scales")),
                              biases = values_of(*find(module + ".biases"));
    const size_t n = codes.data.size() * 8 / static_cast<size_t>(bits);
    std::vector<std::byte> values;
    values.reserve(2 * n);
    for (size_t i = 0; i < n; ++i) {
      const auto byte = static_cast<unsigned>(codes.data[bits == 8 ? i : i / 2]);
      const unsigned code = bits == 8 ? byte : byte >> (4 * (i % 2)) & 15U;
      const auto exact = static_cast<float>(scales[i / 64] * code + biases[i / 64]);
      uint32_t word = 0;
      std::memcpy(&word, &exact, 4);
      word += 0x7fff + ((word >> 16) & 1);
      values.push_back(static_cast<std::byte>(word >> 16));
      values.push_back(static_cast<std::byte>(word >> 24));
    }
    codes.dtype = "BF16";
    codes.shape.back() = codes.shape.back() * 32 / bits;
    codes.data = std::move(values);
    std::erase_if(tensors, [&](const Tensor& tensor) {
      return tensor.name == module + ".scales" || tensor.name == module + ".biases";
    });
    for (const char* block : {"quantization", "quantization_config"}) config[block][module] = false;
  }

  // bfloat16 is the upper half of a float: nothing is lost on the way there and back.
  void widen_scales() {
    for (Tensor& tensor : tensors) {
      if (!tensor.name.ends_with(".scales") && !tensor.name.ends_with(".biases")) continue;
      std::vector<std::byte> wide;
      for (size_t i = 0; i < tensor.data.size(); i += 2)
        wide.insert(wide.end(), {std::byte{0}, std::byte{0}, tensor.data[i], tensor.data[i + 1]});
      tensor.dtype = "F32";
      tensor.data = std::move(wide);
    }
  }

  Outcome run(const std::string& backend) {
    write_file(folder.path() / "config.json", config.dump());
    write_file(folder.path() / "model.safetensors", safetensors_bytes(tensors));
    return lily("run -m " + folder.path().string() + " --backend " + backend +
                " --no-think -t 0 'What does the word river mean?'");
  }
  void expect_answer(const std::string& backend) {
    const Outcome ran = run(backend);
    EXPECT_EQ(ran.exit_code, 0) << ran.err;
    EXPECT_EQ(ran.out, kAnswer) << backend;
    EXPECT_EQ(lily("inspect " + folder.path().string()).exit_code, 0);
  }

  TempFolder folder;
  Json config;
  std::vector<Tensor> tensors;
};

TEST_F(Formats, EightBits) {
  for (const std::string& module : modules()) widen(module);
  // As converters write it: one rule for all.
  for (const char* block : {"quantization", "quantization_config"})
    config[block] = {{"group_size", 64}, {"bits", 8}, {"mode", "affine"}};
  expect_answer("cpu");
}

TEST_F(Formats, FourAndEightBitsMixed) {
  int n = 0;
  for (const std::string& module : modules())
    if (n++ % 3 == 0) widen(module);
  expect_answer("cpu");
}

TEST_F(Formats, ScalesInF32) {
  widen_scales();
  const Outcome ran = run("cpu");
  EXPECT_EQ(ran.out, kAnswer) << ran.err;
  EXPECT_NE(ran.err.find("rounded to bfloat16"), std::string::npos) << ran.err;
}

TEST_F(Formats, UnquantisedModulesOfAllKinds) {
  for (const std::string& module : modules()) unquantise(module);
  for (const char* block : {"quantization", "quantization_config"}) config.erase(block);
  expect_answer("cpu");
}

TEST_F(Formats, AnUnknownChatTemplateIsAWarning) {
  write_file(folder.path() / "chat_template.jinja",
             read_file("models/lily-tiny/chat_template.jinja") + "{# another revision #}");
  const Outcome ran = run("cpu");
  EXPECT_EQ(ran.out, kAnswer) << ran.err;
  EXPECT_NE(ran.err.find("template"), std::string::npos) << ran.err;
}

}  // namespace
}  // namespace lily::test
