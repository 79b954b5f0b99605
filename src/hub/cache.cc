#include "hub/cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "hub/blob_hash.h"
#include "hub/part_file.h"
#include "hub/repository.h"
#include "model/config.h"
#include "model/shards.h"
#include "model/tensor_names.h"

namespace lily::hub {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "models--";
constexpr uint64_t kMaxIndexBytes = uint64_t{16} << 20;

std::string folder_name(const std::string& name) {
  std::string folder(kPrefix);
  for (const char c : name) folder += c == '/' ? std::string("--") : std::string(1, c);
  return folder;
}

void check(const std::error_code& error, const fs::path& path, const char* what) {
  if (error == std::errc::no_space_on_device || error.value() == EDQUOT) fail_disk_full(path);
  if (error) fail(Fault::device, "{}: {}: {}", printable(path.string(), 400), what, error.message());
}

void make_folder(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  check(error, path, "the folder cannot be made");
}

// One writer at a time: RepositoryLock.
fs::path temporary_beside(const fs::path& path) { return path.string() + ".lily-new"; }

void write_in_one_step(const fs::path& path, std::string_view bytes) {
  const fs::path temporary = temporary_beside(path);
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
  int failure = fd < 0 ? errno : 0;
  while (failure == 0 && !bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n >= 0) bytes.remove_prefix(static_cast<size_t>(n));
    else if (errno != EINTR) failure = errno;
  }
  // Or a crash of the machine could leave the name without the content.
  if (failure == 0 && fsync(fd) != 0) failure = errno;
  if (fd >= 0) close(fd);
  std::error_code error;
  if (failure != 0) fs::remove(temporary, error);
  check({failure, std::generic_category()}, path, "cannot be written");
  fs::rename(temporary, path, error);
  check(error, path, "cannot be given its name");
}

void link_in_one_step(const fs::path& link, const fs::path& target) {
  std::error_code error;
  if (fs::read_symlink(link, error) == target && !error) return;
  const fs::path temporary = temporary_beside(link);
  fs::remove(temporary, error);
  fs::create_symlink(target, temporary, error);
  check(error, link, "the link cannot be made; the cache's file system must know symbolic links");
  fs::rename(temporary, link, error);
  check(error, link, "cannot be given its name");
}

std::string read_ref(const fs::path& path) {
  std::ifstream in(path);
  std::string commit;
  in >> commit;
  return is_commit(commit) ? commit : "";
}

}  // namespace

CachedRepository::CachedRepository(fs::path cache, const std::string& name)
    : cache_(std::move(cache)), folder_(cache_ / folder_name(name)) {
  LILY_CHECK(is_repository_name(name), "{}", name);
}

void CachedRepository::make_folders() const {
  for (const char* name : {"blobs", "snapshots", "refs"}) make_folder(folder_ / name);
  // What a program that was killed between two steps has left.
  std::vector<fs::path> leftovers;
  std::error_code error;
  for (fs::directory_iterator it(folder_ / "blobs", error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    const fs::path& path = it->path();
    if (path.extension() == ".lily-new" ||
        (path.extension() == ".lily-done" &&
         !fs::exists(fs::path(path).replace_extension(".lily-part"), ignored)))
      leftovers.push_back(path);
  }
  for (const fs::path& path : leftovers) fs::remove(path, error);
}

void CachedRepository::write_blob(const std::string& id, std::string_view bytes) const {
  write_in_one_step(blob(id), bytes);
}

uint64_t CachedRepository::remove_parts() const {
  std::vector<fs::path> parts;
  std::error_code error;
  for (fs::directory_iterator it(folder_ / "blobs", error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".lily-part") parts.push_back(fs::path(it->path()).replace_extension());
  uint64_t n_bytes = 0;
  for (const fs::path& part : parts) {
    n_bytes += PartFile::present_at(part);
    PartFile::remove(part);
  }
  return n_bytes;
}

void CachedRepository::publish(const std::string& commit, const std::string& revision,
                               std::vector<Link> links) const {
  make_folder(snapshot(commit));
  std::stable_partition(links.begin(), links.end(),
                        [](const Link& link) { return link.file != "config.json"; });
  for (const Link& link : links)
    link_in_one_step(snapshot(commit) / link.file, fs::path("../../blobs") / link.blob_id);
  if (revision != commit) write_in_one_step(folder_ / "refs" / revision, commit);
}

std::optional<fs::path> CachedRepository::find_model() const {
  if (const std::string commit = read_ref(folder_ / "refs/main");
      !commit.empty() && is_whole_model(snapshot(commit)))
    return snapshot(commit);
  std::error_code error;
  std::optional<fs::path> newest;
  fs::file_time_type newest_time{};
  for (fs::directory_iterator it(folder_ / "snapshots", error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    const auto time = fs::last_write_time(it->path(), ignored);
    if ((!newest || time > newest_time) && is_whole_model(it->path()))
      newest = it->path(), newest_time = time;
  }
  return newest;
}

void CachedRepository::remove() const {
  std::error_code error;
  for (const char* name : {"refs", "snapshots", "."}) {
    const fs::path path = *name == '.' ? folder_ : folder_ / name;
    fs::remove_all(path, error);  // links are removed, not followed
    check(error, path, "cannot be removed");
  }
}

RepositoryLock::RepositoryLock(const fs::path& cache, const std::string& name) {
  const fs::path folder = cache / ".locks" / folder_name(name);
  make_folder(folder);
  const fs::path path = folder / "lily.lock";
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0)
    fail(Fault::device, "{}: cannot be opened: {}", printable(path.string(), 400), std::strerror(errno));
  if (flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  const bool is_held = errno == EWOULDBLOCK;
  const std::string why = std::strerror(errno);
  close(fd_);
  if (is_held) fail(Fault::device, "another lily is at work on {}; wait until it has ended", name);
  fail(Fault::device, "{}: cannot be locked: {}", printable(path.string(), 400), why);
}

RepositoryLock::~RepositoryLock() { close(fd_); }

bool is_whole_model(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_regular_file(folder / "config.json", error)) return false;
  if (fs::exists(folder / kIndexFile, error)) {
    try {
      std::set<std::string> files;
      for (const auto& [tensor, file] :
           model::parse_index(read_text_file(folder / kIndexFile, kMaxIndexBytes)))
        if (model::name_class(tensor) == model::NameClass::text) files.insert(file);
      return !files.empty() && std::all_of(files.begin(), files.end(), [&](const std::string& file) {
        return fs::is_regular_file(folder / file, error);
      });
    } catch (const Error&) {
      error.clear();
      // An index that cannot be read says nothing; opening the model will say what is wrong with it.
    }
  }
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->path().extension() == ".safetensors" && fs::is_regular_file(it->path(), ignored)) return true;
  }
  return false;
}

std::vector<CachedModel> list_cache(const fs::path& cache) {
  std::vector<CachedModel> models;
  std::error_code error;
  for (fs::directory_iterator it(cache, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.substr(0, kPrefix.size()) != kPrefix) continue;
    name = name.substr(kPrefix.size());
    if (const size_t dashes = name.find("--"); dashes != name.npos) name.replace(dashes, 2, "/");
    if (!is_repository_name(name)) continue;
    CachedModel model{.name = name, .cache = cache, .model = CachedRepository(cache, name).find_model()};
    std::error_code ignored;
    for (fs::directory_iterator blob(it->path() / "blobs", ignored), last; !ignored && blob != last;
         blob.increment(ignored)) {
      std::error_code gone;
      if (blob->path().extension() == ".lily-part") {
        fs::path path = blob->path();
        model.n_part_bytes += PartFile::present_at(path.replace_extension());
      } else if (const uint64_t n_bytes = fs::file_size(blob->path(), gone); !gone) {
        model.n_bytes += n_bytes;
      }
    }
    model.n_bytes += model.n_part_bytes;
    if (model.model) {
      try {
        model::read_config(*model.model);
        model.is_supported = true;
      } catch (const Error&) {
        model.is_supported = false;
        // Another architecture or format: listed as such.
      }
    }
    models.push_back(std::move(model));
  }
  std::sort(models.begin(), models.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return models;
}

}  // namespace lily::hub
