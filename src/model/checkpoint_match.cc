#include "model/checkpoint_match.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/printable.h"
#include "model/tensor_names.h"

namespace lily::model {
namespace {

using Kind = Problem::Kind;
using Shape = std::vector<int64_t>;

bool is_float(Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f16 || dtype == Dtype::f32; }

std::string shown(std::string_view dtype, const Shape& shape) {
  return fmt::format("{} [{}]", printable(dtype, 40), fmt::join(shape, ", "));
}
std::string shown(const TensorEntry& entry) { return shown(entry.dtype_name, entry.shape); }

Shape with_last(Shape shape, int64_t last) {
  shape.back() = last;
  return shape;
}

// A_log and dt_bias are parameters themselves, other small vectors are a module's `weight`.
std::string vector_name(const WeightSpec& spec) {
  const bool is_bare = spec.id.weight == Weight::a_log || spec.id.weight == Weight::dt_bias;
  return is_bare ? spec.name : spec.name + ".weight";
}

// The foreign format that a tensor's name gives away, if any.
const char* foreign_method(std::string_view name) {
  const auto ends_with = [&](std::string_view suffix) {
    return name.size() >= suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
  };
  if (ends_with(".qweight") || ends_with(".qzeros") || ends_with(".g_idx")) return "GPTQ or AWQ";
  if (ends_with(".weight_scale_inv")) return "fp8";
  if (ends_with(".weight_packed") || ends_with(".weight_scale") || ends_with(".weight_shape"))
    return "compressed-tensors";
  if (ends_with(".tq_packed")) return "TurboQuant";
  return nullptr;
}

class Matcher {
 public:
  Matcher(const Shards& shards, CheckpointReport& report, std::vector<Problem>& problems)
      : shards_(shards),
        report_(report),
        config_(*report.config),
        problems_(problems),
        has_unreadable_file_(std::any_of(problems.begin(), problems.end(),
                                         [](const Problem& p) { return p.kind == Kind::file; })) {}

  std::vector<StoredWeight> run();

 private:
  struct Found {
    const LocatedTensor* tensor = nullptr;
    size_t row = 0;  // in report_.tensors
    bool is_used = false;
  };

  void list_tensors();
  void match_vector(const WeightSpec& spec);
  void match_linear(const WeightSpec& spec);
  void judge_leftovers();

  Found* find(const std::string& name) {
    const auto it = by_name_.find(name);
    return it == by_name_.end() ? nullptr : &it->second;
  }

  Part use(Found& found, const WeightSpec& spec, const QuantRule* rule = nullptr) {
    found.is_used = true;
    CheckpointReport::Tensor& row = report_.tensors[found.row];
    row.tensor_class = tensor_class(spec.id.weight);
    if (rule) {
      row.bits = rule->bits;
      row.group_size = rule->group_size;
    }
    ++report_.n_text_tensors;
    report_.text_bytes += row.n_bytes;
    const TensorEntry& entry = found.tensor->entry;
    return {found.tensor->file, entry.dtype, found.tensor->offset, entry.n_bytes(), entry.name};
  }

  void problem(Kind kind, const std::string& name, std::string message) {
    problems_.push_back({kind, printable(name), fmt::format("{}: {}", printable(name), message)});
  }

  void missing(const std::string& name) {
    if (has_unreadable_file_) {  // which is what has to be told
      ++n_behind_;
      return;
    }
    std::string message = "is in no file";
    const auto promise = shards_.promised.find(name);
    const std::vector<std::string>& absent = shards_.absent_files;
    if (promise == shards_.promised.end()) {
      if (!absent.empty()) message += fmt::format("; {} is not in the folder, download it", absent.front());
    } else if (std::find(absent.begin(), absent.end(), promise->second) != absent.end()) {
      message += fmt::format("; the index promises it in {}, which is not in the folder: download it",
                             promise->second);
    } else {
      message += fmt::format(
          "; the index promises it in {}, which does not hold it: download that file again", promise->second);
    }
    problem(Kind::missing, name, message);
  }

  // Shape and type of a tensor, or a problem.
  bool expect(const Found& found, const Shape& shape, bool must_be_codes, const std::string& hint = {}) {
    const TensorEntry& entry = found.tensor->entry;
    const bool dtype_ok = must_be_codes ? entry.dtype == Dtype::u32 : is_float(entry.dtype);
    if (dtype_ok && entry.shape == shape) return true;
    problem(Kind::mismatch, entry.name,
            fmt::format("expected {}, found {}; {}",
                        shown(must_be_codes ? "U32"
                              : dtype_ok    ? entry.dtype_name
                                            : "BF16",
                              shape),
                        shown(entry), hint.empty() ? "is this Qwen3.6-35B-A3B in MLX format?" : hint));
    return false;
  }

  // Linear weights are computed from bfloat16.
  void note_conversion(const Part& part) {
    if (part.dtype == Dtype::bf16) return;
    if (n_converted_++ == 0) converted_example_ = part.name;
  }

  const Shards& shards_;
  CheckpointReport& report_;
  const Config& config_;
  std::vector<Problem>& problems_;
  std::map<std::string, Found> by_name_;  // text tensors by normalised name
  std::vector<StoredWeight> weights_;
  int n_converted_ = 0;
  bool has_unreadable_file_;
  int64_t n_behind_ = 0;  // tensors that it may hold
  std::string converted_example_;
};

void Matcher::list_tensors() {
  for (const auto& [name, tensor] : shards_.tensors) {
    CheckpointReport::Tensor row;
    row.name = name;
    row.file = shards_.files[tensor.file].path().filename().string();
    row.shape = tensor.entry.shape;
    row.dtype = tensor.entry.dtype_name;
    row.n_bytes = tensor.entry.n_bytes();
    const NameClass name_kind = name_class(name);
    if (name_kind == NameClass::vision) row.tensor_class = TensorClass::vision;
    if (name_kind == NameClass::mtp) row.tensor_class = TensorClass::mtp;
    if (name_kind == NameClass::text) {
      const auto [it, is_new] =
          by_name_.try_emplace(normalised_name(name), Found{&tensor, report_.tensors.size()});
      if (!is_new)
        problem(Kind::file, name,
                fmt::format("is there twice, also as {}", printable(it->second.tensor->entry.name)));
    }
    report_.tensors.push_back(std::move(row));
  }
}

void Matcher::match_vector(const WeightSpec& spec) {
  const std::string name = vector_name(spec);
  Found* found = find(name);
  if (!found) return missing(name);
  StoredWeight& weight = weights_[weight_index(spec.id)];
  weight.storage = Storage::f32;
  weight.shape = spec.shape;
  weight.values = use(*found, spec);
  Shape shape = spec.shape;
  if (spec.id.weight == Weight::conv) {
    const Shape& stored = found->tensor->entry.shape;
    if (stored == Shape{shape[0], 1, shape[1]})
      return problem(
          Kind::unconverted, name,
          fmt::format(
              "shape [{}] is that of an unconverted checkpoint, whose norms differ as well; convert it "
              "with mlx_lm.convert",
              fmt::join(stored, ", ")));
    shape.push_back(1);  // [channels, taps, 1]
  }
  expect(*found, shape, false);
}

void Matcher::match_linear(const WeightSpec& spec) {
  const std::string name = spec.name + ".weight";
  Found* values = find(name);
  Found* scales = find(spec.name + ".scales");
  Found* biases = find(spec.name + ".biases");
  StoredWeight& weight = weights_[weight_index(spec.id)];
  weight.shape = spec.shape;

  if (!values) {
    for (Found* found : {scales, biases})
      if (found) use(*found, spec);  // one complaint is enough
    return missing(name);
  }
  if (!scales && is_float(values->tensor->entry.dtype)) {
    weight.storage = Storage::bf16;
    weight.values = use(*values, spec);
    if (expect(*values, spec.shape, false)) note_conversion(weight.values);
    return;
  }

  const QuantRule* rule = config_.quantisation.override_for(spec.name);
  if (!rule) rule = &config_.quantisation.global;
  weight.codes = use(*values, spec, rule);
  if (scales) weight.scales = use(*scales, spec, rule);
  if (biases) weight.biases = use(*biases, spec, rule);
  if (!config_.quantisation.present)
    return problem(
        Kind::unsupported, name,
        "is quantised, but config.json has no \"quantization\" block that says how; use the config.json that "
        "belongs to these files");
  if (!rule->quantised)
    return problem(
        Kind::unsupported, name,
        "is quantised, but config.json says that it is not; use the config.json that belongs to these files");
  if (rule->mode != "affine")
    return problem(
        Kind::unsupported, name,
        fmt::format(
            "mode {} is not supported; lily reads affine quantisation with 4 or 8 bits and groups of {}",
            printable(rule->mode, 40), kQuantGroup));
  if ((rule->bits != 4 && rule->bits != 8) || rule->group_size != kQuantGroup)
    return problem(
        Kind::unsupported, name,
        fmt::format("{} bits in groups of {} are not supported; lily reads 4 or 8 bits in groups of {}",
                    rule->bits, rule->group_size, kQuantGroup));
  if (!scales) return missing(spec.name + ".scales");
  if (!biases) return missing(spec.name + ".biases");

  weight.storage = rule->bits == 4 ? Storage::q4 : Storage::q8;
  const int64_t in = spec.shape.back();
  const Shape stored = values->tensor->entry.shape.empty() ? Shape{0} : values->tensor->entry.shape;
  const bool is_other_width = values->tensor->entry.dtype == Dtype::u32 &&
                              with_last(spec.shape, stored.back()) == stored && stored.back() * 32 % in == 0;
  const std::string hint = is_other_width ? fmt::format("the shape is that of {} bits, config.json says {}",
                                                        stored.back() * 32 / in, rule->bits)
                                          : "";
  if (!expect(*values, with_last(spec.shape, in * rule->bits / 32), true, hint)) return;
  const Shape groups = with_last(spec.shape, in / kQuantGroup);
  if (!expect(*scales, groups, false) || !expect(*biases, groups, false)) return;
  note_conversion(weight.scales);
  note_conversion(weight.biases);
}

void Matcher::judge_leftovers() {
  for (const auto& [name, found] : by_name_) {
    if (found.is_used) continue;
    const std::string& stored = found.tensor->entry.name;
    if (config_.tied_embeddings && name.substr(0, 8) == "lm_head.") continue;
    if (const char* method = foreign_method(name))
      problem(
          Kind::unsupported, stored,
          fmt::format("is a tensor of {}, which is not supported; lily reads MLX affine 4-bit checkpoints",
                      method));
    else if (name.find(".mlp.experts.") != std::string::npos)
      problem(
          Kind::unconverted, stored,
          "experts in this layout are those of an unconverted checkpoint; convert it with mlx_lm.convert");
    else problem(Kind::unused, stored, "is no tensor of this model; is this Qwen3.6-35B-A3B?");
  }
}

std::vector<StoredWeight> Matcher::run() {
  list_tensors();
  const std::vector<WeightSpec> specs = catalogue(config_.dims);
  weights_.resize(weight_index({static_cast<Weight>(kWeightKinds - 1), config_.dims.n_layers - 1}) + 1);
  for (const WeightSpec& spec : specs) {
    if (config_.tied_embeddings && spec.id.weight == Weight::lm_head) continue;
    if (spec.quantisable) match_linear(spec);
    else match_vector(spec);
  }
  judge_leftovers();
  if (n_behind_ > 0)
    report_.notices.push_back(
        fmt::format("{} of the model are in no file that can be read", counted(n_behind_, "tensor")));
  if (n_converted_ > 0)
    report_.notices.push_back(fmt::format("rounded to bfloat16 while loading: {} in F16 or F32, such as {}",
                                          counted(n_converted_, "tensor"), printable(converted_example_)));
  for (const CheckpointReport::Tensor& row : report_.tensors)
    report_.bytes_by_class[static_cast<size_t>(row.tensor_class)] += row.n_bytes;
  return std::move(weights_);
}

}  // namespace

std::vector<StoredWeight> match_weights(const Shards& shards, CheckpointReport& report,
                                        std::vector<Problem>& problems) {
  return Matcher(shards, report, problems).run();
}

}  // namespace lily::model
