// What does not load, and what the owner of the file is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "model/checkpoint.h"
#include "model/shards.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::model {
namespace {

using test::CheckpointWriter;
using test::Tensor;
using testing::AllOf;
using testing::AnyOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

const std::string kLayer0 = "language_model.model.layers.0.";

class CheckpointErrors : public testing::Test {
 protected:
  CheckpointErrors() : writer_({.n_shards = 3}) {}

  std::string error() {
    writer_.write(folder_.path());
    return open_error();
  }
  std::string open_error() const {
    return test::error_of([&] { Checkpoint::open(folder_.path()); });
  }
  std::vector<std::string> problems() const { return inspect_checkpoint(folder_.path()).problems; }
  std::filesystem::path shard(int number) const {
    return folder_.path() / fmt::format("model-{:05}-of-00003.safetensors", number);
  }

  test::TempFolder folder_;
  CheckpointWriter writer_;
};

TEST_F(CheckpointErrors, AMissingTensorIsNamed) {
  writer_.remove(kLayer0 + "mlp.gate.biases");
  EXPECT_THAT(error(), HasSubstr("model.layers.0.mlp.gate.biases: is in no file"));
}

TEST_F(CheckpointErrors, EveryTensorIsNeeded) {
  CheckpointWriter writer({.is_sparse = true});
  const std::vector<Tensor> all = writer.tensors;
  for (const Tensor& tensor : all) {
    if (tensor.name.find("layers.1.") != std::string::npos ||
        tensor.name.find("layers.2.") != std::string::npos)
      continue;  // like layer 0
    writer.tensors = all;
    writer.remove(tensor.name);
    writer.write(folder_.path());
    const std::string name = tensor.name.substr(std::string("language_model.").size());
    EXPECT_THAT(open_error(), HasSubstr(name + ": is in no file")) << tensor.name;
  }
}

TEST_F(CheckpointErrors, AMissingShardIsNamedWithATensorOfIt) {
  writer_.write(folder_.path());
  std::filesystem::remove(shard(2));
  EXPECT_THAT(
      open_error(),
      AllOf(
          HasSubstr("the index promises it in model-00002-of-00003.safetensors, which is not in the folder"),
          HasSubstr(" more: "), HasSubstr(", ...)")));
  std::filesystem::remove(folder_.path() / "model.safetensors.index.json");
  EXPECT_THAT(open_error(), HasSubstr("model-00002-of-00003.safetensors is not in the folder"));
}

TEST_F(CheckpointErrors, AnErrorListsTenNamesAtMost) {
  writer_.write(folder_.path());
  std::filesystem::remove(shard(2));
  const std::string message = open_error();
  EXPECT_EQ(std::count(message.begin(), message.end(), ','), 1 + 8 + 1)
      << message;                     // its own, between nine, before the dots
  EXPECT_GT(problems().size(), 10u);  // inspect shows them all
}

TEST_F(CheckpointErrors, AnIndexThatPromisesTooMuchIsTakenAtItsWordOnlyInTheMessage) {
  writer_.write(folder_.path());
  const std::string promised = test::read_file(folder_.path() / "model.safetensors.index.json");
  writer_.remove("language_model.model.norm.weight");
  writer_.write(folder_.path());
  test::write_file(folder_.path() / "model.safetensors.index.json", promised);
  EXPECT_THAT(open_error(),
              AllOf(HasSubstr("model.norm.weight: is in no file"), HasSubstr("which does not hold it")));
}

TEST_F(CheckpointErrors, TheIndexMayNotNameAPath) {
  EXPECT_TRUE(is_safe_shard_name("model-00001-of-00004.safetensors"));
  EXPECT_TRUE(is_safe_shard_name("a.b_C-9.safetensors"));
  const std::string bad_names[] = {"../model.safetensors",
                                   "/etc/x.safetensors",
                                   "a/b.safetensors",
                                   "a\\b.safetensors",
                                   "model.safetensors/",
                                   ".safetensors",
                                   "",
                                   "model.bin",
                                   "x.safetensors\n",
                                   std::string("x\0.safetensors", 14),
                                   "x y.safetensors",
                                   "\xc3\xa9.safetensors",
                                   std::string(300, 'a') + ".safetensors"};
  for (const std::string& name : bad_names) {
    EXPECT_FALSE(is_safe_shard_name(name)) << name;
    writer_.write(folder_.path());
    const auto path = folder_.path() / "model.safetensors.index.json";
    nlohmann::json index = nlohmann::json::parse(test::read_file(path));
    index["weight_map"]["language_model.model.norm.weight"] = name;
    test::write_file(path, index.dump());
    EXPECT_THAT(open_error(),
                AllOf(HasSubstr("language_model.model.norm.weight"), HasSubstr("not the plain name")));
  }
}

TEST_F(CheckpointErrors, AnIndexThatIsNotOneIsAnError) {
  writer_.write(folder_.path());
  for (const char* text : {"", "{", "[]", "{}", R"({"weight_map": []})", R"({"weight_map": {"a": 1}})",
                           R"({"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}})"}) {
    test::write_file(folder_.path() / "model.safetensors.index.json", text);
    EXPECT_THAT(open_error(), HasSubstr("model.safetensors.index.json: "));
  }
}

TEST_F(CheckpointErrors, ATensorInTwoFilesIsRefused) {
  writer_.write(folder_.path());
  test::write_file(folder_.path() / "model-copy.safetensors",
                   test::safetensors_bytes({writer_.tensor("language_model.model.norm.weight")}));
  EXPECT_THAT(open_error(), AllOf(HasSubstr("language_model.model.norm.weight: is in two files"),
                                  HasSubstr("model-copy.safetensors")));
}

TEST_F(CheckpointErrors, ATensorUnderTwoNamesIsRefused) {
  Tensor copy = writer_.tensor("language_model.model.norm.weight");
  copy.name = "model.norm.weight";
  writer_.tensors.push_back(copy);
  EXPECT_THAT(error(), HasSubstr("is there twice, also as"));
}

TEST_F(CheckpointErrors, AnUnknownTensorIsRefused) {
  writer_.tensors.push_back(
      {"language_model.model.layers.4.input_layernorm.weight", "BF16", {2}, std::vector<std::byte>(4)});
  writer_.tensors.push_back({"strange\nname", "BF16", {2}, std::vector<std::byte>(4)});
  EXPECT_THAT(
      error(),
      AllOf(HasSubstr("language_model.model.layers.4.input_layernorm.weight: is no tensor of this model"),
            HasSubstr("(1 more: strange\\x0aname")));
}

TEST_F(CheckpointErrors, AWrongShapeIsShownBesideTheRightOne) {
  Tensor& router = writer_.tensor(kLayer0 + "mlp.gate.weight");
  router.shape = {16, 8};
  EXPECT_THAT(
      error(),
      HasSubstr(
          "layers.0.mlp.gate.weight: expected U32 [8, 16], found U32 [16, 8]; is this Qwen3.6-35B-A3B"));
}

TEST_F(CheckpointErrors, AWrongShapeOfScalesNormsAndVectorsIsFound) {
  for (const char* name :
       {"mlp.gate.scales", "mlp.gate.biases", "input_layernorm.weight", "linear_attn.A_log",
        "linear_attn.dt_bias", "linear_attn.norm.weight", "linear_attn.conv1d.weight"}) {
    CheckpointWriter writer({});
    writer.tensor(kLayer0 + name).shape.push_back(1);
    const test::TempFolder folder;
    writer.write(folder.path());
    EXPECT_THAT(test::error_of([&] { Checkpoint::open(folder.path()); }),
                AllOf(HasSubstr(kLayer0 + name), HasSubstr("expected BF16")));
  }
}

TEST_F(CheckpointErrors, AWrongTypeIsFound) {
  const auto retype = [&](const std::string& name, const std::string& dtype) {
    CheckpointWriter writer({});
    Tensor& tensor = writer.tensor(kLayer0 + name);
    const int64_t n = tensor.n_bytes();
    tensor.dtype = dtype;
    tensor.data.resize(static_cast<size_t>(tensor.n_bytes()));
    EXPECT_GE(tensor.n_bytes(), n);
    const test::TempFolder folder;
    writer.write(folder.path());
    return test::error_of([&] { Checkpoint::open(folder.path()); });
  };
  EXPECT_THAT(retype("input_layernorm.weight", "U32"),
              AllOf(HasSubstr("expected BF16 [64]"), HasSubstr("found U32")));
  EXPECT_THAT(retype("mlp.gate.scales", "U32"), HasSubstr("mlp.gate.scales: expected BF16"));
  EXPECT_THAT(retype("mlp.gate.weight", "F32"), HasSubstr("mlp.gate.weight: expected U32"));
}

TEST_F(CheckpointErrors, UnsupportedWidthsAreNamed) {
  for (const int bits : {2, 3, 5, 6}) {
    writer_.config["quantization"]["language_model.model.layers.1.mlp.switch_mlp.up_proj"] = {{"bits", bits}};
    EXPECT_THAT(error(), AllOf(HasSubstr("layers.1.mlp.switch_mlp.up_proj.weight: "),
                               HasSubstr(fmt::format("{} bits in groups of 64 are not supported", bits))));
  }
  for (const int group : {32, 128}) {
    writer_.config["quantization"]["language_model.model.layers.1.mlp.switch_mlp.up_proj"] = {
        {"group_size", group}};
    EXPECT_THAT(error(), HasSubstr(fmt::format("4 bits in groups of {} are not supported", group)));
  }
}

TEST_F(CheckpointErrors, AWidthThatDoesNotFitTheShapeIsFound) {
  writer_.config["quantization"]["language_model.model.layers.1.mlp.switch_mlp.up_proj"] = {{"bits", 8}};
  EXPECT_THAT(error(), HasSubstr("the shape is that of 4 bits, config.json says 8"));
}

TEST_F(CheckpointErrors, UnsupportedModesAreNamed) {
  for (const char* mode : {"mxfp4", "nvfp4", "mxfp8", "new\nmode"}) {
    writer_.config["quantization"]["mode"] = mode;
    EXPECT_THAT(error(), AllOf(HasSubstr("mode "), HasSubstr("is not supported"), HasSubstr("affine")));
  }
  EXPECT_THAT(problems(), Contains(HasSubstr("mode new\\x0amode")));
}

TEST_F(CheckpointErrors, ModesWithoutBiasesAreNamedAsModes) {
  writer_.config["quantization"]["mode"] = "mxfp4";
  std::erase_if(writer_.tensors, [](const Tensor& tensor) { return tensor.name.ends_with(".biases"); });
  EXPECT_THAT(error(), HasSubstr("mode mxfp4 is not supported"));
}

TEST_F(CheckpointErrors, QuantisedTensorsNeedARule) {
  writer_.config.erase("quantization");
  writer_.config.erase("quantization_config");
  EXPECT_THAT(error(), HasSubstr("no \"quantization\" block"));
  CheckpointWriter writer({});
  writer.config["quantization"][kLayer0 + "mlp.gate"] = false;
  const test::TempFolder folder;
  writer.write(folder.path());
  EXPECT_THAT(test::error_of([&] { Checkpoint::open(folder.path()); }),
              HasSubstr("layers.0.mlp.gate.weight: is quantised, but config.json says that it is not"));
}

TEST_F(CheckpointErrors, CodesWithoutScalesAreRefused) {
  writer_.remove(kLayer0 + "mlp.gate.scales");
  EXPECT_THAT(error(), HasSubstr("model.layers.0.mlp.gate.scales: is in no file"));
}

TEST_F(CheckpointErrors, AnUnconvertedCheckpointIsRecognisedByItsConvolution) {
  Tensor& conv = writer_.tensor(kLayer0 + "linear_attn.conv1d.weight");
  std::swap(conv.shape[1], conv.shape[2]);
  EXPECT_THAT(error(), AllOf(HasSubstr("conv1d.weight: shape [512, 1, 4]"),
                             HasSubstr("unconverted checkpoint"), HasSubstr("mlx_lm.convert")));
}

TEST_F(CheckpointErrors, ExpertsInRawLayoutsAreUnconverted) {
  const std::vector<Tensor> all = writer_.tensors;
  for (const char* name : {"mlp.experts.gate_up_proj", "mlp.experts.0.gate_proj.weight"}) {
    writer_.tensors = all;
    for (const char* part : {"gate_proj", "up_proj", "down_proj"})
      for (const char* suffix : {".weight", ".scales", ".biases"})
        writer_.remove(kLayer0 + "mlp.switch_mlp." + part + suffix);
    writer_.tensors.push_back({kLayer0 + name, "BF16", {2}, std::vector<std::byte>(4)});
    EXPECT_THAT(error(),
                AllOf(HasSubstr(name), HasSubstr("unconverted checkpoint"), Not(HasSubstr("in no file"))));
  }
}

TEST_F(CheckpointErrors, ForeignFormatsAreNamed) {
  const std::vector<Tensor> all = writer_.tensors;
  for (const auto& [suffix, method] : {std::pair{".qweight", "GPTQ or AWQ"},
                                       {".weight_scale_inv", "fp8"},
                                       {".weight_packed", "compressed-tensors"},
                                       {".tq_packed", "TurboQuant"}}) {
    writer_.tensors = all;
    writer_.remove(kLayer0 + "mlp.gate.weight");
    writer_.tensors.push_back({kLayer0 + "mlp.gate" + suffix, "U32", {1}, std::vector<std::byte>(4)});
    EXPECT_THAT(error(), AllOf(HasSubstr(suffix), HasSubstr(method), HasSubstr("not supported")));
  }
}

TEST_F(CheckpointErrors, AFolderWithoutShardsIsRefused) {
  EXPECT_THAT(test::error_of([] { Checkpoint::open("no/such/folder"); }),
              HasSubstr("no/such/folder: is not a folder"));
  EXPECT_THAT(open_error(), HasSubstr("has no config.json"));
  test::write_file(folder_.path() / "config.json", writer_.config.dump());
  EXPECT_THAT(open_error(), HasSubstr("has no safetensors file"));
}

TEST_F(CheckpointErrors, AShardThatIsCutOffIsRefused) {
  writer_.write(folder_.path());
  const std::string bytes = test::read_file(shard(1));
  for (const size_t n : {size_t{0}, size_t{7}, size_t{8}, size_t{100}, bytes.size() / 2, bytes.size() - 1}) {
    test::write_file(shard(1), bytes.substr(0, n));
    EXPECT_THAT(open_error(), HasSubstr("model-00001-of-00003.safetensors: "));
  }
  test::write_file(shard(1), bytes + "x");
  EXPECT_THAT(open_error(), HasSubstr("1 bytes at the end belong to no tensor"));
}

TEST_F(CheckpointErrors, AShardThatShrinksLaterIsAnErrorWhenRead) {
  writer_.write(folder_.path());
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  for (int i = 1; i <= 3; ++i) std::filesystem::resize_file(shard(i), 100);
  const Part& part = checkpoint.weight({Weight::embed, kNoLayer}).codes;
  std::vector<std::byte> out(static_cast<size_t>(part.n_bytes));
  EXPECT_THAT(test::error_of([&] { checkpoint.read(part, 0, out); }), HasSubstr("bytes when opened"));
}

TEST_F(CheckpointErrors, InspectCollectsProblemsOfAllKinds) {
  writer_.remove("language_model.model.norm.weight");
  writer_.tensor(kLayer0 + "mlp.gate.weight").shape = {16, 8};
  writer_.config["quantization"]["language_model.model.layers.1.mlp.switch_mlp.up_proj"] = {{"bits", 6}};
  writer_.tensors.push_back({"extra", "BF16", {1}, std::vector<std::byte>(2)});
  writer_.write(folder_.path());
  EXPECT_THAT(problems(), AllOf(SizeIs(4), Contains(HasSubstr("model.norm.weight: is in no file")),
                                Contains(HasSubstr("found U32 [16, 8]")), Contains(HasSubstr("6 bits")),
                                Contains(HasSubstr("extra: is no tensor"))));
}

TEST_F(CheckpointErrors, InspectGoesOnWithoutAConfigOrAShard) {
  writer_.write(folder_.path());
  test::write_file(folder_.path() / "config.json", "{");
  test::write_file(shard(3), "broken");
  const CheckpointReport report = inspect_checkpoint(folder_.path());
  EXPECT_FALSE(report.config);
  EXPECT_GT(report.tensors.size(), 50u);
  EXPECT_THAT(report.problems, AllOf(SizeIs(2), Contains(HasSubstr("config.json: not valid JSON")),
                                     Contains(HasSubstr("model-00003-of-00003.safetensors: "))));
}

TEST_F(CheckpointErrors, FlippedBitsOfAHeaderAreRefusedOrHarmless) {
  CheckpointWriter writer({});
  writer.write(folder_.path());
  const auto path = folder_.path() / "model.safetensors";
  const std::string bytes = test::read_file(path);
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | static_cast<uint8_t>(bytes[i]);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&](uint64_t at, int byte) {
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte));
    file.flush();
  };
  int n_refused = 0, n_opened = 0;
  // A prime step samples all fields and all bits of a byte.
  for (uint64_t bit = 0; bit < (8 + header_bytes) * 8; bit += 197) {
    put(bit / 8, bytes[bit / 8] ^ 1 << bit % 8);
    try {
      Checkpoint::open(folder_.path());
      ++n_opened;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      ++n_refused;
    }
    put(bit / 8, bytes[bit / 8]);
  }
  Checkpoint::open(folder_.path());
  EXPECT_GT(n_refused, 20 * n_opened);
}

}  // namespace
}  // namespace lily::model
