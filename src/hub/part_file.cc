#include "hub/part_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>

#include "base/error.h"
#include "base/printable.h"

namespace lily::hub {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kVersion = 1;
constexpr uint64_t kMaxPieces = uint64_t{1} << 20;

struct Header {
  std::array<char, 8> magic = {'l', 'i', 'l', 'y', 'p', 'a', 'r', 't'};
  uint64_t version = kVersion, n_bytes = 0, piece_bytes = 0;
};

[[noreturn]] void fail_at(const fs::path& path, const char* what) {
  const int code = errno;
  if (code == ENOSPC || code == EDQUOT) fail_disk_full(path);
  fail(Fault::device, "{}: {}: {}", printable(path.string(), 400), what, std::strerror(code));
}

void write_at(int fd, const fs::path& path, uint64_t offset, const void* bytes, size_t n) {
  const char* at = static_cast<const char*>(bytes);
  while (n > 0) {
    const ssize_t written = pwrite(fd, at, n, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_at(path, "cannot be written");
    at += written, offset += static_cast<uint64_t>(written), n -= static_cast<size_t>(written);
  }
}

uint64_t pieces_of(uint64_t n_bytes, uint64_t piece_bytes) {
  return std::max<uint64_t>(1, (n_bytes + piece_bytes - 1) / piece_bytes);
}

// The journal's figures, if it is one for a file of this size (0: of any) and consistent in itself.
std::vector<uint64_t> read_journal(const fs::path& path, uint64_t n_bytes, Header& header) {
  std::ifstream in(path, std::ios::binary);
  const Header expected;
  if (!in.read(reinterpret_cast<char*>(&header), sizeof header) || header.magic != expected.magic ||
      header.version != kVersion || header.piece_bytes == 0 || (n_bytes > 0 && header.n_bytes != n_bytes) ||
      header.n_bytes > (uint64_t{1} << 60) || pieces_of(header.n_bytes, header.piece_bytes) > kMaxPieces)
    return {};
  std::vector<uint64_t> done(pieces_of(header.n_bytes, header.piece_bytes));
  if (!in.read(reinterpret_cast<char*>(done.data()), static_cast<std::streamsize>(8 * done.size())))
    return {};
  for (size_t i = 0; i < done.size(); ++i)
    if (done[i] > std::min(header.piece_bytes, header.n_bytes - i * header.piece_bytes)) return {};
  return done;
}

}  // namespace

void fail_disk_full(const fs::path& path) {
  fail(Fault::device, "{}: the disk is full; what has arrived is kept: make room and run lily pull again",
       printable(path.string(), 400));
}

PartFile::PartFile(const fs::path& path, uint64_t n_bytes, uint64_t piece_bytes)
    : path_(path),
      data_path_(path.string() + ".lily-part"),
      journal_path_(path.string() + ".lily-done"),
      n_bytes_(n_bytes),
      piece_bytes_(std::max(piece_bytes, (n_bytes + kMaxPieces - 1) / kMaxPieces)) {
  try {
    if (!resume()) begin_anew();
  } catch (...) {
    if (data_ >= 0) close(data_);
    if (journal_ >= 0) close(journal_);
    throw;
  }
}

PartFile::~PartFile() {
  if (data_ >= 0) close(data_);
  if (journal_ >= 0) close(journal_);
}

bool PartFile::resume() {
  struct stat info{};
  if (lstat(data_path_.c_str(), &info) != 0 || !S_ISREG(info.st_mode) ||
      static_cast<uint64_t>(info.st_size) != n_bytes_)
    return false;
  Header header;
  done_ = read_journal(journal_path_, n_bytes_, header);
  if (done_.empty() || header.n_bytes != n_bytes_) return false;
  piece_bytes_ = header.piece_bytes;
  data_ = open(data_path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (data_ < 0) fail_at(data_path_, "cannot be opened");
  journal_ = open(journal_path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (journal_ < 0) fail_at(journal_path_, "cannot be opened");
  return true;
}

void PartFile::begin_anew() {
  // A journal of an older file must be gone before this one's bytes are.
  if (unlink(journal_path_.c_str()) != 0 && errno != ENOENT) fail_at(journal_path_, "cannot be removed");
  if (unlink(data_path_.c_str()) != 0 && errno != ENOENT) fail_at(data_path_, "cannot be removed");
  data_ = open(data_path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (data_ < 0) fail_at(data_path_, "cannot be created");
  if (ftruncate(data_, static_cast<off_t>(n_bytes_)) != 0) fail_at(data_path_, "cannot be given its size");
  done_.assign(pieces_of(n_bytes_, piece_bytes_), 0);
  journal_ = open(journal_path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (journal_ < 0) fail_at(journal_path_, "cannot be created");
  // A journal that is cut short is not believed, so the order of these writes does not matter.
  const Header header{.n_bytes = n_bytes_, .piece_bytes = piece_bytes_};
  write_at(journal_, journal_path_, 0, &header, sizeof header);
  write_at(journal_, journal_path_, sizeof header, done_.data(), 8 * done_.size());
}

uint64_t PartFile::end_of(int piece) const { return std::min(n_bytes_, begin_of(piece) + piece_bytes_); }

uint64_t PartFile::n_present() const { return std::accumulate(done_.begin(), done_.end(), uint64_t{0}); }

void PartFile::append(int piece, std::string_view bytes) {
  const auto index = static_cast<size_t>(piece);
  LILY_CHECK(next_of(piece) + bytes.size() <= end_of(piece), "piece {}, {} bytes", piece, bytes.size());
  write_at(data_, data_path_, next_of(piece), bytes.data(), bytes.size());
  const uint64_t done = done_[index] + bytes.size();
  write_at(journal_, journal_path_, sizeof(Header) + 8 * index, &done, sizeof done);
  done_[index] = done;
}

void PartFile::restart() {
  close(data_), close(journal_);
  data_ = journal_ = -1;
  begin_anew();
}

void PartFile::publish() {
  if (fsync(data_) != 0) fail_at(data_path_, "cannot be brought to disk");
  if (rename(data_path_.c_str(), path_.c_str()) != 0) fail_at(path_, "cannot be given its name");
  if (const int folder = open(path_.parent_path().c_str(), O_RDONLY | O_CLOEXEC); folder >= 0) {
    fsync(folder);
    close(folder);
  }
  unlink(journal_path_.c_str());
}

uint64_t PartFile::present_at(const fs::path& path) {
  Header header;
  const std::vector<uint64_t> done = read_journal(path.string() + ".lily-done", 0, header);
  std::error_code error;
  if (fs::file_size(path.string() + ".lily-part", error) != header.n_bytes || error) return 0;
  return std::accumulate(done.begin(), done.end(), uint64_t{0});
}

bool PartFile::remove(const fs::path& path) {
  const bool had_journal = unlink((path.string() + ".lily-done").c_str()) == 0;
  const bool had_data = unlink((path.string() + ".lily-part").c_str()) == 0;
  return had_journal || had_data;
}

}  // namespace lily::hub
