// Loaded into the program before the C library: a disk that becomes full at a chosen moment.
//
//   LILY_TEST_FULL_AFTER=N  after N writes to regular files there is no room for more
//   LILY_TEST_FULL_LINKS=1  there is none for symbolic links
//   LILY_TEST_FULL_SYNC=1   the system notices only when it brings a file to disk
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

namespace {

bool has_room(int fd) {
  static const char* const setting = std::getenv("LILY_TEST_FULL_AFTER");
  static const long n_allowed = setting == nullptr ? -1 : std::atol(setting);
  static std::atomic<long> n_writes{0};
  struct stat info{};
  if (n_allowed < 0 || fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || fd <= 2) return true;
  return n_writes++ < n_allowed;
}

int no_room() {
  errno = ENOSPC;
  return -1;
}

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* bytes, size_t n) {
  static const auto next = real<ssize_t (*)(int, const void*, size_t)>("write");
  return has_room(fd) ? next(fd, bytes, n) : no_room();
}

ssize_t pwrite(int fd, const void* bytes, size_t n, off_t at) {
  static const auto next = real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return has_room(fd) ? next(fd, bytes, n, at) : no_room();
}

int symlink(const char* target, const char* link) noexcept {
  static const auto next = real<int (*)(const char*, const char*)>("symlink");
  return std::getenv("LILY_TEST_FULL_LINKS") == nullptr ? next(target, link) : no_room();
}

int fsync(int fd) {
  static const auto next = real<int (*)(int)>("fsync");
  return std::getenv("LILY_TEST_FULL_SYNC") == nullptr ? next(fd) : no_room();
}

}  // extern "C"
