#include "model/shards.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/folder.h"
#include "base/printable.h"
#include "model/foreign.h"
#include "model/json_strict.h"
#include "model/tensor_names.h"

namespace lily::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = uint64_t{16} << 20;
constexpr int kMaxShards = 1000;
constexpr std::string_view kSuffix = ".safetensors";

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool is_mtp_file(std::string_view name) { return starts_with(name, "mtp"); }

// Names of the safetensors files of the folder, sorted.
std::vector<std::string> file_names(const fs::path& folder) {
  std::vector<std::string> names;
  const std::error_code error = for_each_name(folder, [&](std::string name) {
    if (name.size() > kSuffix.size() &&
        std::string_view(name).substr(name.size() - kSuffix.size()) == kSuffix)
      names.push_back(std::move(name));
  });
  if (error) fail(Fault::model, "{}: cannot be listed: {}", printable(folder.string(), 400), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

// For "model-00002-of-00004.safetensors": how many shards there are; 0 for other names.
int n_shards_of(std::string_view name) {
  constexpr std::string_view kPattern = "model-ddddd-of-ddddd.safetensors";
  if (name.size() != kPattern.size()) return 0;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool is_digit = name[i] >= '0' && name[i] <= '9';
    // The pattern's letter d stands for a digit; "model" has one of its own, at 2.
    const bool wants_digit = kPattern[i] == 'd' && i != 2;
    if (wants_digit ? !is_digit : name[i] != kPattern[i]) return 0;
  }
  const int n = std::atoi(std::string(name.substr(15, 5)).c_str());
  return n <= kMaxShards ? n : 0;
}

// Says where index and headers disagree, in a line for each kind of disagreement.
void compare_with_index(const std::map<std::string, std::string>& index, Shards& shards) {
  struct Disagreement {
    int n = 0;
    std::string example;
    void add(const std::string& name) {
      if (n++ == 0) example = printable(name);
    }
  };
  Disagreement elsewhere, nowhere, unlisted;
  for (const auto& [name, file] : index) {
    const auto it = shards.tensors.find(name);
    if (it == shards.tensors.end()) {
      if (name_class(name) != NameClass::mtp && !is_mtp_file(file)) nowhere.add(name);
    } else if (shards.files[it->second.file].path().filename().string() != file) {
      elsewhere.add(name);
    }
  }
  for (const auto& [name, tensor] : shards.tensors)
    if (!index.contains(name)) unlisted.add(name);
  const auto report = [&](const Disagreement& d, const char* what) {
    if (d.n > 0)
      shards.notices.push_back(fmt::format("{}: {} {}, such as {}; the files' own headers decide", kIndexName,
                                           counted(d.n, "tensor"), what, d.example));
  };
  report(elsewhere, "in another file than it says");
  report(nowhere, "that it lists in no file");
  report(unlisted, "in a file but not in it");
}

}  // namespace

bool is_safe_shard_name(std::string_view name) {
  if (name.size() <= kSuffix.size() || name.size() > 255) return false;
  if (name.substr(name.size() - kSuffix.size()) != kSuffix) return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

std::map<std::string, std::string> parse_index(std::string_view text) {
  const nlohmann::json document = parse_json_strict(text, kIndexName, kMaxIndexBytes);
  const auto weight_map = document.is_object() ? document.find("weight_map") : document.end();
  if (weight_map == document.end() || !weight_map->is_object())
    fail(Fault::model, "{}: has no object \"weight_map\"; delete the file, it is not needed", kIndexName);
  std::map<std::string, std::string> index;
  for (const auto& [name, file] : weight_map->items()) {
    if (!file.is_string() || !is_safe_shard_name(file.get_ref<const std::string&>()))
      fail(Fault::model, "{}: {}: {} is not the plain name of a safetensors file", kIndexName,
           printable(name), printable(file.dump(-1, ' ', true)));
    index.emplace(name, file.get<std::string>());
  }
  return index;
}

Shards open_shards(const fs::path& folder) {
  Shards shards;
  const auto problem = [&](const std::string& name, std::string message) {
    shards.problems.push_back({Problem::Kind::file, printable(name), std::move(message)});
  };

  std::map<std::string, std::string> index;
  std::error_code ignored;
  const bool has_index = fs::exists(folder / kIndexName, ignored);
  if (has_index) {
    try {
      index = parse_index(read_text_file(folder / kIndexName, kMaxIndexBytes));
    } catch (const Error& error) {
      problem(kIndexName, error.what());
    }
  }

  std::vector<std::string> present;
  try {
    present = file_names(folder);
  } catch (const Error& error) {
    problem(folder.string(), error.what());
  }
  std::set<std::string> wanted, expected;
  for (const auto& [name, file] : index) {
    expected.insert(file);
    shards.promised.emplace(normalised_name(name), file);
  }
  for (const std::string& name : present) {
    if (starts_with(name, "model") || expected.contains(name)) wanted.insert(name);
    for (int i = 1, n = n_shards_of(name); i <= n; ++i)
      expected.insert(fmt::format("model-{:05}-of-{:05}.safetensors", i, n));
  }
  if (wanted.empty())  // some converters use other names: weights.safetensors
    for (const std::string& name : present) wanted.insert(name);
  for (const std::string& name : expected)
    if (std::find(present.begin(), present.end(), name) == present.end()) shards.absent_files.push_back(name);
  if (!shards.absent_files.empty())
    shards.notices.push_back(
        fmt::format("not in the folder: {} that the index or the numbering names, such as {}",
                    counted(std::ssize(shards.absent_files), "file"), shards.absent_files.front()));

  for (const std::string& name : present) {
    const bool is_mtp = is_mtp_file(name);
    if (!is_mtp && !wanted.contains(name)) continue;
    try {
      File file = File::open(folder / name);
      std::string json;
      SafetensorsHeader header = read_safetensors_header(file, &json);
      if (is_mtp) {
        for (TensorEntry& entry : header.tensors) shards.mtp_names.push_back(std::move(entry.name));
        continue;
      }
      const int number = static_cast<int>(shards.files.size());
      shards.files.push_back(std::move(file));
      shards.headers.push_back(std::move(json));
      for (TensorEntry& entry : header.tensors) {
        const uint64_t offset = header.data_start + entry.begin;
        const std::string tensor = entry.name;
        const auto [it, is_new] =
            shards.tensors.try_emplace(tensor, LocatedTensor{std::move(entry), number, offset});
        if (!is_new)
          problem(tensor,
                  fmt::format("{}: is in two files, {} and {}; delete the one that does not belong here",
                              printable(tensor),
                              printable(shards.files[it->second.file].path().filename().string()),
                              printable(name)));
      }
    } catch (const Error& error) {
      // The draft head is optional, so its file may be broken.
      if (is_mtp) shards.notices.push_back(error.what());
      else problem(name, error.what());
    }
  }
  if (shards.files.empty() && shards.problems.empty())
    problem(folder.string(),
            fmt::format("{}: has no safetensors file{}", printable(folder.string(), 400),
                        foreign_format(folder).empty()
                            ? ""
                            : "; it is " + foreign_format(folder) + ", a format that lily does not read"));
  if (has_index && !index.empty()) compare_with_index(index, shards);
  return shards;
}

}  // namespace lily::model
