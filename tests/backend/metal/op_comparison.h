// Every op of a plan, one at a time, on the emulated GPU and on the reference backend, on the same inputs.
//
// Inputs are what the reference has at that point of the step, rounded to the type that the value has on
// Metal; so what is compared is one op, not a history.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "tests/backend/metal/rig.h"

namespace lily::test {

struct Scene {
  const char* name;
  plan::Phase phase;
  std::vector<int> positions;  // one a sequence
  std::vector<int> rows;
  int64_t context;
  // The k-th expert of a row, in place of the router's choice.
  std::function<int(int64_t row, int k)> expert = {};
  std::function<bool(const plan::Op&)> compares = {};  // the other ops run on the reference alone; empty: all
  // Of these, only ops with a dispatch that no scene before had, by kernel or by kernel and parameters: where
  // the widths make each one slow.
  enum class Only : uint8_t { all, new_kernels, new_shapes };
  Only only = Only::all;
  bool all_outputs = true;  // logits of all rows, or of the last one of each sequence
  bool end_tokens = false;  // the first row has the last token of the vocabulary, the last row the first
  int n_layers = 4;         // the first ones: attention is the fourth
};

// Both devices hold the same random state and cache.
class Stage {
 public:
  explicit Stage(const EmulatedOptions& options = {},
                 const model::Checkpoint& checkpoint = tiny_checkpoint());
  // At most three delta layers and one of attention: of lily-tiny the first half.
  model::Dims dims() const {
    model::Dims d = checkpoint_.dims();
    d.n_layers = std::min(d.n_layers, 4);
    return d;
  }
  const model::Checkpoint& checkpoint() const { return checkpoint_; }
  metal::MetalDevice& metal() { return *metal_.device; }
  backend::Device& reference() { return *reference_; }
  emulator::EmulatedDevice& gpu() { return *metal_.gpu; }
  plan::KvType kv() const { return kv_; }

  // The first slots and blocks: random values that bf16 represents, where the type is bf16. What no step
  // before has used is NaN on the emulated GPU.
  void fill_memory(int n_slots, int n_blocks);

 private:
  const model::Checkpoint& checkpoint_;
  const plan::KvType kv_;
  EmulatedMetal metal_;
  std::unique_ptr<backend::Device> reference_;
};

class OpComparison : public testing::Test {
 protected:
  // Called by SetUpTestSuite().
  static void make_stage(const EmulatedOptions& options = {},
                         const model::Checkpoint& checkpoint = tiny_checkpoint());
  static void TearDownTestSuite();
  static Stage& stage() { return *stage_; }

  // With the stage's type of KV cache, whatever the policy's.
  void compare(const Scene& scene, plan::Policy policy, plan::Ending ending = plan::Ending::logits);
  // What the GPU has launched since, outside of compare(), counts as compared.
  static void note_launched();

 private:
  void compare_cache(const Scene& scene, int layer, bool same_keys);
  void compare_states(const Scene& scene);

  static inline Stage* stage_ = nullptr;
};

// Embedding, final norm, head and what a step ends in.
bool is_of_vocabulary(const plan::Op& op);

// When everything in a program has run, every kernel of these libraries has been launched and compared, but
// for those that are `elsewhere`.
class EveryKernel : public testing::Environment {
 public:
  explicit EveryKernel(std::vector<const emulator::CompiledLibrary*> libraries,
                       std::set<std::string> elsewhere = {})
      : libraries_(std::move(libraries)), elsewhere_(std::move(elsewhere)) {}
  void TearDown() override;

 private:
  const std::vector<const emulator::CompiledLibrary*> libraries_;
  const std::set<std::string> elsewhere_;
};

}  // namespace lily::test
