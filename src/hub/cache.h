// The download cache that all tools of the hub share, so that a model is on a disk once:
//
//   CACHE/models--OWNER--NAME/blobs/ID                a file's content, named by its checksum
//                             snapshots/COMMIT/FILE   symbolic link to ../../blobs/ID
//                             refs/REVISION           the commit a branch was at
//   CACHE/.locks/models--OWNER--NAME/                 files that are locked while a tool writes
//
// A snapshot counts as a model only when all its weights are there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lily::hub {

// A repository's folder in a cache. Names are is_repository_name() and the like: they come checked.
class CachedRepository {
 public:
  CachedRepository(std::filesystem::path cache, const std::string& name);

  const std::filesystem::path& folder() const { return folder_; }
  std::filesystem::path blob(const std::string& id) const { return folder_ / "blobs" / id; }
  std::filesystem::path snapshot(const std::string& commit) const { return folder_ / "snapshots" / commit; }

  // The caller holds the lock; so it is for everything below that writes.
  void make_folders() const;
  // Brings a small file into blobs/ in one step.
  void write_blob(const std::string& id, std::string_view bytes) const;
  // Downloads that no file of the published revision goes on with; how many bytes they had.
  uint64_t remove_parts() const;
  struct Link {
    std::string file, blob_id;
  };
  // The snapshot, with config.json last: until then no tool takes it for a model. Then the reference, unless
  // `revision` is the commit itself.
  void publish(const std::string& commit, const std::string& revision, std::vector<Link> links) const;

  // The whole snapshot that `main` names, else the newest whole one.
  std::optional<std::filesystem::path> find_model() const;

  // Removes everything, first what makes others take it for a model.
  void remove() const;

 private:
  std::filesystem::path cache_, folder_;
};

// Held while a pull or a removal is at work; the system lets go of it when the program ends, however it ends.
class RepositoryLock {
 public:
  // Throws Fault::device if another program holds it.
  RepositoryLock(const std::filesystem::path& cache, const std::string& name);
  ~RepositoryLock();
  RepositoryLock(const RepositoryLock&) = delete;
  RepositoryLock& operator=(const RepositoryLock&) = delete;

 private:
  int fd_ = -1;
};

// Whether a folder has a configuration and every file of weights that the text model needs.
bool is_whole_model(const std::filesystem::path& folder);

struct CachedModel {
  std::string name;  // OWNER/NAME
  std::filesystem::path cache;
  std::optional<std::filesystem::path> model;  // the snapshot, if there is a whole one
  bool is_supported = false;                   // it has a config.json, and lily can run what that describes
  uint64_t n_bytes = 0;                        // on disk
  uint64_t n_part_bytes = 0;                   // of them, in downloads of lily that have not ended
};

// By name. A folder that is not there is an empty cache.
std::vector<CachedModel> list_cache(const std::filesystem::path& cache);

}  // namespace lily::hub
