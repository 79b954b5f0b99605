// Attention for few rows with one query head a threadgroup (D6 off), with strided cache reads (D5 off), and
// with both off: the same arithmetic in the same order, so the same bytes. See attention_decode.h.
#include "attention_blocks.h"
#include "attention_decode.h"

#define INSTANTIATE(heads, coalesced, name)                                        \
  template [[host_name("attention_decode_" name)]] [[kernel]]                      \
  decltype(attention_decode<heads, coalesced>) attention_decode<heads, coalesced>; \
  template [[host_name("attention_part_" name)]] [[kernel]]                        \
  decltype(attention_part<heads, coalesced>) attention_part<heads, coalesced>;
INSTANTIATE(1, true, "one_head")
INSTANTIATE(4, false, "strided")
INSTANTIATE(1, false, "one_head_strided")
