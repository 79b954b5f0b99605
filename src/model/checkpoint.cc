#include "model/checkpoint.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"
#include "model/checkpoint_match.h"
#include "model/shards.h"
#include "model/tensor_names.h"

namespace lily::model {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "files are little-endian and are used as they are");

constexpr size_t kMaxNamesInError = 10;
constexpr int64_t kReleaseBytes = 1 << 16;  // smaller reads are not worth a system call

// Everything that can be found out about a folder without reading a weight.
struct Survey {
  Shards shards;
  CheckpointReport report;
  std::string config_text;
  std::vector<StoredWeight> weights;
  std::vector<Problem> problems;
};

// A draft head is in the layout that MLX converters write if its experts are stacked.
CheckpointReport::Mtp mtp_status(const Shards& shards) {
  std::vector<std::string> names = shards.mtp_names;
  for (const auto& [name, tensor] : shards.tensors)
    if (name_class(name) == NameClass::mtp) names.push_back(name);
  if (names.empty()) return CheckpointReport::Mtp::absent;
  const auto any = [&](std::string_view part) {
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return name.find(part) != std::string::npos; });
  };
  for (const char* needed :
       {"fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "layers.0.",
        ".mlp.switch_mlp.gate_proj.", ".mlp.switch_mlp.up_proj.", ".mlp.switch_mlp.down_proj."})
    if (!any(needed)) return CheckpointReport::Mtp::unsupported_layout;
  return CheckpointReport::Mtp::available;
}

Survey survey(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored))
    fail(Fault::user, "{}: is not a folder; a checkpoint is a folder with config.json and safetensors files",
         printable(folder.string(), 400));
  Survey found;
  try {
    found.report.config = read_config(folder, &found.config_text);
  } catch (const Error& error) {
    found.problems.push_back({Problem::Kind::file, "config.json", error.what()});
  }
  found.shards = open_shards(folder);
  found.report.notices = found.shards.notices;
  found.problems.insert(found.problems.end(), found.shards.problems.begin(), found.shards.problems.end());
  found.report.mtp = mtp_status(found.shards);
  if (found.report.config) {
    found.weights = match_weights(found.shards, found.report, found.problems);
  } else {
    for (const auto& [name, tensor] : found.shards.tensors) {
      found.report.bytes_by_class[static_cast<size_t>(TensorClass::other)] += tensor.entry.n_bytes();
      found.report.tensors.push_back({.name = name,
                                      .file = found.shards.files[tensor.file].path().filename().string(),
                                      .shape = tensor.entry.shape,
                                      .dtype = tensor.entry.dtype_name,
                                      .n_bytes = tensor.entry.n_bytes()});
    }
  }
  // What matters most first, otherwise in the order found, which is that of execution.
  std::multimap<Problem::Kind, Problem> by_kind;
  for (Problem& problem : found.problems) by_kind.emplace(problem.kind, std::move(problem));
  found.problems.clear();
  for (auto& [kind, problem] : by_kind) found.problems.push_back(std::move(problem));
  for (const Problem& problem : found.problems) found.report.problems.push_back(problem.message);
  return found;
}

[[noreturn]] void fail_with(const std::vector<Problem>& problems) {
  // Only problems of the first one's kind: others tend to follow from it.
  std::vector<std::string> others;
  size_t n_others = 0;
  for (size_t i = 1; i < problems.size() && problems[i].kind == problems[0].kind; ++i, ++n_others)
    if (others.size() + 1 < kMaxNamesInError) others.push_back(problems[i].name);
  if (others.empty()) fail(Fault::model, "{}", problems[0].message);
  fail(Fault::model, "{} ({} more: {}{})", problems[0].message, n_others, fmt::join(others, ", "),
       n_others > others.size() ? ", ..." : "");
}

// FNV-1a over 8 bytes at a time, with a final mix: it tells checkpoints apart and is no defence against
// forgery.
class Hash {
 public:
  void add(std::span<const std::byte> bytes) {
    for (size_t i = 0; i < bytes.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i, std::min<size_t>(8, bytes.size() - i));
      add(word);
    }
    add(bytes.size());
  }
  void add(uint64_t word) {
    state_ = (state_ ^ word) * 0x100000001b3u;
    state_ ^= state_ >> 29;
  }
  uint64_t value() const { return (state_ ^ state_ >> 32) * 0x9e3779b97f4a7c15u; }

 private:
  uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace

std::string_view to_string(TensorClass tensor_class) {
  constexpr std::array<std::string_view, kTensorClasses> kNames = {
      "embedding", "head",  "experts", "shared_expert", "attention", "delta",
      "router",    "norms", "vision",  "mtp",           "other"};
  return kNames[static_cast<size_t>(tensor_class)];
}

TensorClass tensor_class(Weight weight) {
  switch (weight) {
    case Weight::embed:
      return TensorClass::embedding;
    case Weight::lm_head:
      return TensorClass::head;
    case Weight::final_norm:
    case Weight::input_norm:
    case Weight::post_norm:
    case Weight::q_norm:
    case Weight::k_norm:
      return TensorClass::norms;
    case Weight::q_proj:
    case Weight::k_proj:
    case Weight::v_proj:
    case Weight::o_proj:
      return TensorClass::attention;
    case Weight::delta_qkv:
    case Weight::delta_z:
    case Weight::delta_b:
    case Weight::delta_a:
    case Weight::delta_out:
    case Weight::conv:
    case Weight::a_log:
    case Weight::dt_bias:
    case Weight::delta_norm:
      return TensorClass::delta;
    case Weight::router:
    case Weight::shared_gate:
      return TensorClass::router;
    case Weight::expert_gate:
    case Weight::expert_up:
    case Weight::expert_down:
      return TensorClass::experts;
    case Weight::shared_gate_proj:
    case Weight::shared_up_proj:
    case Weight::shared_down_proj:
      return TensorClass::shared_expert;
  }
  return TensorClass::other;
}

CheckpointReport inspect_checkpoint(const fs::path& folder) { return survey(folder).report; }

Checkpoint Checkpoint::open(const fs::path& folder) {
  Survey found = survey(folder);
  if (!found.problems.empty()) fail_with(found.problems);
  for (const std::string& notice : found.report.notices) log(LogLevel::notice, "{}", notice);
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  checkpoint.report_ = std::move(found.report);
  checkpoint.config_text_ = std::move(found.config_text);
  checkpoint.files_ = std::move(found.shards.files);
  checkpoint.headers_ = std::move(found.shards.headers);
  checkpoint.weights_ = std::move(found.weights);
  for (const File& file : checkpoint.files_) file.expect_one_pass();
  return checkpoint;
}

void Checkpoint::keep_layers(int first, int n) {
  Dims& kept = report_.config->dims;
  LILY_CHECK(first >= 0 && n > 0 && first + n <= kept.n_layers && first % kept.attention_interval == 0,
             "layers {} to {} of {}", first, first + n, kept.n_layers);
  const auto at = [&](int layer) { return weights_.begin() + (layer + 1) * kWeightKinds; };
  weights_.erase(at(first + n), weights_.end());
  weights_.erase(at(0), at(first));
  kept.n_layers = n;
  report_.text_bytes = 0;
  for (const WeightSpec& spec : catalogue(kept))
    if (source(spec.id) == spec.id) report_.text_bytes += weight(spec.id).n_bytes();
}

WeightId Checkpoint::source(WeightId id) const {
  return id.weight == Weight::lm_head && config().tied_embeddings ? WeightId{Weight::embed, kNoLayer} : id;
}

const StoredWeight& Checkpoint::weight(WeightId id) const {
  const size_t index = weight_index(source(id));
  LILY_CHECK(index < weights_.size() && !weights_[index].shape.empty(), "{} is not in the catalogue",
             to_string(id));
  return weights_[index];
}

void Checkpoint::read(const Part& part, int64_t offset, std::span<std::byte> out) const {
  const auto n_bytes = static_cast<int64_t>(out.size());
  LILY_CHECK(part.file >= 0 && offset >= 0 && n_bytes <= part.n_bytes && offset <= part.n_bytes - n_bytes,
             "{}: {} bytes at {} of {}", part.name, n_bytes, offset, part.n_bytes);
  const File& file = files_[part.file];
  const uint64_t start = part.offset + static_cast<uint64_t>(offset);
  file.read_at(start, out);
  if (n_bytes >= kReleaseBytes) file.release_cached(start, out.size());
}

void Checkpoint::release_cached(const StoredWeight& weight) const {
  for (const Part* part : {&weight.codes, &weight.scales, &weight.biases, &weight.values})
    if (part->n_bytes > 0)
      files_[part->file].release_cached(part->offset, static_cast<uint64_t>(part->n_bytes));
}

std::string Checkpoint::id() const {
  // Headers do not tell two trainings of one model apart, so samples of the data are taken too.
  constexpr uint64_t kSamples = 64, kSampleBytes = 4096;
  Hash hash;
  hash.add(std::as_bytes(std::span(config_text_)));
  std::vector<std::byte> sample;
  for (size_t i = 0; i < files_.size(); ++i) {
    hash.add(std::as_bytes(std::span(headers_[i])));
    const uint64_t size = files_[i].size();
    hash.add(size);
    for (uint64_t k = 0; k < kSamples; ++k) {
      const uint64_t start = size / kSamples * k;
      sample.resize(std::min(kSampleBytes, size - start));
      files_[i].read_at(start, sample);
      hash.add(sample);
    }
  }
  return fmt::format("{:016x}", hash.value());
}

}  // namespace lily::model
