#include "backend/cuda/step_inputs.h"

#include <algorithm>
#include <cstring>

#include "backend/step_checks.h"
#include "base/error.h"

namespace lily::cuda {
namespace {

// Host code writes through the pointers that kernels read through.
template <typename T>
T* writable(const T* p) {
  return const_cast<T*>(p);
}

}  // namespace

StepBuffer::StepBuffer(const plan::Plan& plan, const Memory& memory) : plan_(plan), memory_(memory.spec()) {
  const auto rows = static_cast<size_t>(plan.shape.rows),
             outputs = static_cast<size_t>(std::max(plan.shape.outputs, 1));
  // Every segment may reach the context bound; more than that a table cannot hold.
  const auto blocks_per_segment = static_cast<size_t>((plan.shape.context + kKvBlock - 1) / kKvBlock);
  max_blocks_ = static_cast<int>(std::min(rows, size_t{8}) * blocks_per_segment + rows);
  const auto layout = [&](std::byte* base) {
    size_t at = 0;
    const auto place = [&](auto*& p, size_t n) {
      using T = std::remove_reference_t<decltype(*p)>;
      p = reinterpret_cast<T*>(base + at);
      at += (n * sizeof(T) + 63) / 64 * 64;
    };
    StepView v{};
    place(v.counts, 1);
    place(v.tokens, rows);
    place(v.positions, rows);
    place(v.token_in, rows);
    place(v.table_first, rows);
    place(v.state_src, rows);
    place(v.state_dst, rows);
    place(v.segment_row, rows + 1);
    place(v.segment_position, rows);
    place(v.output_rows, outputs);
    place(v.token_out, outputs);
    place(v.sampling, outputs);
    place(v.block_table, static_cast<size_t>(max_blocks_));
    n_bytes_ = at;
    return v;
  };
  layout(nullptr);
  pinned_ = PinnedMemory(n_bytes_);
  device_ = DeviceMemory(n_bytes_);
  rope_ = DeviceMemory(rows * 32 * sizeof(float2));
  view_ = layout(device_.get());
  host_ = layout(pinned_.get());
  view_.token_slots = memory.token_slots();
  view_.rope = rope_.get<float2>();
}

bool StepBuffer::one_row_each() const {
  return std::all_of(segments_.begin(), segments_.end(),
                     [](const backend::Segment& s) { return s.n_rows == 1; });
}

void StepBuffer::fill(const backend::StepInputs& inputs, const Stream& stream, uint32_t serial) {
  n_rows_ = static_cast<int>(inputs.tokens.size());
  n_outputs_ = static_cast<int>(inputs.output_rows.size());
  n_tokens_ = inputs.n_tokens;
  backend::check_step(inputs, plan_, memory_);
  LILY_CHECK(std::ssize(inputs.block_table) <= max_blocks_, "a table of {} blocks, planned for {}",
             inputs.block_table.size(), max_blocks_);
  segments_.assign(inputs.segments.begin(), inputs.segments.end());
  *writable(host_.counts) = {n_rows_, n_outputs_, static_cast<int32_t>(segments_.size()), inputs.n_tokens,
                             serial};
  std::copy(inputs.tokens.begin(), inputs.tokens.end(), writable(host_.tokens));
  std::vector<int32_t> token_out(static_cast<size_t>(n_rows_), -1);
  int row = 0;
  for (size_t s = 0; s < segments_.size(); ++s) {
    const backend::Segment& seg = segments_[s];
    const int src = static_cast<int>(seg.src), dst = static_cast<int>(seg.dst);
    writable(host_.segment_row)[s] = row;
    writable(host_.segment_position)[s] = seg.position;
    for (int i = 0; i < seg.n_rows; ++i, ++row) {
      writable(host_.positions)[row] = seg.position + i;
      writable(host_.token_in)[row] = static_cast<int32_t>(seg.token_in);
      writable(host_.table_first)[row] = seg.first_block;
      writable(host_.state_src)[row] = i == 0 ? src : dst;  // rows of a segment follow one another
      writable(host_.state_dst)[row] = dst;
      token_out[static_cast<size_t>(row)] = static_cast<int32_t>(seg.token_out);
    }
  }
  writable(host_.segment_row)[segments_.size()] = row;
  std::copy(inputs.block_table.begin(), inputs.block_table.end(), writable(host_.block_table));
  for (int o = 0; o < n_outputs_; ++o) {
    const int32_t from = inputs.output_rows[static_cast<size_t>(o)];
    writable(host_.output_rows)[o] = from;
    writable(host_.token_out)[o] = token_out[static_cast<size_t>(from)];
    if (!inputs.sampling.empty()) {
      const backend::Sampling& s = inputs.sampling[static_cast<size_t>(o)];
      writable(host_.sampling)[o] = {s.temperature,
                                     s.top_p,
                                     s.min_p,
                                     s.top_k,
                                     static_cast<uint32_t>(s.seed),
                                     static_cast<uint32_t>(s.seed >> 32),
                                     s.sequence,
                                     s.step};
    }
  }
  check(cudaMemcpyAsync(device_.get(), pinned_.get(), n_bytes_, cudaMemcpyHostToDevice, stream.get()),
        "copying a step's inputs");
  stream.synchronize();
}

}  // namespace lily::cuda
