// What loads: every variant that converters write.
#include "model/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/log.h"
#include "model/tensor_names.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::model {
namespace {

using test::CheckpointWriter;
using test::Tensor;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr WeightId kRouter{Weight::router, 0};
constexpr WeightId kExpertUp{Weight::expert_up, 1};

class CheckpointTest : public testing::Test {
 protected:
  Checkpoint open(const CheckpointWriter& writer) {
    writer.write(folder_.path());
    return Checkpoint::open(folder_.path());
  }

  // The bytes of a part as the checkpoint reads them.
  static std::vector<std::byte> bytes_of(const Checkpoint& checkpoint, const Part& part) {
    std::vector<std::byte> bytes(static_cast<size_t>(part.n_bytes));
    checkpoint.read(part, 0, bytes);
    return bytes;
  }

  test::TempFolder folder_;
};

TEST_F(CheckpointTest, EveryPartIsFoundWithItsBytes) {
  for (const int n_shards : {1, 3}) {
    const test::TempFolder folder;
    CheckpointWriter writer({.n_shards = n_shards});
    writer.write(folder.path());
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    std::set<std::string> seen;
    for (const WeightSpec& spec : catalogue(checkpoint.dims())) {
      const StoredWeight& weight = checkpoint.weight(spec.id);
      EXPECT_EQ(weight.shape, spec.shape);
      EXPECT_EQ(weight.storage, spec.quantisable ? published_storage(spec.id.weight) : Storage::f32)
          << spec.name;
      for (const Part* part : {&weight.codes, &weight.scales, &weight.biases, &weight.values}) {
        if (part->n_bytes == 0) continue;
        EXPECT_EQ(bytes_of(checkpoint, *part), writer.tensor(part->name).data) << part->name;
        seen.insert(part->name);
      }
    }
    EXPECT_EQ(seen.size(), writer.tensors.size());
    EXPECT_THAT(checkpoint.report().problems, IsEmpty());
    EXPECT_THAT(checkpoint.report().notices, IsEmpty());
  }
}

TEST_F(CheckpointTest, APartCanBeReadFromItsMiddle) {
  CheckpointWriter writer({});
  const Checkpoint checkpoint = open(writer);
  const Part& part = checkpoint.weight(kExpertUp).codes;
  const std::vector<std::byte>& all = writer.tensor(part.name).data;
  std::vector<std::byte> some(1001);
  checkpoint.read(part, 777, some);
  EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + 777));
  EXPECT_DEATH(checkpoint.read(part, part.n_bytes - 1000, some), "check failed");
  EXPECT_DEATH(checkpoint.read(part, -1, some), "check failed");
}

TEST_F(CheckpointTest, NamesLoadUnderEveryPrefix) {
  const std::pair<const char*, const char*> prefixes[] = {{"language_model.model.", "language_model."},
                                                          {"model.language_model.", ""},
                                                          {"model.", ""},
                                                          {"language_model.model.", ""},
                                                          {"model.", "language_model."}};
  for (const auto& [model_prefix, head_prefix] : prefixes) {
    const test::TempFolder folder;
    CheckpointWriter writer({.model_prefix = model_prefix, .head_prefix = head_prefix});
    writer.write(folder.path());
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    // The overrides of config.json are spelt with language_model. and still count.
    EXPECT_EQ(checkpoint.weight(kRouter).storage, Storage::q8) << model_prefix;
  }
}

TEST_F(CheckpointTest, VisionAndDraftHeadAreSkipped) {
  CheckpointWriter writer({});
  const size_t n_text = writer.tensors.size();
  const std::vector<std::byte> data(8);
  for (const char* name : {"vision_tower.blocks.0.attn.qkv.weight", "model.visual.patch_embed.proj.weight",
                           "mtp.fc.weight", "language_model.mtp.layers.0.mlp.gate.weight"})
    writer.tensors.push_back({name, "BF16", {4}, data});
  const Checkpoint checkpoint = open(writer);
  const CheckpointReport& report = checkpoint.report();
  EXPECT_EQ(report.n_text_tensors, static_cast<int64_t>(n_text));
  EXPECT_EQ(report.tensors.size(), n_text + 4);
  EXPECT_EQ(report.bytes_by_class[static_cast<size_t>(TensorClass::vision)], 16);
  EXPECT_EQ(report.bytes_by_class[static_cast<size_t>(TensorClass::mtp)], 16);
  EXPECT_EQ(report.mtp, CheckpointReport::Mtp::unsupported_layout);
}

TEST_F(CheckpointTest, TiedEmbeddingsUseTheEmbeddingAsHead) {
  CheckpointWriter writer({.is_tied = true});
  {
    const Checkpoint checkpoint = open(writer);
    EXPECT_EQ(checkpoint.source({Weight::lm_head, kNoLayer}), (WeightId{Weight::embed, kNoLayer}));
    EXPECT_THAT(checkpoint.weight({Weight::lm_head, kNoLayer}).codes.name, HasSubstr("embed_tokens"));
  }
  // A head that is there all the same is ignored.
  writer.tensors.push_back({"lm_head.weight", "F32", {3}, std::vector<std::byte>(12)});
  const Checkpoint checkpoint = open(writer);
  EXPECT_THAT(checkpoint.weight({Weight::lm_head, kNoLayer}).codes.name, HasSubstr("embed_tokens"));
  EXPECT_EQ(checkpoint.report().bytes_by_class[static_cast<size_t>(TensorClass::other)], 12);
}

TEST_F(CheckpointTest, AModuleMayBeUnquantised) {
  const std::string router = "language_model.model.layers.0.mlp.gate";
  const auto storage = [](WeightId id) {
    return id == kRouter ? Storage::bf16 : published_storage(id.weight);
  };
  for (const char* dtype : {"BF16", "F16", "F32"}) {
    const test::TempFolder folder;
    CheckpointWriter writer({.storage = storage, .value_dtype = dtype});
    // With the override for 8 bits still there, with one that says no, and with none.
    for (const nlohmann::json& rule :
         {writer.config["quantization"][router], nlohmann::json(false), nlohmann::json()}) {
      writer.config["quantization"][router] = rule;
      if (rule.is_null()) writer.config["quantization"].erase(router);
      writer.write(folder.path());
      const Checkpoint checkpoint = Checkpoint::open(folder.path());
      EXPECT_EQ(checkpoint.weight(kRouter).storage, Storage::bf16);
      EXPECT_EQ(checkpoint.weight(kRouter).values.n_bytes, 8 * 64 * (std::string(dtype) == "F32" ? 4 : 2));
      EXPECT_EQ(checkpoint.weight({Weight::router, 1}).storage, Storage::q8);
      EXPECT_EQ(checkpoint.report().notices.size(), std::string(dtype) == "BF16" ? 0u : 1u);
    }
  }
}

TEST_F(CheckpointTest, ACheckpointWithoutQuantisationLoads) {
  CheckpointWriter writer({.storage = [](WeightId) { return Storage::bf16; }});
  writer.config.erase("quantization");
  writer.config.erase("quantization_config");
  const Checkpoint checkpoint = open(writer);
  EXPECT_EQ(checkpoint.weight(kExpertUp).storage, Storage::bf16);
  EXPECT_EQ(checkpoint.weight(kExpertUp).values.n_bytes, 8 * 64 * 64 * 2);
}

TEST_F(CheckpointTest, FourAndEightBitsMix) {
  const auto storage = [](WeightId id) {
    return id == kExpertUp || id.weight == Weight::embed ? Storage::q8 : published_storage(id.weight);
  };
  CheckpointWriter writer({.storage = storage});
  for (const char* name : {"language_model.model.layers.1.mlp.switch_mlp.up_proj", "model.embed_tokens"})
    writer.config["quantization"][name] = {{"bits", 8}};
  const Checkpoint checkpoint = open(writer);
  EXPECT_EQ(checkpoint.weight(kExpertUp).storage, Storage::q8);
  EXPECT_EQ(checkpoint.weight({Weight::embed, kNoLayer}).storage, Storage::q8);
  EXPECT_EQ(checkpoint.weight({Weight::expert_gate, 1}).storage, Storage::q4);
}

TEST_F(CheckpointTest, EightBitsThroughoutLoad) {
  CheckpointWriter writer({.storage = [](WeightId) { return Storage::q8; }});
  for (const char* block : {"quantization", "quantization_config"})
    writer.config[block] = {{"group_size", 64}, {"bits", 8}, {"mode", "affine"}};
  const Checkpoint checkpoint = open(writer);
  for (const WeightId id :
       {kRouter, kExpertUp, WeightId{Weight::embed, kNoLayer}, WeightId{Weight::lm_head, kNoLayer}})
    EXPECT_EQ(checkpoint.weight(id).storage, Storage::q8);
  EXPECT_THAT(checkpoint.report().problems, IsEmpty());
}

// As converters of distilled and tuned checkpoints write them: every module with a rule of its own, scales in
// F16.
TEST_F(CheckpointTest, ARuleForEveryModuleAndScalesInF16Load) {
  const auto storage = [](WeightId id) {
    return id.weight == Weight::router || id.weight == Weight::lm_head ? Storage::q8
                                                                       : published_storage(id.weight);
  };
  CheckpointWriter writer({.storage = storage, .scale_dtype = "F16"});
  nlohmann::json rules = {{"group_size", 64}, {"bits", 4}};
  for (const Tensor& tensor : writer.tensors) {
    constexpr std::string_view kScales = ".scales";
    if (!tensor.name.ends_with(kScales)) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - kScales.size());
    const Tensor& codes = writer.tensor(name + ".weight");
    // 64 / scales = words of a group: 8 at 4 bits, 16 at 8.
    const int64_t words = codes.shape.back() / tensor.shape.back();
    rules[name] = {{"group_size", 64}, {"bits", words / 2}, {"mode", "affine"}};
  }
  writer.config["quantization"] = writer.config["quantization_config"] = rules;
  const Checkpoint checkpoint = open(writer);
  EXPECT_EQ(checkpoint.weight(kRouter).storage, Storage::q8);
  EXPECT_EQ(checkpoint.weight({Weight::lm_head, kNoLayer}).storage, Storage::q8);
  EXPECT_EQ(checkpoint.weight(kExpertUp).storage, Storage::q4);
  EXPECT_THAT(checkpoint.report().problems, IsEmpty());
  EXPECT_THAT(checkpoint.report().notices, ElementsAre(HasSubstr("rounded to bfloat16")));
}

TEST_F(CheckpointTest, WiderScalesLoadWithOneNotice) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::notice) lines.emplace_back(line);
  });
  CheckpointWriter writer({.scale_dtype = "F16"});
  const Checkpoint checkpoint = open(writer);
  set_log_sink({});
  EXPECT_EQ(checkpoint.weight(kRouter).scales.dtype, Dtype::f16);
  EXPECT_THAT(lines, ElementsAre(HasSubstr("rounded to bfloat16")));
}

TEST_F(CheckpointTest, SmallVectorsMayBeF32) {
  CheckpointWriter writer({});
  Tensor& a_log = writer.tensor("language_model.model.layers.0.linear_attn.A_log");
  a_log.dtype = "F32";
  a_log.data.resize(8);
  const Checkpoint checkpoint = open(writer);
  EXPECT_EQ(checkpoint.weight({Weight::a_log, 0}).values.dtype, Dtype::f32);
  EXPECT_THAT(checkpoint.report().notices, IsEmpty());  // nothing is lost
}

TEST_F(CheckpointTest, NormsOfAConvertedFileStayAsTheyAreBesideADraftHead) {
  CheckpointWriter writer({});
  writer.tensors.push_back({"mtp.norm.weight", "BF16", {4}, std::vector<std::byte>(8)});
  const Checkpoint checkpoint = open(writer);
  const Part& norm = checkpoint.weight({Weight::input_norm, 2}).values;
  EXPECT_EQ(bytes_of(checkpoint, norm), writer.tensor(norm.name).data);
}

TEST_F(CheckpointTest, TheIndexIsAdvice) {
  CheckpointWriter writer({.n_shards = 2});
  writer.write(folder_.path());
  const auto index_path = folder_.path() / "model.safetensors.index.json";
  const nlohmann::json index = nlohmann::json::parse(test::read_file(index_path));
  const std::string norm = "language_model.model.norm.weight";

  nlohmann::json changed = index;
  changed["weight_map"][norm] = "model-00007-of-00009.safetensors";  // stale
  changed["weight_map"]["language_model.model.gone"] = "model-00001-of-00002.safetensors";
  changed["weight_map"].erase("language_model.lm_head.weight");
  test::write_file(index_path, changed.dump());
  const std::vector<std::string> notices = Checkpoint::open(folder_.path()).report().notices;
  EXPECT_THAT(notices, Contains(AllOf(HasSubstr("in another file than it says"), HasSubstr(norm))));
  EXPECT_THAT(notices, Contains(AllOf(HasSubstr("in no file"), HasSubstr("language_model.model.gone"))));
  EXPECT_THAT(notices,
              Contains(AllOf(HasSubstr("but not in it"), HasSubstr("language_model.lm_head.weight"))));
  EXPECT_THAT(notices, Contains(HasSubstr("model-00007-of-00009.safetensors")));

  std::filesystem::remove(index_path);
  EXPECT_THAT(Checkpoint::open(folder_.path()).report().notices, IsEmpty());
}

TEST_F(CheckpointTest, FilesMayHaveOtherNames) {
  CheckpointWriter writer({});
  writer.write(folder_.path());
  std::filesystem::remove(folder_.path() / "model.safetensors.index.json");
  std::filesystem::rename(folder_.path() / "model.safetensors", folder_.path() / "weights.safetensors");
  EXPECT_NO_THROW(Checkpoint::open(folder_.path()));
  // Beside files named model*, others do not count.
  std::filesystem::rename(folder_.path() / "weights.safetensors", folder_.path() / "model-q.safetensors");
  test::write_file(folder_.path() / "adapters.safetensors", "not even a header");
  EXPECT_NO_THROW(Checkpoint::open(folder_.path()));
}

TEST_F(CheckpointTest, ShardsMayBeSymbolicLinks) {
  CheckpointWriter writer({});
  writer.write(folder_.path() / "blobs");
  std::filesystem::create_directories(folder_.path() / "snapshot");
  for (const auto& file : std::filesystem::directory_iterator(folder_.path() / "blobs"))
    std::filesystem::create_symlink(file.path(), folder_.path() / "snapshot" / file.path().filename());
  EXPECT_NO_THROW(Checkpoint::open(folder_.path() / "snapshot"));
}

TEST_F(CheckpointTest, ADraftHeadInAFileOfItsOwnIsReported) {
  using Mtp = CheckpointReport::Mtp;
  CheckpointWriter writer({});
  EXPECT_EQ(open(writer).report().mtp, Mtp::absent);

  const auto head = [](const std::vector<std::string>& names) {
    std::vector<Tensor> tensors;
    for (const std::string& name : names) tensors.push_back({name, "BF16", {1}, std::vector<std::byte>(2)});
    return test::safetensors_bytes(tensors);
  };
  const auto path = folder_.path() / "mtp.safetensors";
  test::write_file(
      path, head({"fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight",
                  "layers.0.input_layernorm.weight", "layers.0.mlp.switch_mlp.gate_proj.weight",
                  "layers.0.mlp.switch_mlp.up_proj.weight", "layers.0.mlp.switch_mlp.down_proj.weight"}));
  EXPECT_EQ(Checkpoint::open(folder_.path()).report().mtp, Mtp::available);
  test::write_file(path, head({"mtp.fc.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight"}));
  EXPECT_EQ(Checkpoint::open(folder_.path()).report().mtp, Mtp::unsupported_layout);
  test::write_file(path, "broken");
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  EXPECT_EQ(checkpoint.report().mtp, Mtp::absent);
  EXPECT_THAT(checkpoint.report().notices, ElementsAre(HasSubstr("mtp.safetensors: has 6 bytes")));
}

TEST_F(CheckpointTest, TheReportSumsBytesByClass) {
  CheckpointWriter writer({});
  const Checkpoint checkpoint = open(writer);
  const CheckpointReport& report = checkpoint.report();
  int64_t sum = 0, expected = 0;
  for (const int64_t n_bytes : report.bytes_by_class) sum += n_bytes;
  for (const Tensor& tensor : writer.tensors) expected += tensor.n_bytes();
  EXPECT_EQ(sum, expected);
  EXPECT_EQ(report.text_bytes, expected);
  const auto bytes = [&](TensorClass c) { return report.bytes_by_class[static_cast<size_t>(c)]; };
  EXPECT_EQ(bytes(TensorClass::embedding), storage_bytes(128 * 64, Storage::q4));
  EXPECT_EQ(bytes(TensorClass::head), storage_bytes(128 * 64, Storage::q4));
  EXPECT_EQ(bytes(TensorClass::experts), 4 * 3 * storage_bytes(8 * 64 * 64, Storage::q4));
  EXPECT_EQ(bytes(TensorClass::shared_expert), 4 * 3 * storage_bytes(64 * 64, Storage::q4));
  EXPECT_EQ(bytes(TensorClass::router),
            4 * (storage_bytes(8 * 64, Storage::q8) + storage_bytes(64, Storage::q8)));
  EXPECT_EQ(bytes(TensorClass::norms), 2 * (9 * 64 + 2 * 256));
  EXPECT_EQ(bytes(TensorClass::attention), storage_bytes(64 * (1024 + 256 + 256 + 512), Storage::q4));

  for (const CheckpointReport::Tensor& tensor : report.tensors) {
    if (tensor.name == "language_model.model.layers.0.mlp.gate.scales") {
      EXPECT_EQ(tensor.bits, 8);
      EXPECT_EQ(tensor.group_size, 64);
      EXPECT_EQ(tensor.dtype, "BF16");
      EXPECT_EQ(tensor.shape, (std::vector<int64_t>{8, 1}));
      EXPECT_EQ(tensor.n_bytes, 16);
      EXPECT_EQ(tensor.file, "model.safetensors");
    }
    if (tensor.name == "language_model.model.norm.weight") {
      EXPECT_EQ(tensor.bits, 0);
    }
  }
}

TEST_F(CheckpointTest, TheIdTellsCheckpointsApart) {
  const auto id_of = [](CheckpointWriter writer) {
    const test::TempFolder folder;
    writer.write(folder.path());
    return Checkpoint::open(folder.path()).id();
  };
  const std::string id = id_of(CheckpointWriter({}));
  EXPECT_EQ(id.size(), 16u);
  EXPECT_EQ(id_of(CheckpointWriter({})), id);           // in another folder
  EXPECT_NE(id_of(CheckpointWriter({.seed = 2})), id);  // same headers, other data
  EXPECT_NE(id_of(CheckpointWriter({.n_shards = 2})), id);
  CheckpointWriter other_config({});
  other_config.config["text_config"]["rope_parameters"]["rope_theta"] = 5e6;
  EXPECT_NE(id_of(other_config), id);
}

TEST(TensorNames, AreBroughtToTheCatalogueSpelling) {
  EXPECT_EQ(normalised_name("language_model.model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(normalised_name("model.language_model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(normalised_name("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(normalised_name("language_model.lm_head.scales"), "lm_head.scales");
  EXPECT_EQ(normalised_name("lm_head.scales"), "lm_head.scales");
  EXPECT_EQ(normalised_name("language_model.other"), "language_model.other");
  EXPECT_EQ(name_class("mtp.fc.weight"), NameClass::mtp);
  EXPECT_EQ(name_class("language_model.mtp.fc.weight"), NameClass::mtp);
  EXPECT_EQ(name_class("model.smtp.weight"), NameClass::text);
  EXPECT_EQ(name_class("model.visual.x"), NameClass::vision);
  EXPECT_EQ(name_class("vision_tower.x"), NameClass::vision);
  EXPECT_EQ(name_class("model.layers.0.x"), NameClass::text);
}

}  // namespace
}  // namespace lily::model
