#include "engine/session_io.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <random>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/folder.h"
#include "base/printable.h"

namespace lily::engine {
namespace {

namespace fs = std::filesystem;

std::string name_of(const fs::path& path) { return printable(path.string(), 400); }

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
    : file_(std::move(path)), header_(std::move(header)) {
  std::random_device random;
  header_.nonce = (uint64_t{random()} << 32) ^ random();
  file_.write(encode_header(header_));
}

void SessionWriter::add(std::span<const float> piece) {
  bytes_.clear();
  encode_piece(header_, piece_, piece, bytes_);
  file_.write(bytes_);
  ++piece_;
}

void SessionWriter::publish() {
  LILY_CHECK(piece_ == header_.n_pieces(), "{} of {} pieces", piece_, header_.n_pieces());
  file_.publish();
}

void remove_left_over(const fs::path& folder) {
  // One that cannot be read has nothing to be removed by this.
  std::ignore = for_each_name(folder, [&](const char* entry) {
    const std::string_view name = entry;
    if (!name.starts_with('.') || !name.ends_with(AsideFile::kSuffix)) return;
    const fs::path path = folder / name;
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
    ::close(fd);
  });
}

}  // namespace lily::engine
