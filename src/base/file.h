// Read-only access to regular files, by position and from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace lily {

class File {
 public:
  // Regular files only; symbolic links are followed. Errors are Fault::device and name the path.
  static File open(const std::filesystem::path& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  uint64_t size() const { return size_; }  // bytes, when the file was opened

  // Fills `out` from `offset` or throws: there are no short reads. Any thread.
  void read_at(uint64_t offset, std::span<std::byte> out) const;

  // Hints that never fail. Every byte will be read once and in about this order: read ahead, and where the
  // system can (Apple) do not keep the pages.
  void expect_one_pass() const;
  // The cached pages of this range are not needed again (Linux; elsewhere expect_one_pass has said it all).
  void release_cached(uint64_t offset, uint64_t n_bytes) const;

 private:
  File(std::filesystem::path path, int fd, uint64_t size);

  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

// The whole file; one that is larger than max_bytes is an error.
std::string read_text_file(const std::filesystem::path& path, uint64_t max_bytes);

}  // namespace lily
