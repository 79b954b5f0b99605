#include "backend/metal/step.h"

#include <algorithm>

#include "backend/metal/kernels/params.h"
#include "base/error.h"

namespace lily::metal {

using kernels::QueryTile;
using kernels::StepHeader;
using kernels::StepRow;
using kernels::StepSampling;
using kernels::StepSegment;
using Part = Place::Part;

namespace {

uint32_t words(size_t bytes) { return static_cast<uint32_t>(bytes / kernels::kWordBytes); }

}  // namespace

StepLayout::StepLayout(const plan::Plan& plan) {
  const auto rows = static_cast<size_t>(plan.shape.rows);
  const auto outputs = static_cast<size_t>(std::max(1, plan.shape.outputs));
  const auto blocks_a_sequence =
      static_cast<size_t>((plan.shape.context + backend::kKvBlockTokens - 1) / backend::kKvBlockTokens);
  const auto place = [&](Part part, size_t length) {
    constexpr size_t kAlignment = 256;
    ranges_[static_cast<size_t>(part)] = {bytes_, length};
    bytes_ += (length + kAlignment - 1) / kAlignment * kAlignment;
  };
  place(Part::header, sizeof(StepHeader));
  place(Part::rows, rows * sizeof(StepRow));
  place(Part::segments, rows * sizeof(StepSegment));
  place(Part::blocks, rows * blocks_a_sequence * sizeof(uint32_t));
  place(Part::tiles, rows * sizeof(QueryTile));
  place(Part::output_rows, outputs * sizeof(uint32_t));
  place(Part::sampling, outputs * sizeof(StepSampling));
}

uint32_t StepSize::count(Extent::Count count) const {
  switch (count) {
    case Extent::Count::rows:
      return n_rows;
    case Extent::Count::assignments:
      return n_rows * kernels::kTopK;
    case Extent::Count::outputs:
      return n_outputs;
    case Extent::Count::segments:
      return n_segments;
    case Extent::Count::query_tiles:
      return n_query_tiles;
    case Extent::Count::fixed:
      break;
  }
  LILY_CHECK(false, "count {}", static_cast<int>(count));
  return 0;
}

Size3 grid_of(const Dispatch& dispatch, const StepSize& size) {
  const auto length = [&](const Extent& e) {
    return e.count == Extent::Count::fixed ? e.n : (size.count(e.count) + e.per - 1) / e.per;
  };
  return {length(dispatch.grid[0]), length(dispatch.grid[1]), length(dispatch.grid[2])};
}

StepWriter::StepWriter(const plan::Plan& plan, const StepLayout& layout)
    : plan_(plan), layout_(layout), bytes_(layout.bytes()) {}

StepSize StepWriter::write(const backend::StepInputs& in, const Memory& memory, Buffer& to) {
  StepSize size{.n_rows = static_cast<uint32_t>(in.tokens.size()),
                .n_outputs = static_cast<uint32_t>(in.output_rows.size()),
                .n_segments = static_cast<uint32_t>(in.segments.size()),
                .n_tokens = static_cast<uint32_t>(in.n_tokens)};
  LILY_CHECK(in.block_table.size() * sizeof(uint32_t) <= layout_.length(Part::blocks), "{} blocks",
             in.block_table.size());

  auto* rows = at<StepRow>(Part::rows);
  auto* segments = at<StepSegment>(Part::segments);
  auto* tiles = at<QueryTile>(Part::tiles);
  uint32_t row = 0;
  for (size_t i = 0; i < in.segments.size(); ++i) {
    const backend::Segment& s = in.segments[i];
    segments[i] = {.first_row = row,
                   .n_rows = static_cast<uint32_t>(s.n_rows),
                   .position = static_cast<uint32_t>(s.position),
                   .src = static_cast<int32_t>(s.src),
                   .dst = static_cast<uint32_t>(s.dst),
                   .first_block = static_cast<uint32_t>(s.first_block),
                   .token_in = static_cast<int32_t>(s.token_in),
                   .token_out = static_cast<int32_t>(s.token_out)};
    for (uint32_t r = 0; r < segments[i].n_rows; r += kernels::kQueryTile)
      tiles[size.n_query_tiles++] = {row + r, std::min(kernels::kQueryTile, segments[i].n_rows - r)};
    for (int32_t r = 0; r < s.n_rows; ++r, ++row) {
      rows[row] = {.token = in.tokens[row],
                   .segment = static_cast<uint32_t>(i),
                   .position = static_cast<uint32_t>(s.position + r)};
    }
  }
  std::copy(in.block_table.begin(), in.block_table.end(), at<int32_t>(Part::blocks));
  std::copy(in.output_rows.begin(), in.output_rows.end(), at<int32_t>(Part::output_rows));
  auto* sampling = at<StepSampling>(Part::sampling);
  for (size_t o = 0; o < in.sampling.size(); ++o) {
    const backend::Sampling& s = in.sampling[o];
    sampling[o] = {.temperature = s.temperature,
                   .top_p = s.top_p,
                   .min_p = s.min_p,
                   .top_k = s.top_k,
                   .seed_low = static_cast<uint32_t>(s.seed),
                   .seed_high = static_cast<uint32_t>(s.seed >> 32),
                   .sequence = s.sequence,
                   .step = s.step};
    if (s.temperature > 0 && (s.top_k <= 0 || s.top_k > static_cast<int32_t>(kernels::kSampleRanked)))
      size.whole_vocabulary = true;
  }
  *at<StepHeader>(Part::header) = {.n_rows = size.n_rows,
                                   .n_outputs = size.n_outputs,
                                   .n_segments = size.n_segments,
                                   .n_tokens = static_cast<uint32_t>(in.n_tokens),
                                   .n_query_tiles = size.n_query_tiles,
                                   .slot_words = words(memory.slot_stride()),
                                   .block_words = words(memory.block_stride())};
  to.write(0, bytes_);
  return size;
}

}  // namespace lily::metal
