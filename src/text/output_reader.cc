#include "text/output_reader.h"

#include <algorithm>
#include <utility>

namespace lily::text {

OutputReader::OutputReader(const Tokenizer& tokenizer, const ToolSet& tools, OutputOptions options)
    : detokenizer_(tokenizer), parser_(tools, std::move(options)) {
  for (size_t i = 0; i < tag_ids_.size(); ++i)
    tag_ids_[i] = tokenizer.id_of(spelling(static_cast<ControlTag>(i))).value_or(-1);
}

void OutputReader::push(int32_t id, std::vector<OutputEvent>& out) {
  const auto at = id < 0 ? tag_ids_.end() : std::find(tag_ids_.begin(), tag_ids_.end(), id);
  if (at == tag_ids_.end()) {
    parser_.push_text(detokenizer_.push(id), out);
  } else {
    parser_.push_text(detokenizer_.finish(), out);
    parser_.push_tag(static_cast<ControlTag>(at - tag_ids_.begin()), out);
  }
  n_reasoning_tokens_ += parser_.in_thinking();
}

void OutputReader::finish(OutputEnd end, std::vector<OutputEvent>& out) {
  parser_.push_text(detokenizer_.finish(), out);
  parser_.finish(end, out);
}

}  // namespace lily::text
