// The tokenizer of lily-tiny, loaded once a program.
#pragma once

#include "text/tokenizer.h"

namespace lily::text {

inline const Tokenizer& tiny() {
  static const Tokenizer tokenizer = Tokenizer::load("models/lily-tiny");
  return tokenizer;
}

}  // namespace lily::text
