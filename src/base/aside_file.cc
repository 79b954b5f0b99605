#include "base/aside_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/printable.h"

namespace lily {
namespace {

[[noreturn]] void fail_writing(const std::filesystem::path& path, const char* what) {
  const int code = errno;
  const std::string name = printable(path.string(), 400);
  if (code == ENOSPC || code == EDQUOT)
    fail(Fault::device, "{}: the disk is full: make room, or name a folder on another disk", name);
  fail(Fault::device, "{}: {}: {}", name, what, std::generic_category().message(code));
}

}  // namespace

AsideFile::AsideFile(std::filesystem::path path) : path_(std::move(path)) {
  std::random_device random;
  aside_ = path_.parent_path() /
           fmt::format(".{}.{}-{:08x}{}", path_.filename().string(), ::getpid(), random(), kSuffix);
  fd_ = ::open(aside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd_ < 0) fail_writing(path_, "cannot be created");
  ::flock(fd_, LOCK_EX | LOCK_NB);  // says that its writer lives, for as long as it does
}

AsideFile::~AsideFile() {
  if (fd_ < 0) return;
  ::unlink(aside_.c_str());
  ::close(fd_);
}

void AsideFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_writing(path_, "cannot be written");
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void AsideFile::publish() {
  if (::fsync(fd_) != 0) fail_writing(path_, "cannot be brought to disk");
  if (::rename(aside_.c_str(), path_.c_str()) != 0) fail_writing(path_, "cannot be given its name");
  ::close(std::exchange(fd_, -1));
  const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
  if (const int fd = ::open(folder.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
    ::fsync(fd);
    ::close(fd);
  }
}

}  // namespace lily
