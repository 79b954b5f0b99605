// The bundled model on a backend, for golden tests: loaded once a program and backend.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "engine/evaluate.h"
#include "engine/load.h"
#include "model/checkpoint.h"
#include "tests/support/golden.h"
#include "text/tokenizer.h"

namespace lily::test {

inline const model::Checkpoint& tiny_checkpoint() {
  static const model::Checkpoint checkpoint = model::Checkpoint::open(kTinyModel);
  return checkpoint;
}

inline int32_t tiny_n_tokens() {
  static const int32_t n_tokens = text::Tokenizer::load(kTinyModel).n_tokens();
  return n_tokens;
}

inline const engine::Goldens& tiny_goldens() {
  static const engine::Goldens goldens = engine::load_goldens(kTinyGoldens, tiny_n_tokens());
  return goldens;
}

inline std::unique_ptr<engine::LoadedModel> load_tiny(engine::LoadOptions options) {
  if (options.memory.context == 0) options.memory.context = 2112;
  auto model = std::make_unique<engine::LoadedModel>(tiny_checkpoint(), tiny_n_tokens(), options);
  model->load();
  return model;
}

inline engine::LoadedModel& tiny_on(const std::string& backend, plan::KvType kv) {
  static std::map<std::pair<std::string, plan::KvType>, std::unique_ptr<engine::LoadedModel>> models;
  auto& model = models[{backend, kv}];
  if (!model) {
    engine::LoadOptions options{.backend = backend, .kv = kv};
    options.memory.max_sequences = 4;
    model = load_tiny(options);
  }
  return *model;
}

}  // namespace lily::test
