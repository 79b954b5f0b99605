// A file on its way. Its bytes come in pieces, several at a time, and a journal beside it says how much of
// each piece has been written, so that after any end of the program the next one goes on where this one
// stopped.
//
//   ID.lily-part   the bytes, at their places; has its full size from the start
//   ID.lily-done   "lilypart", version, size, bytes of a piece, then the bytes written of each piece (all
//   u64,
//                  in the machine's byte order)
//
// Neither has a name that any tool takes for a whole file. After a crash of the whole machine the journal may
// promise more than the disk holds: the checksum of the finished file decides.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

namespace lily::hub {

// What ENOSPC and EDQUOT mean.
[[noreturn]] void fail_disk_full(const std::filesystem::path& path);

class PartFile {
 public:
  // Goes on with what lies at PATH.lily-part if it is of this size, else begins anew. The journal's own piece
  // size wins. Errors are Fault::device.
  PartFile(const std::filesystem::path& path, uint64_t n_bytes, uint64_t piece_bytes);
  ~PartFile();
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  uint64_t n_bytes() const { return n_bytes_; }
  int n_pieces() const { return static_cast<int>(done_.size()); }
  uint64_t begin_of(int piece) const { return static_cast<uint64_t>(piece) * piece_bytes_; }  // in the file
  uint64_t end_of(int piece) const;
  uint64_t next_of(int piece) const { return begin_of(piece) + done_[piece]; }  // the first missing byte
  uint64_t n_present() const;  // of all pieces; not while threads append

  // Writes the next bytes of a piece, which must end within it. One thread a piece.
  void append(int piece, std::string_view bytes);

  void restart();  // forgets what was written
  const std::filesystem::path& data_path() const { return data_path_; }
  void publish();  // as PATH, on disk and in one step
  static uint64_t present_at(
      const std::filesystem::path& path);  // bytes written, without opening; 0 if there is none
  static bool remove(const std::filesystem::path& path);  // both files

 private:
  void begin_anew();
  bool resume();

  std::filesystem::path path_, data_path_, journal_path_;
  uint64_t n_bytes_, piece_bytes_;
  std::vector<uint64_t> done_;  // bytes, by piece
  int data_ = -1, journal_ = -1;
};

}  // namespace lily::hub
