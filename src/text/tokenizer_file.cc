#include "text/tokenizer_file.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>

#include "base/error.h"
#include "base/printable.h"
#include "text/splitter.h"
#include "text/unicode.h"

namespace lily::text {
namespace {

constexpr std::string_view kFile = "tokenizer.json";
constexpr std::string_view kConfigFile = "tokenizer_config.json";
// Where an id may end up as an index, a file must not make us allocate gigabytes.
constexpr size_t kMaxAddedTokens = 4096;
constexpr size_t kMaxAddedBytes = 1024;
constexpr size_t kMaxMessageBytes = 500;

// Names from the file may hold anything; the message stays one printable line.
template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  fail(Fault::model, "{}", printable(fmt::format(format, std::forward<Args>(args)...), kMaxMessageBytes));
}

// The byte-level alphabet: printable bytes stand for themselves, the other 68 for U+0100, U+0101, ... in
// order.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      byte_of_[printable ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
    }
  }

  // The bytes that a vocabulary entry stands for; nothing if it is not spelled in the alphabet.
  std::optional<std::string> bytes(std::string_view spelled) const {
    std::string out;
    for (size_t pos = 0; pos < spelled.size();) {
      const Utf8Step step = decode_utf8(spelled, pos);
      if (!step.valid() || step.code_point >= byte_of_.size() || byte_of_[step.code_point] < 0)
        return std::nullopt;
      out.push_back(static_cast<char>(byte_of_[step.code_point]));
      pos += step.n_bytes;
    }
    return out;
  }

 private:
  std::vector<int16_t> byte_of_ = std::vector<int16_t>(0x100 + 68, -1);
};

// Follows the events of the JSON parser and keeps what matters. A frame of the stack says what the open
// object or array is; everything unknown is `other` and ignored with all it holds.
class Reader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  struct RawMerge {
    std::string left, right;
  };

  std::vector<std::pair<std::string, int32_t>> vocab;
  std::vector<RawMerge> merges;
  std::vector<AddedToken> added;
  std::optional<std::string> model_type, normalizer, pattern;
  bool saw_vocab = false, saw_merges = false;

  bool null() override { return scalar("null"); }
  bool boolean(bool value) override {
    if (where() == Frame::added_token) {
      if (key_ == "special") added.back().special = value;
      const bool unsupported = key_ == "lstrip" || key_ == "rstrip" || key_ == "single_word";
      if (unsupported && value)
        refuse("{}: added token {} has {} set, which this engine does not support", kFile, added.back().text,
               key_);
    }
    const bool must_be_false =
        (where() == Frame::model && (key_ == "byte_fallback" || key_ == "ignore_merges")) ||
        (where() == Frame::pre_tokenizer && (key_ == "add_prefix_space" || key_ == "use_regex"));
    if (must_be_false && value) refuse("{}: {} is true, expected false", kFile, key_);
    return scalar(value ? "true" : "false");
  }
  bool number_integer(number_integer_t value) override { return integer(value); }
  bool number_unsigned(number_unsigned_t value) override {
    return integer(static_cast<int64_t>(std::min<number_unsigned_t>(value, INT64_MAX)));
  }
  bool number_float(number_float_t, const string_t& text) override {
    if (where() == Frame::vocab) refuse("{}: vocab: id {} is not an integer", kFile, text);
    return scalar(text);
  }
  bool binary(binary_t&) override { return true; }

  bool string(string_t& value) override {
    switch (where()) {
      case Frame::model:
        if (key_ == "type") model_type = value;
        break;
      case Frame::normalizer:
        if (key_ == "type") normalizer = value;
        break;
      case Frame::pattern:
        if (key_ == "Regex") pattern = value;
        break;
      case Frame::added_token:
        if (key_ == "content") added.back().text = std::move(value);
        break;
      case Frame::vocab:
        refuse("{}: vocab: the id of {} is not an integer", kFile, key_);
      case Frame::merges: {
        const size_t space = value.find(' ');
        if (space == std::string::npos || value.find(' ', space + 1) != std::string::npos)
          refuse("{}: merges[{}]: expected two parts with one space between, found {:?}", kFile,
                 merges.size(), value);
        merges.push_back({value.substr(0, space), value.substr(space + 1)});
        break;
      }
      case Frame::merge_pair:
        if (pair_parts_ == 0) merges.push_back({std::move(value), {}});
        else if (pair_parts_ == 1) merges.back().right = std::move(value);
        ++pair_parts_;
        break;
      default:
        break;
    }
    return true;
  }

  bool key(string_t& name) override {
    key_ = std::move(name);
    return true;
  }
  bool start_object(size_t) override {
    switch (where()) {
      case Frame::outside:
        return enter(Frame::root);
      case Frame::root:
        if (key_ == "model") return enter(Frame::model);
        if (key_ == "normalizer") return enter(Frame::normalizer);
        if (key_ == "pre_tokenizer") return enter(Frame::pre_tokenizer);
        return enter(Frame::other);
      case Frame::model:
        if (key_ == "vocab") {
          if (saw_vocab) refuse("{}: vocab appears twice", kFile);
          saw_vocab = true;
          return enter(Frame::vocab);
        }
        return enter(Frame::other);
      case Frame::pre_tokenizer:
        return enter(key_ == "pattern" ? Frame::pattern : Frame::pre_tokenizer);
      case Frame::pre_tokenizers:
        return enter(Frame::pre_tokenizer);
      case Frame::added_tokens:
        if (added.size() >= kMaxAddedTokens) refuse("{}: more than {} added tokens", kFile, added.size());
        added.push_back({-1, {}, false});
        return enter(Frame::added_token);
      default:
        return enter_unexpected();
    }
  }
  bool start_array(size_t) override {
    switch (where()) {
      case Frame::root:
        return enter(key_ == "added_tokens" ? Frame::added_tokens : Frame::other);
      case Frame::model:
        if (key_ != "merges") return enter(Frame::other);
        if (saw_merges) refuse("{}: merges appears twice", kFile);
        saw_merges = true;
        return enter(Frame::merges);
      case Frame::merges:
        pair_parts_ = 0;
        return enter(Frame::merge_pair);
      case Frame::pre_tokenizer:
        return enter(key_ == "pretokenizers" ? Frame::pre_tokenizers : Frame::other);
      default:
        return enter_unexpected();
    }
  }
  bool end_object() override {
    if (where() == Frame::added_token && (added.back().id < 0 || added.back().text.empty()))
      refuse("{}: added_tokens[{}] lacks id or content", kFile, added.size() - 1);
    stack_.pop_back();
    return true;
  }
  bool end_array() override {
    if (where() == Frame::merge_pair && pair_parts_ != 2)
      refuse("{}: merges[{}]: expected two strings, found {}", kFile, merges.size() - 1, pair_parts_);
    stack_.pop_back();
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    refuse("{}: {}", kFile, error.what());
  }

 private:
  enum class Frame : uint8_t {
    outside,
    root,
    model,
    vocab,
    merges,
    merge_pair,
    normalizer,
    pre_tokenizer,
    pre_tokenizers,
    pattern,
    added_tokens,
    added_token,
    other
  };

  Frame where() const { return stack_.empty() ? Frame::outside : stack_.back(); }
  bool enter(Frame frame) {
    stack_.push_back(frame);
    return true;
  }
  bool enter_unexpected() {
    if (where() == Frame::vocab || where() == Frame::merges || where() == Frame::merge_pair)
      refuse("{}: {} holds a nested value", kFile, where() == Frame::vocab ? "vocab" : "merges");
    return enter(Frame::other);
  }
  bool scalar(std::string_view value) {
    if (where() == Frame::vocab) refuse("{}: vocab: id {} is not an integer", kFile, value);
    if (where() == Frame::merges || where() == Frame::merge_pair)
      refuse("{}: merges[{}]: expected strings, found {}", kFile, merges.size(), value);
    if (where() == Frame::model && key_ == "dropout" && value != "null")
      refuse("{}: model.dropout is {}, expected null", kFile, value);
    return true;
  }
  bool integer(int64_t value) {
    const bool is_id = where() == Frame::vocab || (where() == Frame::added_token && key_ == "id");
    if (!is_id) return scalar(std::to_string(value));
    if (value < 0 || value >= kMaxTokens) refuse("{}: id {} of {:?} is out of range", kFile, value, key_);
    if (where() == Frame::vocab) vocab.emplace_back(key_, static_cast<int32_t>(value));
    else added.back().id = static_cast<int32_t>(value);
    return true;
  }

  std::vector<Frame> stack_;
  std::string key_;
  int pair_parts_ = 0;
};

void check_size(std::string_view file, std::string_view json) {
  if (json.size() > kMaxTokenizerBytes)
    refuse("{}: {} bytes, more than the {} this engine reads", file, json.size(), kMaxTokenizerBytes);
}

void check_pipeline(const Reader& reader) {
  if (reader.model_type != "BPE")
    refuse("{}: model.type is {}, expected BPE", kFile, reader.model_type.value_or("absent"));
  if (!reader.saw_vocab || !reader.saw_merges)
    refuse("{}: model.{} is missing", kFile, reader.saw_vocab ? "merges" : "vocab");
  if (reader.normalizer != "NFC")
    refuse("{}: normalizer is {}, expected NFC", kFile, reader.normalizer.value_or("absent"));
  if (reader.pattern != kSplitPattern)
    refuse("{}: the split pattern is not that of Qwen3.5 and 3.6: {}", kFile,
           reader.pattern.value_or("absent"));
}

// Added tokens by id; the config's entries come over those of tokenizer.json.
std::map<int32_t, AddedToken> read_config(std::string_view json) {
  std::map<int32_t, AddedToken> added;
  if (json.empty()) return added;
  const auto config = nlohmann::json::parse(json.begin(), json.end(), nullptr, false);
  if (!config.is_object()) refuse("{}: not a JSON object", kConfigFile);
  const auto decoder = config.find("added_tokens_decoder");
  if (decoder == config.end()) return added;
  if (!decoder->is_object() || decoder->size() > kMaxAddedTokens)
    refuse("{}: added_tokens_decoder is not an object of at most {} tokens", kConfigFile, kMaxAddedTokens);
  for (const auto& [key, value] : decoder->items()) {
    const bool digits =
        !key.empty() && key.size() <= 7 && key.find_first_not_of("0123456789") == std::string::npos;
    const int32_t id = digits ? std::stoi(key) : kMaxTokens;
    if (id >= kMaxTokens || !value.is_object() || !value.contains("content") || !value["content"].is_string())
      refuse("{}: added_tokens_decoder.{} is not an added token", kConfigFile, key);
    for (const char* flag : {"lstrip", "rstrip", "single_word"})
      if (value.contains(flag) && value[flag] == true)
        refuse("{}: added_tokens_decoder.{} has {} set, which this engine does not support", kConfigFile, key,
               flag);
    added[id] = {id, value["content"].get<std::string>(),
                 value.contains("special") && value["special"] == true};
  }
  return added;
}

std::vector<AddedToken> merged_added(const Reader& reader, std::string_view config_json) {
  auto added = read_config(config_json);
  for (const AddedToken& token : reader.added) {
    const auto [at, is_new] = added.emplace(token.id, token);
    if (!is_new && at->second.text != token.text)
      refuse("{} and {} disagree on token {}: {:?} and {:?}", kFile, kConfigFile, token.id, token.text,
             at->second.text);
  }
  std::vector<AddedToken> out;
  std::map<std::string_view, int32_t> ids;
  for (const auto& [id, token] : added) {
    if (token.text.empty() || token.text.size() > kMaxAddedBytes)
      refuse("{}: added token {} has {} bytes", kConfigFile, id, token.text.size());
    const auto [at, is_new] = ids.emplace(token.text, id);
    if (!is_new) refuse("{}: added token {} has the ids {} and {}", kConfigFile, token.text, at->second, id);
    out.push_back(token);
  }
  return out;
}

}  // namespace

TokenizerData parse_tokenizer(std::string_view tokenizer_json, std::string_view config_json) {
  check_size(kFile, tokenizer_json);
  check_size(kConfigFile, config_json);
  Reader reader;
  nlohmann::json::sax_parse(tokenizer_json.begin(), tokenizer_json.end(), &reader);
  check_pipeline(reader);

  TokenizerData data;
  data.added = merged_added(reader, config_json);
  int32_t n_tokens = 0;
  for (const auto& [spelled, id] : reader.vocab) n_tokens = std::max(n_tokens, id + 1);
  for (const AddedToken& token : data.added) n_tokens = std::max(n_tokens, token.id + 1);
  data.token_bytes.resize(static_cast<size_t>(n_tokens));

  const ByteAlphabet alphabet;
  std::unordered_map<std::string_view, int32_t> id_of;
  id_of.reserve(reader.vocab.size());
  for (const auto& [spelled, id] : reader.vocab) {
    if (!id_of.emplace(spelled, id).second) refuse("{}: vocab: {:?} appears twice", kFile, spelled);
    std::string& bytes = data.token_bytes[static_cast<size_t>(id)];
    if (!bytes.empty()) refuse("{}: vocab: id {} appears twice", kFile, id);
    bytes = alphabet.bytes(spelled).value_or(spelled);
    if (bytes.empty()) refuse("{}: vocab: id {} has an empty text", kFile, id);
  }
  for (const AddedToken& token : data.added) data.token_bytes[static_cast<size_t>(token.id)] = token.text;

  data.byte_tokens.fill(-1);
  for (const auto& [spelled, id] : reader.vocab)
    if (const auto bytes = spelled.size() <= 2 ? alphabet.bytes(spelled) : std::nullopt;
        bytes && bytes->size() == 1)
      data.byte_tokens[static_cast<uint8_t>((*bytes)[0])] = id;
  for (int byte = 0; byte < 256; ++byte)
    if (data.byte_tokens[byte] < 0) refuse("{}: vocab has no token for byte {:#04x}", kFile, byte);

  data.merges.reserve(reader.merges.size());
  const auto id_for = [&](std::string_view spelled, size_t rank) {
    const auto at = id_of.find(spelled);
    if (at == id_of.end()) refuse("{}: merges[{}]: {:?} is not in vocab", kFile, rank, spelled);
    return at->second;
  };
  for (size_t rank = 0; rank < reader.merges.size(); ++rank) {
    const auto& [left, right] = reader.merges[rank];
    data.merges.push_back({id_for(left, rank), id_for(right, rank), id_for(left + right, rank)});
  }
  return data;
}

}  // namespace lily::text
