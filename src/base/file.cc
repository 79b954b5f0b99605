#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/printable.h"

namespace lily {
namespace {

// One pread moves at most about 2 GiB on Linux and refuses more than INT_MAX on Apple.
constexpr size_t kMaxReadBytes = size_t{1} << 30;

std::string name_of(const std::filesystem::path& path) { return printable(path.string(), 400); }

std::string reason(int error) { return std::generic_category().message(error); }

}  // namespace

File::File(std::filesystem::path path, int fd, uint64_t size)
    : path_(std::move(path)), fd_(fd), size_(size) {}

File File::open(const std::filesystem::path& path) {
  int fd = -1;
  // Without O_NONBLOCK a named pipe would block here, before it can be refused.
  do fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(Fault::device, "{}: cannot be opened: {}", name_of(path), reason(errno));
  File file(path, fd, 0);
  struct stat info = {};
  if (::fstat(fd, &info) != 0)
    fail(Fault::device, "{}: cannot be examined: {}", name_of(path), reason(errno));
  if (!S_ISREG(info.st_mode)) fail(Fault::device, "{}: is not a regular file", name_of(path));
  file.size_ = static_cast<uint64_t>(info.st_size);
  return file;
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      size_(std::exchange(other.size_, 0)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

void File::read_at(uint64_t offset, std::span<std::byte> out) const {
  LILY_CHECK(fd_ >= 0, "read of a file that was moved away");
  if (offset > size_ || out.size() > size_ - offset)
    fail(Fault::device, "{}: {} bytes at offset {} were asked for, but the file has {} bytes", name_of(path_),
         out.size(), offset, size_);
  size_t done = 0;
  while (done < out.size()) {
    const size_t n_wanted = std::min(out.size() - done, kMaxReadBytes);
    const ssize_t n = ::pread(fd_, out.data() + done, n_wanted, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      fail(Fault::device, "{}: reading {} bytes at offset {} failed: {}", name_of(path_), out.size(), offset,
           reason(errno));
    if (n == 0)
      fail(Fault::device,
           "{}: ended at byte {} while {} bytes at offset {} were read; it had {} bytes when opened",
           name_of(path_), offset + done, out.size(), offset, size_);
    done += static_cast<size_t>(n);
  }
}

void File::expect_one_pass() const {
#if defined(__linux__)
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);
#elif defined(__APPLE__)
  ::fcntl(fd_, F_RDAHEAD, 1);
  ::fcntl(fd_, F_NOCACHE, 1);
#endif
}

void File::release_cached([[maybe_unused]] uint64_t offset, [[maybe_unused]] uint64_t n_bytes) const {
#if defined(__linux__)
  ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(n_bytes), POSIX_FADV_DONTNEED);
#endif
}

std::string read_text_file(const std::filesystem::path& path, uint64_t max_bytes) {
  const File file = File::open(path);
  if (file.size() > max_bytes)
    fail(Fault::device, "{}: has {} bytes, more than the {} allowed", name_of(path), file.size(), max_bytes);
  std::string text(file.size(), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace lily
