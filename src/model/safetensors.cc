#include "model/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/printable.h"
#include "model/json_strict.h"

namespace lily::model {
namespace {

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<DtypeRow, 14> kDtypes = {{
    {Dtype::bf16, "BF16", 2},
    {Dtype::f16, "F16", 2},
    {Dtype::f32, "F32", 4},
    {Dtype::f64, "F64", 8},
    {Dtype::f8, "F8", 1},
    {Dtype::u8, "U8", 1},
    {Dtype::i8, "I8", 1},
    {Dtype::u16, "U16", 2},
    {Dtype::i16, "I16", 2},
    {Dtype::u32, "U32", 4},
    {Dtype::i32, "I32", 4},
    {Dtype::u64, "U64", 8},
    {Dtype::i64, "I64", 8},
    {Dtype::boolean, "BOOL", 1},
}};

// Turns the header's JSON into entries without building the document.
class HeaderReader final : public StrictJson {
 public:
  explicit HeaderReader(std::string what) : StrictJson(std::move(what)) {}
  std::vector<TensorEntry> take() { return std::move(tensors_); }

 private:
  // What the value after the last key of an entry is. Fields that the format does not define are passed over.
  enum class Field { dtype, shape, offsets, unknown };

  std::string name() const { return printable(entry_.name); }

  void on_begin(Container container) override {
    const bool is_object = container == Container::object;
    if (depth() == 1) {
      if (!is_object) fail(Fault::model, "{}: the header is not a JSON object", what());
    } else if (depth() == 2) {
      if (!is_object) fail(Fault::model, "{}: \"{}\" is not a JSON object", what(), name());
    } else if (in_metadata_) {
      fail(Fault::model, "{}: __metadata__ holds something other than strings", what());
    } else if (field_ != Field::unknown) {
      if (depth() > 3 || is_object || field_ == Field::dtype) bad_field();
    }
  }

  void on_key(std::string& key) override {
    if (depth() == 1) {
      in_metadata_ = key == "__metadata__";
      entry_ = {};
      has_dtype_ = has_shape_ = false;
      offsets_.clear();
      entry_.name = std::move(key);
      if (!in_metadata_) check_name();
    } else if (depth() == 2 && !in_metadata_) {
      field_ = key == "dtype"          ? Field::dtype
               : key == "shape"        ? Field::shape
               : key == "data_offsets" ? Field::offsets
                                       : Field::unknown;
      if (field_ == Field::shape) has_shape_ = true;
    }
  }

  void on_scalar(Json value) override {
    if (depth() == 0) fail(Fault::model, "{}: the header is not a JSON object", what());
    if (depth() == 1) fail(Fault::model, "{}: \"{}\" is not a JSON object", what(), name());
    if (in_metadata_) {
      if (!value.is_string())
        fail(Fault::model, "{}: __metadata__ holds something other than strings", what());
    } else if (field_ == Field::dtype) {
      if (depth() != 2 || !value.is_string()) bad_field();
      has_dtype_ = true;
      entry_.dtype_name = value.get<std::string>();
      entry_.dtype = dtype_of(entry_.dtype_name);
    } else if (field_ == Field::shape) {
      if (depth() != 3) bad_field();
      if (entry_.shape.size() == kMaxTensorRank)
        fail(Fault::model, "{}: {}: has more than {} dimensions", what(), name(), kMaxTensorRank);
      if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(kMaxTensorDim))
        fail(Fault::model, "{}: {}: a dimension is {}, expected an integer from 0 to {}", what(), name(),
             printable(value.dump(-1, ' ', true)), kMaxTensorDim);
      entry_.shape.push_back(value.get<int64_t>());
    } else if (field_ == Field::offsets) {
      if (depth() != 3) bad_field();
      if (offsets_.size() == 2 || !value.is_number_unsigned()) bad_field();
      offsets_.push_back(value.get<uint64_t>());
    }
  }

  void on_end() override {
    if (depth() == 2) field_ = Field::unknown;  // the rest of an array that has been read
    if (depth() != 1 || in_metadata_) return;
    if (!has_dtype_) fail(Fault::model, "{}: {}: has no \"dtype\"", what(), name());
    if (!has_shape_) fail(Fault::model, "{}: {}: has no \"shape\"", what(), name());
    if (offsets_.size() != 2)
      fail(Fault::model, "{}: {}: has {} data_offsets, expected 2", what(), name(), offsets_.size());
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    if (tensors_.size() == kMaxTensorsPerFile)
      fail(Fault::model, "{}: holds more than {} tensors", what(), kMaxTensorsPerFile);
    tensors_.push_back(std::move(entry_));
  }

  void check_name() const {
    if (entry_.name.size() > kMaxTensorNameBytes)
      fail(Fault::model, "{}: a tensor name has {} bytes, more than {}: {}", what(), entry_.name.size(),
           kMaxTensorNameBytes, printable(entry_.name, 40));
    if (entry_.name.find('\0') != std::string::npos)
      fail(Fault::model, "{}: a tensor name holds a zero byte: {}", what(), name());
  }

  [[noreturn]] void bad_field() const {
    const char* expected = field_ == Field::dtype   ? "\"dtype\" is not a string"
                           : field_ == Field::shape ? "\"shape\" is not a list of integers"
                                                    : "\"data_offsets\" is not a list of two integers >= 0";
    fail(Fault::model, "{}: {}: {}", what(), name(), expected);
  }

  std::vector<TensorEntry> tensors_;
  TensorEntry entry_;
  std::vector<uint64_t> offsets_;
  bool in_metadata_ = false, has_dtype_ = false, has_shape_ = false;
  Field field_ = Field::unknown;
};

// Bytes of the tensor by type and shape; nothing if that does not fit into 63 bits.
std::optional<uint64_t> expected_bytes(const TensorEntry& entry) {
  uint64_t n = static_cast<uint64_t>(dtype_bytes(entry.dtype));
  constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  for (const int64_t dim : entry.shape) {
    if (dim != 0 && n > kMax / static_cast<uint64_t>(dim)) return std::nullopt;
    n *= static_cast<uint64_t>(dim);
  }
  return n;
}

void check_ranges(SafetensorsHeader& header, std::string_view what) {
  for (const TensorEntry& entry : header.tensors) {
    const std::string name = printable(entry.name);
    if (entry.begin > entry.end || entry.end > header.data_bytes)
      fail(Fault::model,
           "{}: {}: data_offsets [{}, {}] do not lie in the {} bytes of data; is the file complete?", what,
           name, entry.begin, entry.end, header.data_bytes);
    if (entry.dtype == Dtype::other) continue;  // its size cannot be told
    const std::optional<uint64_t> n_bytes = expected_bytes(entry);
    if (!n_bytes) fail(Fault::model, "{}: {}: the product of its dimensions overflows", what, name);
    if (*n_bytes != entry.end - entry.begin)
      fail(Fault::model, "{}: {}: has {} bytes of data, but its type and shape need {}", what, name,
           entry.end - entry.begin, *n_bytes);
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const TensorEntry& entry : header.tensors) {
    if (entry.begin < end)
      fail(Fault::model, "{}: {}: its data overlaps the tensor before it by {} bytes", what,
           printable(entry.name), end - entry.begin);
    if (entry.begin > end)
      fail(Fault::model, "{}: {} bytes before the data of {} belong to no tensor", what, entry.begin - end,
           printable(entry.name));
    end = entry.end;
  }
  if (end != header.data_bytes)
    fail(Fault::model, "{}: {} bytes at the end belong to no tensor", what, header.data_bytes - end);
}

}  // namespace

Dtype dtype_of(std::string_view name) {
  if (name.substr(0, 3) == "F8_") return Dtype::f8;
  for (const DtypeRow& row : kDtypes)
    if (row.name == name && row.dtype != Dtype::f8) return row.dtype;
  return Dtype::other;
}

int64_t dtype_bytes(Dtype dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.dtype == dtype) return row.bytes;
  return 0;
}

std::string_view to_string(Dtype dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.dtype == dtype) return row.name;
  return "other";
}

uint64_t safetensors_header_bytes(std::span<const std::byte> first_8, uint64_t file_bytes,
                                  std::string_view what) {
  if (file_bytes < 8 || first_8.size() < 8)
    fail(Fault::model, "{}: has {} bytes, too few for a safetensors file", what, file_bytes);
  uint64_t n = 0;
  for (int i = 7; i >= 0; --i) n = n << 8 | std::to_integer<uint64_t>(first_8[i]);
  if (n < 2 || n > kMaxHeaderBytes)
    fail(Fault::model, "{}: header length {} is not between 2 and {}; is this a safetensors file?", what, n,
         kMaxHeaderBytes);
  if (n > file_bytes - 8)
    fail(Fault::model, "{}: header length {} is more than the file's {} bytes; is the file complete?", what,
         n, file_bytes);
  return n;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes,
                                           std::string_view what) {
  if (json.empty() || json.front() != '{') fail(Fault::model, "{}: the header does not begin with {{", what);
  if (file_bytes < 8 || json.size() > file_bytes - 8)
    fail(Fault::model, "{}: header of {} bytes in a file of {}", what, json.size(), file_bytes);
  HeaderReader reader{std::string(what)};
  reader.read(json);
  SafetensorsHeader header;
  header.data_start = 8 + json.size();
  header.data_bytes = file_bytes - header.data_start;
  header.tensors = reader.take();
  check_ranges(header, what);
  return header;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file_bytes, std::string_view what) {
  const uint64_t n = safetensors_header_bytes(file_bytes, file_bytes.size(), what);
  const std::string_view json(reinterpret_cast<const char*>(file_bytes.data()) + 8, n);
  return parse_safetensors_header(json, file_bytes.size(), what);
}

SafetensorsHeader read_safetensors_header(const File& file, std::string* raw) {
  const std::string what = printable(file.path().filename().string());
  std::array<std::byte, 8> first_8{};
  if (file.size() >= 8) file.read_at(0, first_8);
  std::string json(safetensors_header_bytes(first_8, file.size(), what), '\0');
  file.read_at(8, std::as_writable_bytes(std::span(json)));
  SafetensorsHeader header = parse_safetensors_header(json, file.size(), what);
  if (raw) *raw = std::move(json);
  return header;
}

}  // namespace lily::model
