#include "text/output_lexer.h"

#include <array>
#include <utility>

#include "base/ascii.h"
#include "base/error.h"

namespace lily::text {
namespace {

using Kind = Lexeme::Kind;

constexpr size_t kMaxNameBytes = 256;  // a longer name is not one, so that nothing is held back for long
constexpr std::string_view kFunction = "<function=", kParameter = "<parameter=";
constexpr std::string_view kFunctionEnd = "</function>", kParameterEnd = "</parameter>";

}  // namespace

std::string_view spelling(ControlTag tag) {
  switch (tag) {
    case ControlTag::think_open:
      return "<think>";
    case ControlTag::think_close:
      return "</think>";
    case ControlTag::call_open:
      return "<tool_call>";
    case ControlTag::call_close:
      return "</tool_call>";
  }
  LILY_CHECK(false, "tag {}", static_cast<int>(tag));
  return {};
}

bool OutputLexer::may_begin_tag() const {
  return mode_ == Mode::call || (mode_ == Mode::prose && at_line_start_);
}

void OutputLexer::release_partial() {
  emitted_ = std::move(partial_);
  partial_.clear();
  lexeme_ = {.kind = Kind::text, .raw = emitted_};
}

// The tag so far and one more character. A tag's "<" is its only one, so what turns out to be text need not
// be read again.
OutputLexer::Step OutputLexer::extend_tag(char c) {
  const bool prose = mode_ != Mode::call;
  const auto emit = [&](Kind kind, std::string_view name_prefix) {
    emitted_ = std::move(partial_);
    partial_.clear();
    lexeme_ = {.kind = kind, .raw = emitted_, .at_line_start = partial_line_start_};
    if (!name_prefix.empty()) {
      lexeme_.name = lexeme_.raw.substr(name_prefix.size());
      lexeme_.name.remove_suffix(1);
    }
    return Step{1, true};
  };
  for (const auto& [prefix, kind] :
       {std::pair{kFunction, Kind::open_function}, {kParameter, Kind::open_parameter}}) {
    if (!partial_.starts_with(prefix)) continue;
    const size_t name_bytes = partial_.size() - prefix.size();
    if (c == '>' && name_bytes > 0) {
      partial_ += c;
      return emit(kind, prefix);
    }
    if (c == '>' || c == '<' || c == '\n' || name_bytes >= kMaxNameBytes) {
      release_partial();
      return {0, true};
    }
    partial_ += c;
    return {1, false};
  }
  const std::array<std::string_view, 4> tags = {kFunction, kFunctionEnd, kParameter, kParameterEnd};
  partial_ += c;
  for (size_t i = 0; i < (prose ? 1 : tags.size()); ++i) {
    if (!tags[i].starts_with(partial_)) continue;
    if (partial_ == kFunctionEnd) return emit(Kind::close_function, {});
    if (partial_ == kParameterEnd) return emit(Kind::close_parameter, {});
    return {1, false};
  }
  partial_.pop_back();
  release_partial();
  return {0, true};
}

// The longest run of one kind at the start of `text`, up to where a tag may begin.
OutputLexer::Step OutputLexer::run(std::string_view text) {
  const bool space = mode_ == Mode::call && is_ascii_space(text[0]);
  size_t n = 0;
  while (n < text.size()) {
    if (text[n] == '<' && may_begin_tag()) break;
    if (mode_ == Mode::call && is_ascii_space(text[n]) != space) break;
    at_line_start_ = text[n] == '\n';
    ++n;
    if (mode_ == Mode::single) break;
  }
  lexeme_ = {.kind = space ? Kind::space : Kind::text, .raw = text.substr(0, n)};
  return {n, true};
}

OutputLexer::Step OutputLexer::next(std::string_view text) {
  if (!partial_.empty()) return extend_tag(text[0]);
  if (text[0] != '<' || !may_begin_tag()) return run(text);
  partial_line_start_ = std::exchange(at_line_start_, false);
  partial_.assign(1, '<');
  return {1, false};
}

}  // namespace lily::text
