#include "plan/policy.h"

#include <array>
#include <cctype>

#include "base/error.h"

namespace lily::plan {
namespace {

struct Entry {
  const char* name;
  const char* description;
};

constexpr std::array<std::string_view, kKvTypes> kKvNames = {"f32", "bf16", "int8"};  // by KvType

constexpr std::array<Entry, kMechanisms> kEntries = {{
    {"P1", "dequantise inside the grouped GEMM"},
    {"P2", "routing stays on the device"},
    {"P3", "tile follows expert load"},
    {"P4", "delta-net state in registers during its scan"},
    {"P5", "bounded prompt chunks"},
    {"P6", "matrix units"},
    {"D1", "row-parallel GEMV for one activation row"},
    {"D2", "token hand-off stays on the device"},
    {"D3", "independent work overlaps, barriers only where needed"},
    {"D4", "fusions: expert input, expert output, q/k preparation, delta update with its norm"},
    {"D5", "coalesced reads of the KV cache"},
    {"D6", "query heads packed over shared KV rows"},
    {"D7", "attention over fixed blocks of a long cache"},
}};

// Long prompts in one chunk: P5's ablation. Programs refuse rows beyond the context anyway.
constexpr int kWholePrompt = 1 << 20;
constexpr int kFixedTileRows = 16;  // P3's ablation

}  // namespace

std::optional<Policy> without(const Policy& policy, Mechanism mechanism) {
  if (!policy.has(mechanism)) return std::nullopt;
  Policy p = policy;
  p.mechanisms.reset(static_cast<size_t>(mechanism));
  switch (mechanism) {
    case Mechanism::p1:
      p.dequantise_in_gemm = false;
      break;
    case Mechanism::p2:
      p.route_on_device = false;
      break;
    case Mechanism::p3:
      p.tile.small = p.tile.large = kFixedTileRows;
      break;
    case Mechanism::p4:
      // Whichever scan is the default from some size on, the ablation is the other one.
      p.delta_blocks_from_rows = policy.delta_blocks_from_rows == kNever ? 1 : kNever;
      break;
    case Mechanism::p5:
      p.max_chunk_rows = kWholePrompt;
      break;
    case Mechanism::p6:
      p.matrix_unit = MatrixUnit::vector;
      break;
    case Mechanism::d1:
      p.row_parallel_gemv = false;
      break;
    case Mechanism::d2:
      p.tokens_stay_on_device = false;
      break;
    case Mechanism::d3:
      p.concurrent = false;
      break;
    case Mechanism::d4:
      for (Fusions* f : {&p.prefill, &p.decode}) {
        if (f == &p.prefill && !p.unfuses_prefill) continue;
        f->gate_up = f->down_combine = f->shared_in_experts = f->qk_prepare = f->delta_norm = f->delta_mixer =
            false;
      }
      break;
    case Mechanism::d5:
      p.coalesced_kv = false;
      break;
    case Mechanism::d6:
      p.pack_query_heads = false;
      break;
    case Mechanism::d7:
      p.fixed_blocks_from_context = kNever;
      break;
  }
  return p;
}

std::string_view name(KvType type) { return kKvNames[static_cast<size_t>(type)]; }

std::optional<KvType> parse_kv_type(std::string_view name) {
  for (size_t i = 0; i < kKvNames.size(); ++i)
    if (name == kKvNames[i]) return static_cast<KvType>(i);
  return std::nullopt;
}

std::string kv_type_names(const Policy& policy) {
  std::string names;
  for (size_t i = 0; i < kKvNames.size(); ++i) {
    if (!policy.has(static_cast<KvType>(i))) continue;
    if (!names.empty()) names += ", ";
    names += kKvNames[i];
  }
  return names;
}

std::string_view name(Mechanism mechanism) { return kEntries[static_cast<size_t>(mechanism)].name; }
std::string_view description(Mechanism mechanism) {
  return kEntries[static_cast<size_t>(mechanism)].description;
}

std::vector<Mechanism> parse_mechanisms(std::string_view list) {
  std::vector<Mechanism> found;
  while (!list.empty()) {
    const size_t comma = list.find(',');
    std::string item(list.substr(0, comma));
    list = comma == std::string_view::npos ? std::string_view() : list.substr(comma + 1);
    for (char& c : item) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    bool known = false;
    for (int i = 0; i < kMechanisms && !known; ++i) {
      if (item != kEntries[static_cast<size_t>(i)].name) continue;
      found.push_back(static_cast<Mechanism>(i));
      known = true;
    }
    if (!known)
      fail(Fault::user, "'{}' is not a mechanism; expected a list of P1..P6 and D1..D7, as in P1,D3", item);
  }
  return found;
}

}  // namespace lily::plan
