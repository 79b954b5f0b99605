// The Metal backend on an emulated GPU beside the reference backend, on one checkpoint.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/metal/metal_device.h"
#include "backend/metal/program.h"
#include "emulator/emulated_device.h"
#include "model/checkpoint.h"
#include "plan/plan.h"

namespace lily::backend {
// The registry would bring all other backends into these programs.
std::unique_ptr<Device> make_reference_device(const DeviceOptions& options);
}  // namespace lily::backend

namespace lily::test {

inline constexpr int kSlots = 6, kBlocks = 96;

// A Metal device whose GPU is emulated; `gpu` belongs to it.
struct EmulatedMetal {
  emulator::EmulatedDevice* gpu = nullptr;
  std::unique_ptr<metal::MetalDevice> device;
};
struct EmulatedOptions {
  bool traced = false;
  uint64_t seed = 0;  // 0: in program order, else shuffled
  int max_delay_us = 0;
  bool keep_counters = false, keep_accesses = false;
  bool tensor_ops = false;  // a chip with matrix units, as M5
  plan::KvType kv = plan::KvType::bf16;
  bool shared_places = false;
  emulator::Options::OnFinding on_finding = emulator::Options::OnFinding::fail;
};
// With shared places there are as many of them as states.
EmulatedMetal make_emulated_metal(const model::Checkpoint& checkpoint, const EmulatedOptions& options = {});

// lily-tiny, opened once a process.
const model::Checkpoint& tiny_checkpoint();

// Random weights in the same architecture and file format, with five narrow layers: for traced steps. Made
// once a process, in a temporary folder.
const model::Checkpoint& small_checkpoint();

// The same with four layers, and with linear weights that are all stored in this way (q4: but for the gates,
// as published).
const model::Checkpoint& checkpoint_of(model::Storage storage, int n_experts = 12);

// The real model's widths, as `lily selftest` has them: four layers, few experts, a short vocabulary.
const model::Checkpoint& wide_checkpoint();

// The same widths with ten experts, and with linear weights stored in this way as checkpoint_of() does.
const model::Checkpoint& wide_checkpoint_of(model::Storage storage);

// The real vocabulary and hidden width, all else narrow: for the embedding and the head.
const model::Checkpoint& vocabulary_checkpoint();

// The block of the cache that stands for block `id`, of which there may be more: all but block 0 stand for
// several then.
inline int cache_block(int id) { return id < kBlocks ? id : 1 + (id - 1) % (kBlocks - 1); }

// Inputs of a step, owned. Sequence i has blocks i * blocks_a_sequence ..., its last one first, reads state
// slot `src` and writes slot `dst`.
struct Sequence {
  std::vector<int32_t> tokens;
  int position = 0;
  backend::StateSlot src = backend::kNoState;
  backend::StateSlot dst{0};
};
class Inputs {
 public:
  Inputs(const std::vector<Sequence>& sequences, int blocks_a_sequence, int n_tokens,
         bool all_outputs = true);
  backend::StepInputs get() const {
    return {.tokens = tokens_,
            .segments = segments_,
            .block_table = blocks_,
            .output_rows = output_rows_,
            .sampling = sampling_,
            .n_tokens = n_tokens_};
  }
  std::vector<backend::Sampling>& sampling() { return sampling_; }
  std::vector<backend::Segment>& segments() { return segments_; }
  std::vector<int32_t>& blocks() { return blocks_; }
  int n_rows() const { return static_cast<int>(tokens_.size()); }
  int n_outputs() const { return static_cast<int>(output_rows_.size()); }

 private:
  std::vector<int32_t> tokens_, blocks_, output_rows_;
  std::vector<backend::Segment> segments_;
  std::vector<backend::Sampling> sampling_;
  int n_tokens_;
};

// A plan of nothing but the ending: its logits, value 0, are written by the test.
plan::Plan ending_plan(plan::Ending ending, int vocab, int n_outputs, int n_candidates);

std::vector<int32_t> random_tokens(int n, int vocab, uint64_t seed);

}  // namespace lily::test
