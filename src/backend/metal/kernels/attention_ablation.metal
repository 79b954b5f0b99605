// Attention for few rows with one query head a threadgroup (D6 off), with strided cache reads (D5 off), and
// with both off: the same arithmetic in the same order, so the same bytes. See attention_decode.h.
#include "attention_blocks.h"
#include "attention_decode.h"

#define INSTANTIATE(heads, coalesced, bits, name)                                              \
  template [[host_name("attention_decode_" name)]] [[kernel]]                                  \
  decltype(attention_decode<heads, coalesced, bits>) attention_decode<heads, coalesced, bits>; \
  template [[host_name("attention_part_" name)]] [[kernel]]                                    \
  decltype(attention_part<heads, coalesced, bits>) attention_part<heads, coalesced, bits>;
INSTANTIATE(1, true, 16, "one_head")
INSTANTIATE(4, false, 16, "strided")
INSTANTIATE(1, false, 16, "one_head_strided")
INSTANTIATE(1, true, 8, "one_head_int8")
INSTANTIATE(4, false, 8, "strided_int8")
INSTANTIATE(1, false, 8, "one_head_strided_int8")
