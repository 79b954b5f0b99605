// A file that has its name only when it is whole and on the disk: written under another name in the same
// folder, brought to the disk, renamed.
#pragma once

#include <filesystem>
#include <string_view>

namespace lily {

// One thread at a time. Throws Error(Fault::device), naming the path that was asked for, where the disk
// fails; a full one is told apart.
class AsideFile {
 public:
  // How the other names end. They begin with a dot, and are locked while their writer lives.
  static constexpr std::string_view kSuffix = ".lily-writing";

  // Only its owner may read the file.
  explicit AsideFile(std::filesystem::path path);
  ~AsideFile();  // removes what was not published
  AsideFile(const AsideFile&) = delete;
  AsideFile& operator=(const AsideFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void write(std::string_view bytes);
  void publish();

 private:
  std::filesystem::path path_, aside_;
  int fd_ = -1;
};

}  // namespace lily
