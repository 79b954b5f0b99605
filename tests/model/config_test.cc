#include "model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/weight.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::model {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

json small() { return test::config_document(test::small_dims()); }

// The config after `text_config.key = value`; a discarded value removes the key.
json with(const char* key, json value) {
  json document = small();
  document["text_config"][key] = std::move(value);
  return document;
}

json without(const char* key) {
  json document = small();
  document["text_config"].erase(key);
  return document;
}

std::string error_for(const json& document) {
  return test::error_of([&] { parse_config(document.dump()); });
}

// config.json of the real model, key by key.
std::string real_config() {
  std::string overrides;
  for (int layer = 0; layer < 40; ++layer)
    for (const char* gate : {"gate", "shared_expert_gate"})
      overrides += fmt::format(
          R"(, "language_model.model.layers.{}.mlp.{}": {{"group_size": 64, "bits": 8}})", layer, gate);
  const std::string quantisation = R"({"group_size": 64, "bits": 4, "mode": "affine")" + overrides + "}";
  std::string layer_types;
  for (int layer = 0; layer < 40; ++layer)
    layer_types +=
        std::string(layer ? ", " : "") + (layer % 4 == 3 ? "\"full_attention\"" : "\"linear_attention\"");
  return R"({
  "architectures": ["Qwen3_5MoeForConditionalGeneration"],
  "image_token_id": 248056,
  "model_type": "qwen3_5_moe",
  "quantization": )" +
         quantisation + R"(,
  "quantization_config": )" +
         quantisation + R"(,
  "text_config": {
    "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "bos_token_id": 248044, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "layer_types": [)" +
         layer_types + R"(],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": false, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "output_router_logits": false, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10],
      "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false, "use_cache": true,
    "vocab_size": 248320
  },
  "tie_word_embeddings": false,
  "video_token_id": 248057,
  "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 2048, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": []},
  "vision_end_token_id": 248054,
  "vision_start_token_id": 248053
})";
}

TEST(Config, TheRealModelParses) {
  const Config config =
      parse_config(real_config(), R"({"do_sample": true, "temperature": 1.0, "top_k": 20, "top_p": 0.95,
      "eos_token_id": [248046, 248044], "pad_token_id": 248044, "bos_token_id": 248044})");
  EXPECT_EQ(config.dims, qwen36_35b_a3b());
  EXPECT_FALSE(config.tied_embeddings);
  EXPECT_THAT(config.stop_ids, ElementsAre(248044, 248046));
  EXPECT_EQ(config.sampling, SamplingDefaults{});
  EXPECT_TRUE(config.quantisation.present);
  EXPECT_EQ(config.quantisation.global, QuantRule{});
  EXPECT_EQ(config.quantisation.overrides.size(), 80u);
  ASSERT_TRUE(config.quantisation.override_for("model.layers.39.mlp.shared_expert_gate"));
  EXPECT_EQ(config.quantisation.override_for("model.layers.39.mlp.shared_expert_gate")->bits, 8);
  EXPECT_FALSE(config.quantisation.override_for("model.layers.39.mlp.switch_mlp.gate_proj"));
}

TEST(Config, TheBundledModelParses) {
  const Config config = read_config("models/lily-tiny");
  EXPECT_EQ(config.dims, lily_tiny());
  EXPECT_FALSE(config.sampling.do_sample);
  EXPECT_THAT(config.stop_ids, ElementsAre(8128, 8130));
}

TEST(Config, ATextConfigMayBeMissingAndTheRootFlat) {
  json document = small();
  json flat = document["text_config"];
  flat["quantization"] = document["quantization"];
  EXPECT_EQ(parse_config(flat.dump()).dims, test::small_dims());
  flat["model_type"] = "qwen3_5_moe";
  EXPECT_EQ(parse_config(flat.dump()).dims, test::small_dims());
}

TEST(Config, EveryConstantThatDiffersIsNamedWithBothValues) {
  const std::pair<const char*, json> cases[] = {{"head_dim", 128},
                                                {"linear_key_head_dim", 64},
                                                {"linear_value_head_dim", 256},
                                                {"linear_conv_kernel_dim", 3},
                                                {"num_experts_per_tok", 10},
                                                {"full_attention_interval", 2},
                                                {"hidden_act", "gelu"},
                                                {"attention_bias", true},
                                                {"attn_output_gate", false},
                                                {"norm_topk_prob", false},
                                                {"decoder_sparse_step", 2},
                                                {"mlp_only_layers", json::array({0})},
                                                {"rms_norm_eps", 1e-5},
                                                {"partial_rotary_factor", 0.5},
                                                {"output_gate_type", "sigmoid"},
                                                {"linear_num_value_heads", 4}};
  for (const auto& [key, value] : cases) {
    json document = with(key, value);
    if (std::string(key) == "partial_rotary_factor") document["text_config"]["rope_parameters"].erase(key);
    EXPECT_THAT(error_for(document), AllOf(HasSubstr("text_config." + std::string(key)),
                                           HasSubstr("expected "), HasSubstr("found " + value.dump())));
  }
}

TEST(Config, ConstantsMayBeAbsent) {
  for (const char* key :
       {"head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
        "num_experts_per_tok", "full_attention_interval", "hidden_act", "attention_bias", "attn_output_gate",
        "layer_types", "rms_norm_eps", "mlp_only_layers", "eos_token_id", "tie_word_embeddings"})
    EXPECT_EQ(parse_config(without(key).dump()).dims, test::small_dims()) << key;
}

TEST(Config, KeysThatSiblingsHaveAreTolerated) {
  for (const auto& [key, value] : {std::pair<const char*, json>{"norm_topk_prob", true},
                                   {"decoder_sparse_step", 1},
                                   {"intermediate_size", 5},
                                   {"output_gate_type", "swish"},
                                   {"output_gate_type", "silu"},
                                   {"mtp_num_hidden_layers", 1},
                                   {"auto_map", {{"AutoModel", "x.Y"}}},
                                   {"layer_types", nullptr},
                                   {"head_dim", nullptr},
                                   {"mamba_ssm_dtype", "bfloat16"},
                                   {"unheard_of", {1, 2}}})
    EXPECT_EQ(parse_config(with(key, value).dump()).dims, test::small_dims()) << key;
}

TEST(Config, EveryDimensionIsRequiredAndInRange) {
  for (const char* key :
       {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads",
        "linear_num_key_heads", "linear_num_value_heads", "num_experts", "moe_intermediate_size",
        "shared_expert_intermediate_size", "max_position_embeddings"}) {
    EXPECT_THAT(error_for(without(key)), HasSubstr("text_config." + std::string(key)));
    const json too_large[] = {
        0, -1, (1 << 20) + 1, 1.5, "64", true, json::array(), 18446744073709551615u, 9223372036854775807};
    for (const json& value : too_large)
      EXPECT_THAT(error_for(with(key, value)),
                  AllOf(HasSubstr("text_config." + std::string(key)), HasSubstr("found")))
          << value;
  }
  EXPECT_THAT(error_for(with("num_hidden_layers", 1025)), HasSubstr("from 1 to 1024, found 1025"));
  EXPECT_THAT(error_for(with("num_experts", 4097)), HasSubstr("from 1 to 4096, found 4097"));
}

TEST(Config, DimensionsMustDivide) {
  EXPECT_THAT(error_for(with("hidden_size", 96)), HasSubstr("multiple of 64"));
  EXPECT_THAT(error_for(with("moe_intermediate_size", 32)), HasSubstr("multiple of 64"));
  EXPECT_THAT(error_for(with("shared_expert_intermediate_size", 100)), HasSubstr("multiple of 64"));
  EXPECT_THAT(error_for(with("num_experts", 7)), HasSubstr("expected 8 or more, found 7"));
  json document = with("num_attention_heads", 3);
  document["text_config"]["num_key_value_heads"] = 2;
  EXPECT_THAT(error_for(document), AllOf(HasSubstr("num_attention_heads"), HasSubstr("multiple of 2")));
}

TEST(Config, TheLargestDimensionsDoNotOverflow) {
  json document = small();
  for (const char* key : {"hidden_size", "num_attention_heads", "moe_intermediate_size",
                          "shared_expert_intermediate_size", "linear_num_value_heads"})
    document["text_config"][key] = 1 << 20;
  document["text_config"]["linear_num_key_heads"] = 1 << 19;
  document["text_config"]["num_experts"] = 4096;
  document["text_config"]["vocab_size"] = 1 << 20;
  const Dims dims = parse_config(document.dump()).dims;
  EXPECT_EQ(dims.q_gate_width(), 1 << 29);
  EXPECT_EQ(dims.conv_channels(), 1 << 28);
  for (const WeightSpec& spec : catalogue(dims)) EXPECT_GT(storage_bytes(spec.n_elements(), Storage::f32), 0);
}

TEST(Config, LayerTypesAgreeWithTheInterval) {
  json types = small()["text_config"]["layer_types"];
  types[2] = "full_attention";
  EXPECT_THAT(error_for(with("layer_types", types)),
              HasSubstr("layer_types[2]: expected \"linear_attention\""));
  types.erase(2);
  EXPECT_THAT(error_for(with("layer_types", types)), HasSubstr("a list of 4 names"));
  EXPECT_THAT(error_for(with("layer_types", "x")), HasSubstr("a list of 4 names"));
  EXPECT_THAT(error_for(with("layer_types", json::array({1, 2, 3, 4}))), HasSubstr("layer_types[0]"));
}

TEST(Config, OtherArchitecturesAreRefused) {
  json document = small();
  document["model_type"] = "llama";
  document["auto_map"] = {{"AutoModel", "modeling.X"}};  // code of the repository is never run
  EXPECT_THAT(error_for(document), AllOf(HasSubstr("model_type"), HasSubstr("llama")));
  document["model_type"] = "qwen3_5";
  EXPECT_THAT(error_for(document), HasSubstr("dense models of the family"));
  document.erase("model_type");
  EXPECT_NO_THROW(parse_config(document.dump()));  // the text part names it
  document["text_config"].erase("model_type");
  EXPECT_THAT(error_for(document), HasSubstr("model_type is missing"));
  EXPECT_THAT(error_for(with("model_type", "qwen3_5_text")), HasSubstr("dense"));
  EXPECT_THAT(error_for(with("num_experts", 0)), HasSubstr("dense"));
  EXPECT_THAT(error_for(without("num_experts")), HasSubstr("dense"));
}

TEST(Config, RopeSettingsAreFoundWhereverTheyStand) {
  const json rope = small()["text_config"]["rope_parameters"];
  for (const char* place : {"text_config.rope_parameters", "rope_parameters", "text_config", "root"}) {
    json document = without("rope_parameters");
    if (std::string(place) == "text_config.rope_parameters")
      document["text_config"]["rope_parameters"] = rope;
    if (std::string(place) == "rope_parameters") document["rope_parameters"] = rope;
    if (std::string(place) == "text_config") document["text_config"].update(rope);
    if (std::string(place) == "root") document["rope_theta"] = 1e7;
    EXPECT_EQ(parse_config(document.dump()).dims.rope_theta, 1e7) << place;
  }
  json document = small();
  document["rope_theta"] = 10000;  // a leftover at the root does not win
  EXPECT_EQ(parse_config(document.dump()).dims.rope_theta, 1e7);
  EXPECT_THAT(error_for(without("rope_parameters")), HasSubstr("rope_theta is missing"));
}

TEST(Config, RopeValuesAreChecked) {
  const auto rope = [](const char* key, json value) {
    json document = small();
    document["text_config"]["rope_parameters"][key] = std::move(value);
    return document;
  };
  EXPECT_THAT(error_for(rope("rope_type", "yarn")),
              AllOf(HasSubstr("text_config.rope_parameters.rope_type"), HasSubstr("yarn")));
  EXPECT_THAT(error_for(rope("type", "linear")), HasSubstr("linear"));
  EXPECT_NO_THROW(parse_config(rope("rope_type", "mrope").dump()));
  EXPECT_NO_THROW(parse_config(rope("type", "default").dump()));
  for (const json& theta : {json(0), json(-1.0), json("x"), json(1), json(true)})
    EXPECT_THAT(error_for(rope("rope_theta", theta)), HasSubstr("rope_theta"));
  EXPECT_THAT(error_for(rope("partial_rotary_factor", 0.5)),
              HasSubstr("partial_rotary_factor: expected 0.25, found 0.5"));
  json document = small();
  document["text_config"]["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}};
  EXPECT_THAT(error_for(document), HasSubstr("text_config.rope_scaling.type"));
}

TEST(Config, QuantisationOverridesFollowTheRules) {
  json document = small();
  document["quantization"] = {{"bits", 8},
                              {"group_size", 32},
                              {"mode", "mxfp8"},
                              {"language_model.model.layers.0.a", {{"bits", 8}}},
                              {"model.language_model.layers.0.b", {{"group_size", 32}}},
                              {"model.layers.0.c", json::object()},
                              {"model.layers.0.d", {{"mode", "mxfp4"}}},
                              {"model.layers.0.e", {{"mode", "nvfp4"}}},
                              {"model.layers.0.f", {{"mode", "mxfp8"}, {"bits", nullptr}}},
                              {"model.layers.0.g", false},
                              {"model.layers.0.h", true},
                              {"language_model.lm_head", {{"bits", 6}}}};
  const Quantisation q = parse_config(document.dump()).quantisation;
  const auto rule = [&](const char* name) {
    const QuantRule* found = q.override_for(name);
    return found ? *found : QuantRule{.bits = -1};
  };
  EXPECT_EQ(q.global, (QuantRule{true, "mxfp8", 8, 32}));
  EXPECT_EQ(rule("model.layers.0.a"), (QuantRule{true, "affine", 8, 64}));  // not the global mode or group
  EXPECT_EQ(rule("model.layers.0.b"), (QuantRule{true, "affine", 4, 32}));
  EXPECT_EQ(rule("model.layers.0.c"), (QuantRule{true, "affine", 4, 64}));
  EXPECT_EQ(rule("model.layers.0.d"), (QuantRule{true, "mxfp4", 4, 32}));
  EXPECT_EQ(rule("model.layers.0.e"), (QuantRule{true, "nvfp4", 4, 16}));
  EXPECT_EQ(rule("model.layers.0.f"), (QuantRule{true, "mxfp8", 8, 32}));
  EXPECT_FALSE(rule("model.layers.0.g").quantised);
  EXPECT_EQ(rule("model.layers.0.h"), q.global);
  EXPECT_EQ(rule("lm_head").bits, 6);
  EXPECT_FALSE(q.override_for("model.layers.0"));
}

TEST(Config, QuantisationDefaultsAreAffine4BitsIn64) {
  json document = small();
  document["quantization"] = json::object();
  EXPECT_EQ(parse_config(document.dump()).quantisation.global, QuantRule{});
  document.erase("quantization");
  EXPECT_TRUE(parse_config(document.dump()).quantisation.present);  // the copy
  document.erase("quantization_config");
  EXPECT_FALSE(parse_config(document.dump()).quantisation.present);
}

TEST(Config, QuantisationValuesAreChecked) {
  const auto with_block = [](json block) {
    json document = small();
    document["quantization"] = std::move(block);
    return document;
  };
  EXPECT_THAT(error_for(with_block(4)), HasSubstr("quantization: expected an object"));
  for (const json& bits : {json(0), json(-4), json(33), json("4"), json(4.0)})
    EXPECT_THAT(error_for(with_block({{"bits", bits}})),
                HasSubstr("quantization.bits: expected an integer from 1 to 32"));
  EXPECT_THAT(error_for(with_block({{"x.y", {{"group_size", 0}}}})),
              HasSubstr("quantization.x.y.group_size"));
  EXPECT_THAT(error_for(with_block({{"mode", 1}})), HasSubstr("quantization.mode: expected a string"));
  EXPECT_THAT(error_for(with_block({{"model.x", {{"bits", 4}}}, {"language_model.model.x", {{"bits", 8}}}})),
              HasSubstr("two different entries for model.x"));
  EXPECT_NO_THROW(parse_config(
      with_block({{"model.x", {{"bits", 8}}}, {"language_model.model.x", {{"bits", 8}}}}).dump()));
}

TEST(Config, OtherQuantisationMethodsAreNamed) {
  for (const char* method : {"fp8", "gptq", "awq", "bitnet", "compressed-tensors"}) {
    json document = small();
    document.erase("quantization");
    document["quantization_config"] = {{"quant_method", method}, {"bits", 4}};
    EXPECT_THAT(error_for(document), HasSubstr(method));
    document = small();
    document["text_config"]["quantization_config"] = {{"quant_method", method}};
    EXPECT_THAT(error_for(document), HasSubstr(method));
  }
}

TEST(Config, TiedEmbeddingsAreReadFromTheTextConfigFirst) {
  json document = small();
  document["tie_word_embeddings"] = true;
  EXPECT_FALSE(parse_config(document.dump()).tied_embeddings);
  document["text_config"].erase("tie_word_embeddings");
  EXPECT_TRUE(parse_config(document.dump()).tied_embeddings);
  document["tie_word_embeddings"] = "yes";
  EXPECT_THAT(error_for(document), HasSubstr("tie_word_embeddings"));
}

TEST(Config, StopIdsAreTheUnionOfAllFiles) {
  json document = small();
  document["eos_token_id"] = {3, 5};
  document["text_config"]["eos_token_id"] = 7;
  EXPECT_THAT(parse_config(document.dump(), R"({"eos_token_id": [5, 1]})").stop_ids, ElementsAre(1, 3, 5, 7));
  EXPECT_THAT(parse_config(document.dump(), R"({"eos_token_id": null})").stop_ids, ElementsAre(3, 5, 7));
  for (const json& id :
       {json(128), json(-1), json("a"), json({1, 128}), json(1.0), json::array({json::array({1})})}) {
    document["eos_token_id"] = id;
    EXPECT_THAT(error_for(document), HasSubstr("eos_token_id: expected token ids from 0 to 127")) << id;
  }
}

TEST(Config, TheFullVocabularyAlwaysStopsAtBothEnds) {
  json document = with("vocab_size", 248320);
  document.erase("eos_token_id");
  document["text_config"]["eos_token_id"] = 248044;  // alone it would miss the end of a chat turn
  EXPECT_THAT(parse_config(document.dump()).stop_ids, ElementsAre(248044, 248046));
}

TEST(Config, SamplingDefaultsComeFromGenerationConfig) {
  const auto sampling = [](const char* text) { return parse_config(small().dump(), text).sampling; };
  EXPECT_EQ(sampling(""), (SamplingDefaults{true, 1.0, 20, 0.95}));
  EXPECT_EQ(sampling("{}"), (SamplingDefaults{true, 1.0, 20, 0.95}));
  EXPECT_EQ(sampling(R"({"do_sample": false, "temperature": 0.6, "top_k": 0, "top_p": 0.8})"),
            (SamplingDefaults{false, 0.6, 0, 0.8}));
  for (const char* text : {R"({"temperature": -0.1})", R"({"temperature": 101})", R"({"temperature": "1"})",
                           R"({"top_p": 1.01})", R"({"top_k": -1})", R"({"top_k": 1.5})",
                           R"({"top_k": 4294967296})", R"({"do_sample": 1})", "[]", "x", "{} {}"})
    EXPECT_THAT(test::error_of([&] { parse_config(small().dump(), text); }),
                HasSubstr("generation_config.json: "))
        << text;
}

TEST(Config, TextThatIsNotAStrictJsonObjectIsRefused) {
  for (const char* text : {"", "[]", "1", "{", "{\"a\":1,\"a\":2}", "\xff", "{}{}"})
    EXPECT_THAT(test::error_of([&] { parse_config(text); }), HasSubstr("config.json: "));
  EXPECT_THAT(test::error_of([&] { parse_config(small().dump() + std::string(4 << 20, ' ')); }),
              HasSubstr("more than the 4194304 allowed"));
  EXPECT_THAT(error_for({{"text_config", 1}}), HasSubstr("text_config: expected an object"));
}

TEST(Config, EveryRemovedOrReplacedKeyIsRefusedOrHarmless) {
  const json original = small();
  for (const char* holder : {"", "text_config", "quantization"}) {
    const json& keys = *holder ? original[holder] : original;
    for (const auto& [key, ignored] : keys.items()) {
      for (const json& value :
           {json(nullptr), json("x"), json(-1), json(1e300), json::array(), json::object(), json(true)}) {
        json changed = original;
        (*holder ? changed[holder] : changed)[key] = value;
        try {
          EXPECT_EQ(parse_config(changed.dump()).dims.n_layers, 4);
        } catch (const Error& error) {
          EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
          EXPECT_THAT(error.what(), HasSubstr("config.json: "));
        }
      }
    }
  }
}

TEST(Config, AFolderWithoutConfigIsNamed) {
  const test::TempFolder folder;
  EXPECT_THAT(test::error_of([&] { read_config(folder.path()); }),
              AllOf(HasSubstr(folder.path().string()), HasSubstr("config.json")));
  test::write_file(folder.path() / "config.json", small().dump());
  EXPECT_EQ(read_config(folder.path()).dims, test::small_dims());
  test::write_file(folder.path() / "generation_config.json", "");
  EXPECT_THAT(test::error_of([&] { read_config(folder.path()); }),
              HasSubstr("generation_config.json: is empty"));
  test::write_file(folder.path() / "config.json", std::string((4 << 20) + 1, ' '));
  EXPECT_THAT(test::error_of([&] { read_config(folder.path()); }), HasSubstr("4194305 bytes"));
}

}  // namespace
}  // namespace lily::model
