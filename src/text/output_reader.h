// From the tokens of one answer to events: streaming detokenizer and output parser together.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace lily::text {

class OutputReader {
 public:
  // Tokenizer and tools must outlive this.
  OutputReader(const Tokenizer& tokenizer, const ToolSet& tools, OutputOptions options);

  // Appends the events of one token. Special tokens (the stop tokens among them) have no text.
  void push(int32_t id, std::vector<OutputEvent>& out);
  void finish(OutputEnd end, std::vector<OutputEvent>& out);

  const OutputParser& parser() const { return parser_; }
  // Tokens of thinking so far, without the one that ends it.
  int n_reasoning_tokens() const { return n_reasoning_tokens_; }

 private:
  StreamingDetokenizer detokenizer_;
  OutputParser parser_;
  std::array<int32_t, 4> tag_ids_;  // by ControlTag; -1 where the tokenizer has no such token
  int n_reasoning_tokens_ = 0;
};

}  // namespace lily::text
