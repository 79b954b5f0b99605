#include "text/tokenizer.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <limits>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "text/splitter.h"
#include "text/unicode.h"

namespace lily::text {
namespace {

constexpr std::array<std::string_view, 4> kAssistantTokens = {"<think>", "</think>", "<tool_call>",
                                                              "</tool_call>"};

bool is_active(AddedTokens active, std::string_view text) {
  return active == AddedTokens::all ||
         (active == AddedTokens::assistant &&
          std::find(kAssistantTokens.begin(), kAssistantTokens.end(), text) != kAssistantTokens.end());
}

// What is wrong with a file of the model is the model's fault.
std::string read_model_file(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored))
    fail(Fault::model,
         "{}: is missing; copy it from where the checkpoint comes from (those of lily synth have none: lily "
         "bench can use them, lily run cannot)",
         printable(path.string(), 400));
  try {
    return read_text_file(path, kMaxTokenizerBytes);
  } catch (const Error& e) {
    fail(Fault::model, "{}", e.what());
  }
}

// Encodes the parts of one text between its added tokens. Normalised copies are kept until the end, because
// the workspace remembers pieces by reference.
class PlainEncoder {
 public:
  PlainEncoder(const Bpe& bpe, std::vector<int32_t>& out) : bpe_(bpe), out_(out) {}

  void append(std::string_view text) {
    if (!is_plainly_nfc(text)) text = normalised_.emplace_back(to_nfc(text));
    for (size_t pos = 0; pos < text.size();) {
      const size_t size = piece_size(text, pos);
      bpe_.encode_append(text.substr(pos, size), workspace_, out_);
      pos += size;
    }
  }

 private:
  const Bpe& bpe_;
  std::vector<int32_t>& out_;
  std::deque<std::string> normalised_;
  Bpe::Workspace workspace_;
};

}  // namespace

Tokenizer Tokenizer::load(const std::string& model_dir) {
  const std::filesystem::path dir(model_dir);
  const auto config_path = dir / "tokenizer_config.json";
  const std::string config =
      std::filesystem::exists(config_path) ? read_model_file(config_path) : std::string();
  return Tokenizer(parse_tokenizer(read_model_file(dir / "tokenizer.json"), config));
}

Tokenizer::Tokenizer(TokenizerData data)
    : added_(std::move(data.added)), bpe_(data.byte_tokens, data.merges) {
  for (const std::string& bytes : data.token_bytes) {
    bytes_begin_.push_back(static_cast<uint32_t>(bytes_.size()));
    bytes_ += bytes;
  }
  LILY_CHECK(bytes_.size() < std::numeric_limits<uint32_t>::max(), "{} bytes", bytes_.size());
  bytes_begin_.push_back(static_cast<uint32_t>(bytes_.size()));
  kinds_.assign(data.token_bytes.size(), Kind::plain);
  for (size_t i = 0; i < added_.size(); ++i) {
    kinds_[static_cast<size_t>(added_[i].id)] = added_[i].special ? Kind::special : Kind::added;
    added_by_first_byte_[static_cast<uint8_t>(added_[i].text[0])].push_back(static_cast<int32_t>(i));
  }
  for (auto& indices : added_by_first_byte_)
    std::sort(indices.begin(), indices.end(),
              [&](int32_t a, int32_t b) { return added_[a].text.size() > added_[b].text.size(); });
}

Tokenizer::Kind Tokenizer::kind(int32_t id) const {
  return id < 0 || id >= n_tokens() ? Kind::plain : kinds_[static_cast<size_t>(id)];
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= n_tokens()) return {};
  const auto index = static_cast<size_t>(id);
  return std::string_view(bytes_).substr(bytes_begin_[index], bytes_begin_[index + 1] - bytes_begin_[index]);
}

std::optional<int32_t> Tokenizer::id_of(std::string_view added_token) const {
  for (const AddedToken& token : added_)
    if (token.text == added_token) return token.id;
  return std::nullopt;
}

void Tokenizer::find_added(std::string_view text, size_t begin, size_t end, AddedTokens active,
                           std::vector<Match>& out) const {
  if (active == AddedTokens::none) return;
  const std::string_view range = text.substr(0, end);
  for (size_t pos = begin; pos < end;) {
    size_t size = 1;
    for (const int32_t index : added_by_first_byte_[static_cast<uint8_t>(text[pos])]) {
      const AddedToken& token = added_[static_cast<size_t>(index)];
      if (range.compare(pos, token.text.size(), token.text) != 0 || !is_active(active, token.text)) continue;
      size = token.text.size();
      out.push_back({pos, pos + size, token.id});
      break;
    }
    pos += size;
  }
}

void Tokenizer::encode_append(std::string_view text, std::span<const TextRange> ranges,
                              std::vector<int32_t>& out) const {
  std::vector<Match> matches;
  size_t begin = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (i + 1 < ranges.size() && ranges[i + 1].active == ranges[i].active) continue;
    LILY_CHECK(begin <= ranges[i].end && ranges[i].end <= text.size(), "{} {}", begin, ranges[i].end);
    find_added(text, begin, ranges[i].end, ranges[i].active, matches);
    begin = ranges[i].end;
  }
  LILY_CHECK(begin == text.size(), "ranges end at {} of {} bytes", begin, text.size());

  PlainEncoder plain(bpe_, out);
  size_t done = 0;
  for (const Match& match : matches) {
    plain.append(text.substr(done, match.begin - done));
    out.push_back(match.id);
    done = match.end;
  }
  plain.append(text.substr(done));
}

void Tokenizer::encode_append(std::string_view text, AddedTokens active, std::vector<int32_t>& out) const {
  const TextRange whole{text.size(), active};
  encode_append(text, {&whole, 1}, out);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, AddedTokens active) const {
  std::vector<int32_t> ids;
  encode_append(text, active, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  StreamingDetokenizer detokenizer(*this);
  std::string text;
  for (const int32_t id : ids) text += detokenizer.push(id);
  return text + detokenizer.finish();
}

std::string Tokenizer::decode_bytes(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) bytes += token_bytes(id);
  return bytes;
}

std::string StreamingDetokenizer::push(int32_t id) {
  if (tokenizer_->is_special(id)) return {};
  const std::string_view bytes = tokenizer_->token_bytes(id);
  if (tokenizer_->is_added(id)) return finish() + replace_invalid_utf8(bytes);
  std::string all = std::move(pending_);
  all += bytes;
  pending_.clear();
  std::string out;
  out.reserve(all.size());
  for (size_t pos = 0; pos < all.size();) {
    const Utf8Step step = decode_utf8(all, pos);
    if (step.kind == Utf8Step::Kind::truncated) {
      pending_ = all.substr(pos);
      break;
    }
    out.append(step.valid() ? std::string_view(all).substr(pos, step.n_bytes) : kReplacement);
    pos += step.n_bytes;
  }
  return out;
}

std::string StreamingDetokenizer::finish() {
  std::string out(pending_.empty() ? std::string_view() : kReplacement);
  pending_.clear();
  return out;
}

}  // namespace lily::text
