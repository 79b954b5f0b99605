#include "engine/npz.h"

#include <bit>
#include <cctype>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/file.h"

namespace lily::engine {
namespace {

constexpr uint64_t kMaxNpzBytes = uint64_t{1} << 30;
constexpr uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEndOfDirectory = 0x06054b50;
constexpr size_t kEndBytes = 22, kCentralBytes = 46, kLocalBytes = 30;

// Little-endian numbers at positions that are checked.
class Bytes {
 public:
  Bytes(std::span<const std::byte> bytes, std::string_view what) : bytes_(bytes), what_(what) {}
  size_t size() const { return bytes_.size(); }
  std::span<const std::byte> at(uint64_t offset, uint64_t n) const {
    if (offset > bytes_.size() || n > bytes_.size() - offset)
      fail(Fault::model, "{}: bytes {} to {} are outside the {} there are; is the file cut off?", what_,
           offset, offset + n, bytes_.size());
    return bytes_.subspan(static_cast<size_t>(offset), static_cast<size_t>(n));
  }
  uint32_t number(uint64_t offset, int n) const {
    const auto bytes = at(offset, static_cast<uint64_t>(n));
    uint32_t value = 0;
    for (int i = n - 1; i >= 0; --i)
      value = value << 8 | static_cast<uint32_t>(bytes[static_cast<size_t>(i)]);
    return value;
  }
  std::string text(uint64_t offset, uint64_t n) const {
    const auto bytes = at(offset, n);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view what_;
};

// The value of a key in the header's Python dictionary, up to the comma or bracket that ends it.
std::string value_of(const std::string& header, const std::string& key, const std::string& what) {
  const size_t at = header.find("'" + key + "':");
  if (at == std::string::npos) fail(Fault::model, "{}: no '{}' in the array's header", what, key);
  size_t begin = at + key.size() + 3;
  while (begin < header.size() && header[begin] == ' ') ++begin;
  const bool tuple = begin < header.size() && header[begin] == '(';
  const size_t end = header.find(tuple ? ')' : ',', begin);
  if (end == std::string::npos) fail(Fault::model, "{}: the array's header is cut off", what);
  return header.substr(begin, end - begin + (tuple ? 1 : 0));
}

template <typename T>
void convert(std::span<const std::byte> from, std::vector<double>& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    T value;
    std::memcpy(&value, from.data() + i * sizeof(T), sizeof(T));
    to[i] = static_cast<double>(value);
  }
}

NpyArray parse_npy(const Bytes& bytes, const std::string& what) {
  static_assert(std::endian::native == std::endian::little);
  if (bytes.text(0, 6) != "\x93NUMPY") fail(Fault::model, "{}: not a NumPy array", what);
  const uint32_t version = bytes.number(6, 1);
  if (version != 1 && version != 2)
    fail(Fault::model, "{}: version {} of the format is not known", what, version);
  const int length_bytes = version == 1 ? 2 : 4;
  const uint32_t header_bytes = bytes.number(8, length_bytes);
  const uint64_t data_start = 8 + static_cast<uint64_t>(length_bytes) + header_bytes;
  const std::string header = bytes.text(data_start - header_bytes, header_bytes);

  const std::string type = value_of(header, "descr", what);
  if (value_of(header, "fortran_order", what) != "False")
    fail(Fault::model, "{}: arrays in Fortran order are not supported", what);
  const size_t element = type == "'<i4'" || type == "'<f4'" ? 4 : type == "'<i8'" || type == "'<f8'" ? 8 : 0;
  if (element == 0)
    fail(Fault::model, "{}: type {} is not supported; use int32, int64, float32 or float64", what, type);

  NpyArray array{.what = what};
  uint64_t n = 1;
  std::optional<uint64_t> dimension;
  for (const char c : value_of(header, "shape", what)) {
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
      dimension = dimension.value_or(0) * 10 + static_cast<uint64_t>(c - '0');
      if (*dimension > kMaxNpzBytes) fail(Fault::model, "{}: a dimension of {} and more", what, *dimension);
    } else if (dimension) {
      array.shape.push_back(static_cast<int64_t>(*dimension));
      if (*dimension != 0 && n > kMaxNpzBytes / *dimension)
        fail(Fault::model, "{}: the array is too large", what);
      n *= *dimension;
      dimension.reset();
    }
  }
  const auto data = bytes.at(data_start, n * element);
  array.data.resize(static_cast<size_t>(n));
  if (type == "'<i4'") convert<int32_t>(data, array.data);
  else if (type == "'<f4'") convert<float>(data, array.data);
  else if (type == "'<i8'") convert<int64_t>(data, array.data);
  else convert<double>(data, array.data);
  return array;
}

}  // namespace

std::vector<int32_t> NpyArray::ints() const {
  std::vector<int32_t> out;
  for (const double x : data) {
    if (!(x >= std::numeric_limits<int32_t>::min() && x <= std::numeric_limits<int32_t>::max()) ||
        x != std::floor(x))
      fail(Fault::model, "{}: {} is not a 32-bit integer", what, x);
    out.push_back(static_cast<int32_t>(x));
  }
  return out;
}

std::vector<float> NpyArray::floats() const { return {data.begin(), data.end()}; }

std::map<std::string, NpyArray> parse_npz(std::span<const std::byte> file, std::string_view what) {
  const Bytes bytes(file, what);
  // The end record is the last thing in the file but for a comment, which numpy does not write.
  if (bytes.size() < kEndBytes || bytes.number(bytes.size() - kEndBytes, 4) != kEndOfDirectory)
    fail(Fault::model, "{}: not a zip archive as numpy.savez writes it, or cut off", what);
  const uint64_t end = bytes.size() - kEndBytes;
  const uint32_t n_entries = bytes.number(end + 10, 2);
  uint64_t at = bytes.number(end + 16, 4);

  std::map<std::string, NpyArray> arrays;
  for (uint32_t i = 0; i < n_entries; ++i) {
    if (bytes.number(at, 4) != kCentralHeader)
      fail(Fault::model, "{}: entry {} of the directory is damaged", what, i);
    const uint32_t method = bytes.number(at + 10, 2), n_stored = bytes.number(at + 20, 4);
    const uint32_t name_bytes = bytes.number(at + 28, 2), extra_bytes = bytes.number(at + 30, 2),
                   comment_bytes = bytes.number(at + 32, 2);
    const uint64_t local = bytes.number(at + 42, 4);
    std::string name = bytes.text(at + kCentralBytes, name_bytes);
    at += kCentralBytes + name_bytes + extra_bytes + comment_bytes;

    const std::string entry = fmt::format("{}: {}", what, name);
    if (method != 0) fail(Fault::model, "{} is compressed; write the file with numpy.savez", entry);
    if (bytes.number(local, 4) != kLocalHeader) fail(Fault::model, "{}: its header is damaged", entry);
    const uint64_t data = local + kLocalBytes + bytes.number(local + 26, 2) + bytes.number(local + 28, 2);
    if (name.ends_with(".npy")) name.resize(name.size() - 4);
    arrays[name] = parse_npy(Bytes(bytes.at(data, n_stored), entry), entry);
  }
  return arrays;
}

std::map<std::string, NpyArray> read_npz(const std::filesystem::path& path) {
  const File file = File::open(path);
  if (file.size() > kMaxNpzBytes)
    fail(Fault::model, "{}: {} bytes are more than the {} that are read", path.string(), file.size(),
         kMaxNpzBytes);
  std::vector<std::byte> bytes(static_cast<size_t>(file.size()));
  file.read_at(0, bytes);
  return parse_npz(bytes, path.string());
}

}  // namespace lily::engine
