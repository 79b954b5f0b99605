#include "hub/repository.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/printable.h"
#include "hub/blob_hash.h"
#include "model/shards.h"
#include "model/tensor_names.h"

namespace lily::hub {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 44;
constexpr size_t kMaxFiles = 20000;
constexpr std::array<std::string_view, 2> kRequired = {"config.json", "tokenizer.json"};
constexpr std::array<std::string_view, 4> kOptional = {"generation_config.json", "tokenizer_config.json",
                                                       "chat_template.jinja", kIndexFile};

bool is_plain(std::string_view name, size_t max_bytes) {
  return !name.empty() && name.size() <= max_bytes && name.front() != '.' && name.front() != '-' &&
         name.find("..") == name.npos && std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
                  c == '_' || c == '-';
         });
}

const std::string* string_at(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? &it->get_ref<const std::string&>() : nullptr;
}

RemoteFile parse_file(const Json& entry) {
  const std::string* name = entry.is_object() ? string_at(entry, "rfilename") : nullptr;
  if (name == nullptr) fail(Fault::model, "the hub's list of files has an entry without a name");
  RemoteFile file{.name = *name};
  const auto lfs = entry.find("lfs");
  const bool is_large = lfs != entry.end() && lfs->is_object();
  const std::string* id = is_large ? string_at(*lfs, "sha256") : string_at(entry, "blobId");
  const size_t digits = is_large ? 64 : 40;
  if (id != nullptr && id->size() == digits && is_blob_id(*id)) file.blob_id = *id;
  const Json& sized = is_large && lfs->contains("size") ? *lfs : entry;
  const auto size = sized.find("size");
  if (size == sized.end() || !size->is_number_unsigned() || size->get<uint64_t>() > kMaxFileBytes)
    file.blob_id.clear();
  else file.n_bytes = size->get<uint64_t>();
  return file;
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

bool is_repository_name(std::string_view name) {
  const size_t slash = name.find('/');
  return slash != name.npos && is_plain(name.substr(0, slash), 96) && is_plain(name.substr(slash + 1), 96) &&
         name.find("--") == name.npos;
}

bool is_revision_name(std::string_view name) { return is_plain(name, 128); }

const RemoteFile* Listing::find(std::string_view name) const {
  for (const RemoteFile& file : files)
    if (file.name == name) return &file;
  return nullptr;
}

Listing parse_listing(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  const auto siblings = json.is_object() ? json.find("siblings") : json.end();
  const std::string* commit = json.is_object() ? string_at(json, "sha") : nullptr;
  if (json.is_discarded() || !json.is_object() || siblings == json.end() || !siblings->is_array() ||
      commit == nullptr || !is_commit(*commit))
    fail(Fault::model, "the hub's answer is not a description of a repository; is HF_ENDPOINT right?");
  if (siblings->size() > kMaxFiles)
    fail(Fault::model, "the repository has {} files, more than a model can have", siblings->size());
  Listing listing{.commit = *commit};
  std::set<std::string> names;
  for (const Json& entry : *siblings) {
    listing.files.push_back(parse_file(entry));
    if (!names.insert(listing.files.back().name).second)
      fail(Fault::model, "the hub lists {} twice", printable(listing.files.back().name));
  }
  return listing;
}

Choice choose_files(const Listing& listing, std::string_view index_text) {
  std::map<std::string, bool> has_text;  // shard -> whether the index puts a tensor of the text model in it
  if (!index_text.empty())
    for (const auto& [tensor, file] : model::parse_index(index_text))
      has_text[file] |= model::name_class(tensor) == model::NameClass::text;
  const auto is_model_file = [](const std::string& name) {
    return name.starts_with("model") && model::is_safe_shard_name(name);
  };
  const bool has_model_files = std::any_of(listing.files.begin(), listing.files.end(),
                                           [&](const RemoteFile& f) { return is_model_file(f.name); });

  Choice choice;
  size_t n_weight_files = 0;
  std::set<std::string> seen;
  for (const RemoteFile& file : listing.files) {
    bool is_wanted = std::find(kRequired.begin(), kRequired.end(), file.name) != kRequired.end() ||
                     std::find(kOptional.begin(), kOptional.end(), file.name) != kOptional.end();
    if (!is_wanted && model::is_safe_shard_name(file.name)) {
      const auto listed = has_text.find(file.name);
      if (file.name.starts_with("mtp") || (listed != has_text.end() && !listed->second)) {
        choice.vision.push_back(file);
        continue;
      }
      is_wanted = listed != has_text.end() ||
                  (has_text.empty() && (has_model_files ? is_model_file(file.name) : true));
      n_weight_files += is_wanted;
    }
    if (!is_wanted) {
      choice.unneeded.push_back(file);
      continue;
    }
    if (file.blob_id.empty())
      fail(Fault::model,
           "the hub gives no checksum and size for {}; a file that cannot be checked is not fetched",
           file.name);
    seen.insert(file.name);
    choice.wanted.push_back(file);
  }
  for (const std::string_view name : kRequired)
    if (!seen.contains(std::string(name)))
      fail(Fault::model, "the repository has no {}: it is not a model that lily can run{}", name,
           std::any_of(listing.files.begin(), listing.files.end(),
                       [](const RemoteFile& f) { return ends_with(f.name, ".gguf"); })
               ? " (GGUF files are not read; take an MLX 4-bit one)"
               : "");
  for (const auto& [name, is_text] : has_text)
    if (is_text && !seen.contains(name))
      fail(Fault::model, "{} names {}, which is not in the repository", kIndexFile, name);
  if (n_weight_files == 0)
    fail(Fault::model,
         "the repository has no safetensors file with weights: it is not a model that lily can run");
  return choice;
}

}  // namespace lily::hub
