// Session files on disk: read a piece at a time, written aside and renamed.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/aside_file.h"
#include "base/file.h"
#include "engine/session_file.h"

namespace lily::engine {

class SessionReader {
 public:
  // Reads and checks the header. Throws Error: the file cannot be read, or is not a whole session.
  explicit SessionReader(const std::filesystem::path& path);

  const SessionHeader& header() const { return header_; }
  const std::filesystem::path& path() const { return file_.path(); }
  // Reads the next piece. Throws Error if it is damaged.
  void next(std::vector<float>& values);

 private:
  File file_;
  SessionHeader header_;
  int piece_ = 0;
  uint64_t offset_ = 0;
  std::vector<std::byte> bytes_;
};

// A file that has its name only when it is whole and on the disk; throws as AsideFile does.
class SessionWriter {
 public:
  SessionWriter(std::filesystem::path path, SessionHeader header);

  const SessionHeader& header() const { return header_; }
  const std::filesystem::path& path() const { return file_.path(); }
  // The pieces in order; all of them before publish().
  void add(std::span<const float> piece);
  void publish();

 private:
  AsideFile file_;
  SessionHeader header_;
  int piece_ = 0;
  std::string bytes_;
};

// Removes what killed writers have left in a folder. Files of living ones are locked and stay.
void remove_left_over(const std::filesystem::path& folder);

}  // namespace lily::engine
