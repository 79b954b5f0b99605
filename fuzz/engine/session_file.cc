// The input is a whole session file. One that is accepted must say how long it is, and written again from
// what was read it must be the same bytes; anything else is refused with an error of one line. Checksums
// stand in a fuzzer's way, so each input is tried with its header's checksum put right, too.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "engine/session_file.h"

namespace {

using namespace lily;
using namespace lily::engine;

void read(std::span<const std::byte> bytes) {
  const auto n_bytes = static_cast<int64_t>(bytes.size());
  try {
    const SessionHeader header = parse_header(bytes, n_bytes, "input");
    LILY_CHECK(header.file_bytes() == n_bytes && header.header_bytes() <= n_bytes);
    const std::string again = encode_header(header);
    LILY_CHECK(std::ssize(again) == header.header_bytes());
    LILY_CHECK(std::memcmp(again.data(), bytes.data(), again.size()) == 0);
    auto rest = bytes.subspan(again.size());
    std::vector<float> values;
    for (int i = 0; i < header.n_pieces(); ++i) {
      const auto piece = rest.first(static_cast<size_t>(header.piece_bytes(i)));
      rest = rest.subspan(piece.size());
      if (!decode_piece(header, i, piece, values)) continue;
      LILY_CHECK(std::ssize(values) == header.piece_floats(i));
      std::string encoded;
      encode_piece(header, i, values, encoded);
      LILY_CHECK(encoded.size() == piece.size() &&
                 std::memcmp(encoded.data(), piece.data(), piece.size()) == 0);
    }
    LILY_CHECK(rest.empty());
  } catch (const Error& error) {
    LILY_CHECK(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  read(bytes);
  try {
    const int64_t n = header_bytes(bytes, static_cast<int64_t>(size), "input");
    std::vector<std::byte> mended(bytes.begin(), bytes.end());
    const uint64_t sum = checksum(0, std::span(mended).first(static_cast<size_t>(n) - sizeof sum));
    std::memcpy(mended.data() + n - sizeof sum, &sum, sizeof sum);
    read(mended);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
    // Has no header that could be mended.
  }
  return 0;
}
