// Golden files that are cut off or of another model: an error that names the file and the tensor.
#include "engine/goldens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>

#include "base/error.h"
#include "base/file.h"
#include "engine/layers.h"
#include "model/safetensors.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/golden.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int32_t kTokens = 8161;  // of the bundled tokenizer

class LayerGoldens : public testing::Test {
 protected:
  LayerGoldens() {
    const File file = File::open(std::string(test::kTinyGoldens) + "/layers.safetensors");
    const model::SafetensorsHeader header = model::read_safetensors_header(file);
    for (const model::TensorEntry& entry : header.tensors) {
      test::Tensor tensor{.name = entry.name, .dtype = entry.dtype_name, .shape = entry.shape};
      tensor.data.resize(static_cast<size_t>(entry.n_bytes()));
      file.read_at(header.data_start + entry.begin, tensor.data);
      tensors_.push_back(std::move(tensor));
    }
  }

  test::Tensor& tensor(const std::string& name) {
    const auto found =
        std::find_if(tensors_.begin(), tensors_.end(), [&](const auto& t) { return t.name == name; });
    if (found == tensors_.end()) throw std::runtime_error("no tensor " + name);
    return *found;
  }

  // Without its last row.
  void cut(const std::string& name) {
    test::Tensor& t = tensor(name);
    const size_t n_row = t.data.size() / static_cast<size_t>(t.shape[0]);
    --t.shape[0];
    t.data.resize(t.data.size() - n_row);
  }

  template <typename T>
  void set(const std::string& name, size_t i, T value) {
    std::memcpy(tensor(name).data.data() + i * sizeof(T), &value, sizeof(T));
  }

  // The device has no weights: what is wrong with a file is found before anything is computed.
  std::string error() {
    const auto path = folder_.path() / "layers.safetensors";
    test::write_file(path, test::safetensors_bytes(tensors_));
    const auto device = backend::make_device("reference", {.threads = 1});
    const model::Dims dims = model::lily_tiny();
    try {
      check_layers(*device, dims, device->policy(dims), path);
    } catch (const Error& e) {
      EXPECT_EQ(e.fault(), Fault::model);
      EXPECT_THAT(e.what(), HasSubstr(path.string()));
      return e.what();
    }
    ADD_FAILURE() << "no error was thrown";
    return {};
  }

  test::TempFolder folder_;
  std::vector<test::Tensor> tensors_;
};

TEST_F(LayerGoldens, AreRefusedWithATensorThatIsCutShort) {
  for (const char* name :
       {"layer.0.conv_state", "layer.1.recurrent_state", "layer.2.router_ids", "layer.3.router_logits",
        "layer.3.v_cache", "decode.layer.7.k_cache", "decode.layer.4.conv_state", "decode.token"}) {
    const std::vector<test::Tensor> whole = tensors_;
    if (tensor(name).shape.size() > 1 && tensor(name).shape[0] == 1) {  // [1, positions, 256]
      test::Tensor& t = tensor(name);
      t.data.resize(t.data.size() - t.data.size() / static_cast<size_t>(t.shape[1]));
      --t.shape[1];
    } else {
      cut(name);
    }
    EXPECT_THAT(error(), HasSubstr(std::string(": ") + name)) << name;
    tensors_ = whole;
  }
}

TEST_F(LayerGoldens, AreRefusedWithoutATensor) {
  for (const char* name : {"ids", "decode.token", "layer.0.conv_state", "decode.layer.3.router_ids"}) {
    const std::vector<test::Tensor> whole = tensors_;
    std::erase_if(tensors_, [&](const auto& t) { return t.name == name; });
    EXPECT_THAT(error(), HasSubstr("'" + std::string(name) + "'"));
    tensors_ = whole;
  }
}

TEST_F(LayerGoldens, AreRefusedWithAnIdOutsideTheVocabulary) {
  for (const int32_t id : {-1, 8192, 2147483647}) {
    set("ids", 5, id);
    EXPECT_THAT(error(), AllOf(HasSubstr("ids[5]"), HasSubstr("8191")));
  }
  set("ids", 5, 7);
  set("decode.token", 0, -3);
  EXPECT_THAT(error(), HasSubstr("decode.token[0] is -3"));
}

TEST(Prompts, AreRefusedWithAnIdThatTheTokenizerDoesNotHave) {
  const test::TempFolder folder;
  for (const char* id : {"-1", "8161", "4294967297"}) {
    test::write_file(folder.path() / "prompts.jsonl", R"({"prompt_ids": [1, )" + std::string(id) +
                                                          R"(], "output_ids": [2], "margins": [1.0]})");
    EXPECT_THAT(test::error_of([&] { load_goldens(folder.path(), kTokens); }),
                AllOf(HasSubstr("prompts.jsonl:1"), HasSubstr("prompt_ids[1] is " + std::string(id))));
  }
  test::write_file(folder.path() / "prompts.jsonl",
                   R"({"prompt_ids": [1], "output_ids": [8161], "margins": [1.0]})");
  EXPECT_THAT(test::error_of([&] { load_goldens(folder.path(), kTokens); }), HasSubstr("output_ids[0]"));
}

TEST(TeacherForced, IsRefusedWithAnIdThatTheTokenizerDoesNotHave) {
  // The bundled text has tokens beyond a tokenizer this small.
  const test::TempFolder folder;
  std::filesystem::copy_file(std::string(test::kTinyGoldens) + "/teacher_forced.npz",
                             folder.path() / "teacher_forced.npz");
  EXPECT_EQ(load_goldens(folder.path(), kTokens).forced->ids.size(), 2048u);
  EXPECT_THAT(test::error_of([&] { load_goldens(folder.path(), 100); }),
              AllOf(HasSubstr("teacher_forced.npz: ids["), HasSubstr("from 0 to 99")));
}

}  // namespace
}  // namespace lily::engine
