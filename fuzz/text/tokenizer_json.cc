// A damaged or hostile tokenizer.json is refused with Error(Fault::model); one that loads encodes without
// loss. The input is tokenizer.json, optionally followed by a zero byte and tokenizer_config.json.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lily::text;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t cut = input.find('\0');
  const std::string_view json = input.substr(0, cut);
  const std::string_view config = cut == std::string_view::npos ? std::string_view() : input.substr(cut + 1);
  try {
    const Tokenizer tokenizer(parse_tokenizer(json, config));
    for (const std::string_view text :
         {std::string_view("abc ab\nabc  e\u0301<x> <think>\xff"), json.substr(0, 200)})
      for (const AddedTokens active : {AddedTokens::all, AddedTokens::none}) {
        const auto ids = tokenizer.encode(text, active);
        for (const int32_t id : ids) LILY_CHECK(id >= 0 && id < tokenizer.n_tokens(), "{}", id);
        tokenizer.decode(ids);
      }
  } catch (const lily::Error& error) {
    LILY_CHECK(error.fault() == lily::Fault::model, "{}", error.what());
  }
  return 0;
}
