// Session files on disk: read a piece at a time, written aside and renamed.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

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

// A file that has its name only when it is whole and on the disk. Throws Error(Fault::device), naming the
// path, where the disk fails; a full one is told apart.
class SessionWriter {
 public:
  SessionWriter(std::filesystem::path path, SessionHeader header);
  ~SessionWriter();  // removes what was not published
  SessionWriter(const SessionWriter&) = delete;
  SessionWriter& operator=(const SessionWriter&) = delete;

  const SessionHeader& header() const { return header_; }
  const std::filesystem::path& path() const { return path_; }
  // The pieces in order; all of them before publish().
  void add(std::span<const float> piece);
  void publish();

 private:
  void write(std::string_view bytes);

  std::filesystem::path path_, aside_;
  SessionHeader header_;
  int fd_ = -1;
  int piece_ = 0;
  std::string bytes_;
};

// Removes what killed writers have left in a folder. Files of living ones are locked and stay.
void remove_left_over(const std::filesystem::path& folder);

}  // namespace lily::engine
