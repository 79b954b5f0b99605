// What a repository on the hub holds, and which of its files the engine needs. Everything the hub says is
// checked here: names that leave here are plain file names, and every file has a size and a checksum.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lily::hub {

inline constexpr const char* kRealModel = "mlx-community/Qwen3.6-35B-A3B-4bit";

// OWNER/NAME, letters, digits and "._-" only; neither part begins with a dot or a dash or holds "..".
bool is_repository_name(std::string_view name);
bool is_revision_name(std::string_view name);  // of a branch, a tag or a commit; no slash

struct RemoteFile {
  std::string name;     // in the repository; may be any text for files that are skipped
  std::string blob_id;  // is_blob_id(), or empty if the hub gave none
  uint64_t n_bytes = 0;
};

struct Listing {
  std::string commit;  // is_commit()
  std::vector<RemoteFile> files;
  const RemoteFile* find(std::string_view name) const;
};

inline constexpr uint64_t kMaxListingBytes = uint64_t{16} << 20;

// The answer of /api/models/NAME/revision/REVISION?blobs=true. Throws Fault::model.
Listing parse_listing(std::string_view json);

struct Choice {
  std::vector<RemoteFile> wanted;
  std::vector<RemoteFile> vision, unneeded;  // skipped: files of vision or draft weights only, and the rest
};

inline constexpr const char* kIndexFile = "model.safetensors.index.json";

// `index` is the text of kIndexFile, empty if there is none. Throws Fault::model if something the engine
// needs is missing, or has no checksum.
Choice choose_files(const Listing& listing, std::string_view index);

}  // namespace lily::hub
