#include "engine/session_io.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/folder.h"
#include "base/printable.h"

namespace lily::engine {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAsideSuffix = ".lily-writing";

std::string name_of(const fs::path& path) { return printable(path.string(), 400); }

[[noreturn]] void fail_at(const fs::path& path, const char* what) {
  const int code = errno;
  if (code == ENOSPC || code == EDQUOT)
    fail(Fault::device, "{}: the disk is full: make room, or name a folder on another disk", name_of(path));
  fail(Fault::device, "{}: {}: {}", name_of(path), what, std::generic_category().message(code));
}

}  // namespace

// ---- Reading

SessionReader::SessionReader(const fs::path& path) : file_(File::open(path)) {
  const std::string name = name_of(path);
  const auto n_file_bytes = static_cast<int64_t>(file_.size());
  bytes_.resize(static_cast<size_t>(std::min(kSessionFixedBytes, n_file_bytes)));
  file_.read_at(0, bytes_);
  bytes_.resize(static_cast<size_t>(engine::header_bytes(bytes_, n_file_bytes, name)));
  file_.read_at(0, bytes_);
  header_ = parse_header(bytes_, n_file_bytes, name);
  offset_ = bytes_.size();
}

void SessionReader::next(std::vector<float>& values) {
  LILY_CHECK(piece_ < header_.n_pieces(), "piece {}", piece_);
  bytes_.resize(static_cast<size_t>(header_.piece_bytes(piece_)));
  file_.read_at(offset_, bytes_);
  if (!decode_piece(header_, piece_, bytes_, values))
    fail(Fault::user, "{}: damaged in the {} bytes from {} on: the checksum is wrong", name_of(path()),
         bytes_.size(), offset_);
  offset_ += bytes_.size();
  ++piece_;
}

// ---- Writing

SessionWriter::SessionWriter(fs::path path, SessionHeader header)
    : path_(std::move(path)), header_(std::move(header)) {
  std::random_device random;
  header_.nonce = (uint64_t{random()} << 32) ^ random();
  aside_ = path_.parent_path() /
           fmt::format(".{}.{}-{:08x}{}", path_.filename().string(), ::getpid(), random(), kAsideSuffix);
  // A conversation is nobody else's.
  fd_ = ::open(aside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd_ < 0) fail_at(aside_, "cannot be created");
  ::flock(fd_, LOCK_EX | LOCK_NB);  // says that its writer lives, for as long as it does
  try {
    write(encode_header(header_));
  } catch (...) {
    ::unlink(aside_.c_str());
    ::close(fd_);
    throw;
  }
}

SessionWriter::~SessionWriter() {
  if (fd_ < 0) return;
  ::unlink(aside_.c_str());
  ::close(fd_);
}

void SessionWriter::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_at(path_, "cannot be written");
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void SessionWriter::add(std::span<const float> piece) {
  bytes_.clear();
  encode_piece(header_, piece_, piece, bytes_);
  write(bytes_);
  ++piece_;
}

void SessionWriter::publish() {
  LILY_CHECK(piece_ == header_.n_pieces(), "{} of {} pieces", piece_, header_.n_pieces());
  if (::fsync(fd_) != 0) fail_at(path_, "cannot be brought to disk");
  if (::rename(aside_.c_str(), path_.c_str()) != 0) fail_at(path_, "cannot be given its name");
  ::close(std::exchange(fd_, -1));
  const fs::path folder = path_.has_parent_path() ? path_.parent_path() : fs::path(".");
  if (const int fd = ::open(folder.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
    ::fsync(fd);
    ::close(fd);
  }
}

void remove_left_over(const fs::path& folder) {
  for_each_name(folder, [&](const char* entry) {
    const std::string_view name = entry;
    if (!name.starts_with('.') || !name.ends_with(kAsideSuffix)) return;
    const fs::path path = folder / name;
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
    ::close(fd);
  });
}

}  // namespace lily::engine
