#include "backend/step_checks.h"

#include <cstdint>

#include "base/error.h"

namespace lily::backend {
namespace {

void check_slots(const Segment& segment, const MemorySpec& memory) {
  const auto src = static_cast<int32_t>(segment.src), dst = static_cast<int32_t>(segment.dst);
  LILY_CHECK(src >= -1 && src < memory.n_state_slots && dst >= 0 && dst < memory.n_state_slots,
             "state slots {} and {} of {}", src, dst, memory.n_state_slots);
  for (const TokenSlot slot : {segment.token_in, segment.token_out}) {
    const auto i = static_cast<int32_t>(slot);
    LILY_CHECK(i >= -1 && i < memory.n_token_slots, "token slot {} of {}", i, memory.n_token_slots);
  }
}

void check_blocks(const Segment& segment, std::span<const int32_t> table, int64_t n_keys, int n_kv_blocks) {
  const int64_t n_blocks = (n_keys + kKvBlockTokens - 1) / kKvBlockTokens;
  LILY_CHECK(segment.first_block >= 0 && segment.first_block + n_blocks <= std::ssize(table),
             "a segment needs blocks {} + {} of a table of {}", segment.first_block, n_blocks, table.size());
  for (const int32_t block :
       table.subspan(static_cast<size_t>(segment.first_block), static_cast<size_t>(n_blocks)))
    LILY_CHECK(block >= 0 && block < n_kv_blocks, "KV block {} of {}", block, n_kv_blocks);
}

}  // namespace

void check_step(const StepInputs& inputs, const plan::Plan& plan, const MemorySpec& memory) {
  const plan::Shape& shape = plan.shape;
  const int64_t n_rows = std::ssize(inputs.tokens), n_outputs = std::ssize(inputs.output_rows);
  LILY_CHECK(n_rows > 0 && n_rows <= shape.rows, "{} rows, planned for {}", n_rows, shape.rows);
  LILY_CHECK(n_outputs <= shape.outputs, "{} outputs, planned for {}", n_outputs, shape.outputs);
  LILY_CHECK(inputs.n_tokens > 0 && inputs.n_tokens <= plan.dims.vocab, "n_tokens {} of {}", inputs.n_tokens,
             plan.dims.vocab);
  LILY_CHECK(shape.ending != plan::Ending::sampled || inputs.sampling.size() == inputs.output_rows.size(),
             "{} samplings for {} outputs", inputs.sampling.size(), n_outputs);
  int64_t row = 0;
  for (const Segment& segment : inputs.segments) {
    LILY_CHECK(segment.first_row == row && segment.n_rows > 0 && row + segment.n_rows <= n_rows,
               "a segment has rows {} + {}, expected from {}, of {}", segment.first_row, segment.n_rows, row,
               n_rows);
    const int64_t n_keys = int64_t{segment.position} + segment.n_rows;
    LILY_CHECK(segment.position >= 0 && n_keys <= shape.context, "{} tokens, planned for {}", n_keys,
               shape.context);
    check_slots(segment, memory);
    check_blocks(segment, inputs.block_table, n_keys, memory.n_kv_blocks);
    for (const int64_t end = row + segment.n_rows; row < end; ++row) {
      const int32_t token = inputs.tokens[static_cast<size_t>(row)];
      LILY_CHECK(token < plan.dims.vocab &&
                     (token >= 0 || (token == kTokenFromSlot && segment.token_in != kNoToken)),
                 "token {} in row {}", token, row);
    }
  }
  LILY_CHECK(row == n_rows, "segments cover {} of {} rows", row, n_rows);
  for (const int32_t out : inputs.output_rows)
    LILY_CHECK(out >= 0 && out < n_rows, "output row {} of {}", out, n_rows);
}

}  // namespace lily::backend
