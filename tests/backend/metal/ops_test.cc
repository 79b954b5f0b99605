// Every op of the plans, one at a time, against the reference backend on the same inputs.
//
// Inputs are what the reference has at that point of the step, rounded to the type that the value has on
// Metal; so what is compared is one op, not a history.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <set>

#include "backend/metal/lower.h"
#include "base/half.h"
#include "model/weight_store.h"
#include "plan/uses.h"
#include "tests/backend/metal/rig.h"

namespace lily {
namespace {

using backend::Device;
using plan::Ending;
using plan::Phase;
using plan::Policy;
using plan::ValueId;
using test::Inputs;

struct Scene {
  const char* name;
  Phase phase;
  std::vector<int> positions;  // one a sequence
  std::vector<int> rows;
  int64_t context;
};

// Both devices hold the same random state and cache.
class Stage {
 public:
  explicit Stage(const test::EmulatedOptions& options = {},
                 const model::Checkpoint& checkpoint = test::tiny_checkpoint())
      : checkpoint_(checkpoint),
        metal_(test::make_emulated_metal(checkpoint, options)),
        reference_(backend::make_reference_device({})) {
    reference_->load(checkpoint, {});
    reference_->reserve({.n_state_slots = test::kSlots, .n_kv_blocks = test::kBlocks, .n_token_slots = 8},
                        reference_->policy(dims()));
  }
  // Three delta layers and one of attention: of lily-tiny the first half.
  model::Dims dims() const {
    model::Dims d = checkpoint_.dims();
    d.n_layers = 4;
    return d;
  }
  const model::Checkpoint& checkpoint() const { return checkpoint_; }
  metal::MetalDevice& metal() { return *metal_.device; }
  Device& reference() { return *reference_; }
  emulator::EmulatedDevice& gpu() { return *metal_.gpu; }

  // Slot 0 and all blocks: random values that bf16 represents, where the type is bf16.
  void fill_memory(uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const auto values = [&](size_t n, float scale, bool bf16) {
      std::vector<float> v(n);
      for (float& x : v) x = bf16 ? bf16_rounded(scale * normal(random)) : scale * normal(random);
      return v;
    };
    const auto both = [&](const auto& f) {
      f(metal());
      f(reference());
    };
    for (int layer = 0; layer < dims().n_layers; ++layer) {
      if (dims().mixer(layer) == model::Mixer::delta) {
        for (int slot = 0; slot < test::kSlots; ++slot) {
          const auto s = values(static_cast<size_t>(dims().delta_state_bytes_per_layer() / 4), 0.1f, false);
          const auto c = values(static_cast<size_t>(3 * dims().conv_channels()), 1, true);
          both([&](Device& d) {
            d.write_delta_state(backend::StateSlot{slot}, layer, s);
            d.write_conv_state(backend::StateSlot{slot}, layer, c);
          });
        }
        continue;
      }
      for (int block = 0; block < test::kBlocks; ++block)
        for (const auto which : {Device::Kv::k, Device::Kv::v}) {
          const auto kv = values(static_cast<size_t>(backend::kKvBlockTokens * dims().kv_width()), 1, true);
          both([&](Device& d) { d.write_kv(which, layer, block, backend::kKvBlockTokens, kv); });
        }
    }
  }

 private:
  const model::Checkpoint& checkpoint_;
  test::EmulatedMetal metal_;
  std::unique_ptr<Device> reference_;
};

double rms(std::span<const float> v) {
  double sum = 0;
  for (const float x : v) sum += static_cast<double>(x) * x;
  return std::sqrt(sum / static_cast<double>(std::max<size_t>(1, v.size())));
}

double largest(std::span<const float> v) {
  double most = 0;
  for (const float x : v) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

// What rounding can do to a value of a row: to the result itself, half a unit in the last place of its type
// (2^-8 relative for bf16); and to the terms of its sums where the kernel rounds them to bf16 (weights in the
// matrix kernels): independent relative errors of at most 2^-8, hence with a deviation of 2^-8 / sqrt(3), six
// deviations of a sum whose terms together have the size of the row's values. fp32 sums add 2^-18: 2^-24 for
// each doubling of up to 64 terms a lane.
double tolerance(float expected, double row_rms, plan::Type type, bool has_products) {
  const double unit = std::ldexp(1.0, -8);
  double t = type == plan::Type::bf16 ? unit * std::abs(expected) : 0;
  t += (has_products ? 6 / std::sqrt(3.0) * unit : std::ldexp(1.0, -18)) * (row_rms + std::abs(expected));
  return t;
}

bool has_products(const plan::Op& op) {
  return std::visit(plan::overloaded{
                        [](const plan::Embed&) { return false; },
                        [](const plan::RmsNorm&) { return false; },
                        [](const plan::Add&) { return false; },
                        [](const plan::SwiGlu&) { return false; },
                        [](const plan::GatherRows&) { return false; },
                        [](const plan::GatedNorm&) { return false; },
                        [](const plan::HeadNormRope&) { return false; },
                        [](const plan::ShortConv&) { return false; },
                        [](const plan::KvAppend&) { return false; },
                        [](const plan::RouterTop&) { return false; },
                        [](const plan::AttentionGate&) { return false; },
                        [](const auto&) { return true; },
                    },
                    op);
}

// The rows whose eighth and ninth logits are so near that either choice is right.
std::set<int64_t> near_ties(std::span<const float> logits, int64_t stride, int n_experts, double tolerance) {
  std::set<int64_t> rows;
  for (size_t t = 0; t < logits.size() / static_cast<size_t>(stride); ++t) {
    std::vector<float> row(
        logits.begin() + static_cast<std::ptrdiff_t>(t * static_cast<size_t>(stride)),
        logits.begin() + static_cast<std::ptrdiff_t>(t * static_cast<size_t>(stride)) + n_experts);
    std::sort(row.begin(), row.end(), std::greater<>());
    for (int j = 0; j < 8; ++j)
      if (row[static_cast<size_t>(j)] - row[static_cast<size_t>(j) + 1] < tolerance)
        rows.insert(static_cast<int64_t>(t));
  }
  return rows;
}

class Ops : public testing::Test {
 protected:
  static void SetUpTestSuite() { stage_ = new Stage(); }
  static void TearDownTestSuite() { delete stage_; }

  void compare(const Scene& scene, const Policy& policy, Ending ending = Ending::logits) {
    SCOPED_TRACE(scene.name);
    Stage& s = *stage_;
    s.fill_memory(7);
    int n_rows = 0;
    std::vector<test::Sequence> sequences;
    for (size_t i = 0; i < scene.rows.size(); ++i) {
      sequences.push_back(
          {.tokens = test::random_tokens(scene.rows[i], s.dims().vocab, 11 + i),
           .position = scene.positions[i],
           .src = scene.positions[i] == 0 ? backend::kNoState : backend::StateSlot{static_cast<int>(i)},
           .dst = backend::StateSlot{static_cast<int>(3 + i)}});
      n_rows += scene.rows[i];
    }
    const int n_blocks = static_cast<int>((scene.context + 63) / 64);
    ASSERT_LE(n_blocks * static_cast<int>(scene.rows.size()), test::kBlocks);
    Inputs inputs(sequences, n_blocks, s.dims().vocab - 50);
    const plan::Plan plan = plan::forward(
        s.dims(),
        {.phase = scene.phase, .rows = n_rows, .outputs = n_rows, .context = scene.context, .ending = ending},
        policy, {.keep_values = true});
    const auto reference = s.reference().compile(plan);
    const auto metal = s.metal().compile(plan);
    // Once through, so that all values exist there.
    reference->submit(inputs.get());
    reference->wait();

    for (size_t i = 0; i < plan.ops.size(); ++i) {
      const plan::Op& op = plan.ops[i];
      SCOPED_TRACE(fmt::format("op {} {}", i, plan::kind_name(op)));
      std::vector<ValueId> outputs;
      for (const plan::Use& use : plan::uses(op)) {
        if (use.resource != plan::Resource::value) continue;
        if (use.writes()) outputs.push_back(use.value);
        if (!use.reads() || plan.value(use.value).rows == plan::RowSpace::matrix) continue;
        std::vector<float> v = reference->read(use.value);
        if (plan.value(use.value).type == plan::Type::bf16)
          for (float& x : v) x = bf16_rounded(x);
        reference->write(use.value, v);
        metal->write(use.value, v);
      }
      reference->run_ops(inputs.get(), static_cast<int>(i), static_cast<int>(i) + 1);
      metal->run_ops(inputs.get(), static_cast<int>(i), static_cast<int>(i) + 1);
      for (const plan::Use& use : plan::uses(op))
        if (use.resource == plan::Resource::kv && use.writes()) compare_cache(scene, use.layer);
      std::set<int64_t> skipped;
      if (const auto* router = std::get_if<plan::NormRouter>(&op)) {
        const auto logits = reference->read(router->logits);
        skipped = near_ties(logits, plan.value(router->logits).cols, s.dims().n_experts,
                            6 / std::sqrt(3.0) * std::ldexp(1.0, -8) * rms(logits));
      }
      const auto* attends = std::get_if<plan::GatedAttention>(&op);
      const double query = attends != nullptr && attends->prepares() ? query_rms(attends->layer) : 0;
      for (const ValueId id : outputs) {
        const plan::Value& value = plan.value(id);
        if (value.rows == plan::RowSpace::matrix) continue;
        const auto expected = reference->read(id), got = metal->read(id);
        ASSERT_EQ(expected.size(), got.size());
        const auto cols = static_cast<size_t>(value.cols);
        size_t n = expected.size();
        if (value.rows == plan::RowSpace::blocks) n = n_blocks_of(*reference, plan, op) * cols;
        double worst = 0;
        size_t worst_at = 0;
        for (size_t k = 0; k < n; ++k) {
          if (skipped.contains(static_cast<int64_t>(k / cols)) &&
              value.name.find("router_logits") == std::string::npos)
            continue;
          if (std::isinf(expected[k]) && expected[k] == got[k]) continue;
          const std::span<const float> values = std::span(expected).subspan(k / cols * cols, cols);
          // silu(gate) * up: what rounding does to one sum is multiplied by the other, for which the row's
          // largest product stands.
          double row = std::holds_alternative<plan::ExpertsGateUp>(op) ? largest(values) : rms(values);
          row *= 1 + query;
          const double allowed =
              value.type == plan::Type::i32 ? 0.5 : tolerance(expected[k], row, value.type, has_products(op));
          const double ratio = std::abs(static_cast<double>(expected[k]) - got[k]) / allowed;
          if (!(ratio <= worst)) {
            worst = ratio;
            worst_at = k;
          }
        }
        EXPECT_LE(worst, 1) << value.name << "[" << worst_at / cols << "][" << worst_at % cols
                            << "]: expected " << expected[worst_at] << ", got " << got[worst_at];
        if (!(worst <= 1)) return;
      }
    }
    compare_states(scene);
  }

  // Queries and keys that are prepared inside attention are rounded to bf16 there. A score is a sum of 256
  // products over 16, so it moves by a relative 2^-8 / sqrt(3) of rms(query) * rms(key), and the output by as
  // much of itself. The cache's keys have an rms of 1, a prepared query that of its norm's weight.
  static double query_rms(int layer) {
    ThreadPool pool(1);
    const model::WeightId id{model::Weight::q_norm, layer};
    return rms(model::WeightStore::load(stage_->checkpoint(), {id}, pool).vector(id));
  }

  static size_t n_blocks_of(backend::Program& program, const plan::Plan&, const plan::Op& op) {
    return static_cast<size_t>(program.read(std::get<plan::ExpertGroups>(op).n_blocks)[0]);
  }

  static void expect_near(const std::vector<float>& expected, const std::vector<float>& got, double relative,
                          const std::string& what) {
    const double size = rms(expected);
    for (size_t k = 0; k < expected.size(); ++k)
      ASSERT_NEAR(expected[k], got[k], relative * (size + std::abs(expected[k]))) << what << " " << k;
  }

  // The rows that the step appended; the reference goes on with them as bf16 holds them.
  void compare_cache(const Scene& scene, int layer) {
    Stage& s = *stage_;
    const int n_blocks = static_cast<int>((scene.context + 63) / 64);
    for (size_t i = 0; i < scene.rows.size(); ++i)
      for (int b = scene.positions[i] / 64; b <= (scene.positions[i] + scene.rows[i] - 1) / 64; ++b) {
        const int block = static_cast<int>(i) * n_blocks + n_blocks - 1 - b;
        for (const auto which : {Device::Kv::k, Device::Kv::v}) {
          const auto got = s.metal().read_kv(which, layer, block, backend::kKvBlockTokens);
          expect_near(s.reference().read_kv(which, layer, block, backend::kKvBlockTokens), got,
                      std::ldexp(1.0, -8), fmt::format("layers.{} cache, block {}", layer, block));
          s.reference().write_kv(which, layer, block, backend::kKvBlockTokens, got);
        }
      }
  }

  // What the ops left in the slots that the step wrote.
  void compare_states(const Scene& scene) {
    Stage& s = *stage_;
    for (int layer = 0; layer < s.dims().n_layers; ++layer) {
      if (s.dims().mixer(layer) != model::Mixer::delta) continue;
      for (size_t i = 0; i < scene.rows.size(); ++i) {
        const backend::StateSlot slot{static_cast<int>(3 + i)};
        expect_near(s.reference().read_delta_state(slot, layer), s.metal().read_delta_state(slot, layer),
                    std::ldexp(1.0, -12), fmt::format("layers.{} delta state", layer));
        expect_near(s.reference().read_conv_state(slot, layer), s.metal().read_conv_state(slot, layer), 0,
                    fmt::format("layers.{} conv state", layer));
      }
    }
  }

  static inline Stage* stage_ = nullptr;
};

// The same on a chip with matrix units that tensor operations reach.
class TensorOps : public Ops {
 protected:
  static void SetUpTestSuite() { stage_ = new Stage({.tensor_ops = true}); }

  static Policy policy() {
    Policy p = stage_->metal().policy(stage_->dims());
    EXPECT_EQ(p.matrix_unit, plan::MatrixUnit::tensor);
    return p;
  }
};

Policy unfused(Policy p) {
  p.prefill = p.decode = {};
  return p;
}

Policy all_off() {
  Policy p = metal::default_policy();
  for (int m = 0; m < plan::kMechanisms; ++m)
    if (static_cast<plan::Mechanism>(m) != plan::Mechanism::p2)
      p = *plan::without(p, static_cast<plan::Mechanism>(m));
  return p;
}

TEST_F(Ops, DecodeOfOneRowAsFusedAsItGets) {
  for (const int position : {0, 1, 31, 32, 33})
    compare({.name = "1 row", .phase = Phase::decode, .positions = {position}, .rows = {1}, .context = 256},
            metal::default_policy(), Ending::greedy);
}

TEST_F(Ops, DecodeOfThreeSequencesAsFusedAsItGets) {
  compare(
      {.name = "3 rows", .phase = Phase::decode, .positions = {5, 0, 130}, .rows = {1, 1, 1}, .context = 192},
      metal::default_policy());
}

TEST_F(Ops, DecodeOpByOp) {
  compare({.name = "unfused", .phase = Phase::decode, .positions = {40, 63}, .rows = {1, 1}, .context = 128},
          unfused(metal::default_policy()));
}

TEST_F(Ops, DecodeWithADeltaRuleFusedOnlyWithItsNorm) {
  Policy p = metal::default_policy();
  p.decode = {.delta_norm = true};
  compare({.name = "delta_norm", .phase = Phase::decode, .positions = {9}, .rows = {1}, .context = 64}, p);
}

TEST_F(Ops, DecodeOverFixedBlocksOfTheCache) {
  Policy p = metal::default_policy();
  p.fixed_blocks_from_context = 1;
  for (const int position : {0, 1023, 1024, 2100})
    compare({.name = "fixed blocks",
             .phase = Phase::decode,
             .positions = {position},
             .rows = {1},
             .context = 2112},
            p);
}

TEST_F(Ops, DecodeWithoutMechanisms) {
  compare({.name = "all off", .phase = Phase::decode, .positions = {70, 3}, .rows = {1, 1}, .context = 128},
          all_off());
}

TEST_F(Ops, PrefillOfOneTileMoreOrLess) {
  for (const int rows : {9, 16, 17, 33})
    compare({.name = "prefill", .phase = Phase::prefill, .positions = {0}, .rows = {rows}, .context = 64},
            metal::default_policy());
}

TEST_F(Ops, PrefillOfFewRowsUsesTheDecodeKernels) {
  compare({.name = "5 rows", .phase = Phase::prefill, .positions = {17}, .rows = {5}, .context = 64},
          metal::default_policy());
}

TEST_F(Ops, PrefillOfRaggedChunksOfThreeSequences) {
  compare({.name = "3 chunks",
           .phase = Phase::prefill,
           .positions = {3, 0, 60},
           .rows = {2, 40, 27},
           .context = 128},
          metal::default_policy());
}

TEST_F(Ops, PrefillOpByOp) {
  compare({.name = "unfused", .phase = Phase::prefill, .positions = {64, 1}, .rows = {1, 35}, .context = 128},
          unfused(metal::default_policy()));
}

TEST_F(Ops, PrefillWithoutMechanisms) {
  compare({.name = "all off", .phase = Phase::prefill, .positions = {30, 0}, .rows = {70, 3}, .context = 128},
          all_off());
}

TEST_F(TensorOps, PrefillOfOneTileMoreOrLess) {
  for (const int rows : {9, 16, 17, 33})
    compare({.name = "prefill", .phase = Phase::prefill, .positions = {0}, .rows = {rows}, .context = 64},
            policy());
}

TEST_F(TensorOps, PrefillOpByOpOfRaggedChunks) {
  compare({.name = "unfused", .phase = Phase::prefill, .positions = {64, 1}, .rows = {1, 35}, .context = 128},
          unfused(policy()));
}

TEST_F(TensorOps, PrefillWithExpandedWeights) {
  compare({.name = "P1 off", .phase = Phase::prefill, .positions = {0}, .rows = {20}, .context = 64},
          *plan::without(policy(), plan::Mechanism::p1));
}

// The kernels of one storage: op by op and fused, for one row, a few and many, with each matrix unit.
class OfStorage : public Ops {
 protected:
  static void make(const model::Checkpoint& checkpoint, bool tensor_ops = false) {
    stage_ = new Stage({.tensor_ops = tensor_ops}, checkpoint);
  }
  void compare_all() {
    const Policy policy = stage_->metal().policy(stage_->dims());
    for (const Policy& p : {policy, unfused(policy)}) {
      compare({.name = "1 row", .phase = Phase::decode, .positions = {9}, .rows = {1}, .context = 64}, p);
      compare({.name = "3 rows",
               .phase = Phase::decode,
               .positions = {5, 0, 63},
               .rows = {1, 1, 1},
               .context = 64},
              p);
      for (const int rows : {9, 20})
        compare({.name = "prefill", .phase = Phase::prefill, .positions = {0}, .rows = {rows}, .context = 64},
                p);
    }
    for (const plan::Mechanism m : {plan::Mechanism::p1, plan::Mechanism::p6})
      compare({.name = "ablated", .phase = Phase::prefill, .positions = {0}, .rows = {17}, .context = 64},
              *plan::without(policy, m));
    compare({.name = "D1 off", .phase = Phase::decode, .positions = {9}, .rows = {1}, .context = 64},
            *plan::without(policy, plan::Mechanism::d1));
  }
};
class EightBits : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::q8)); }
};
class Unquantised : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::bf16)); }
};
class FourBitsOnTensorOps : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::q4), true); }
};
class EightBitsOnTensorOps : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::q8), true); }
};
class UnquantisedOnTensorOps : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::bf16), true); }
};
TEST_F(EightBits, EveryOp) { compare_all(); }
TEST_F(Unquantised, EveryOp) { compare_all(); }
TEST_F(FourBitsOnTensorOps, EveryOp) { compare_all(); }
TEST_F(EightBitsOnTensorOps, EveryOp) { compare_all(); }
TEST_F(UnquantisedOnTensorOps, EveryOp) { compare_all(); }

TEST_F(Ops, Candidates) {
  compare({.name = "candidates", .phase = Phase::decode, .positions = {3, 0}, .rows = {1, 1}, .context = 64},
          metal::default_policy(), Ending::candidates);
}

}  // namespace
}  // namespace lily
