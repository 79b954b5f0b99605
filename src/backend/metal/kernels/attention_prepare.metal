// Queries and keys before attention (7) (8) (10). One simdgroup a row and head; a lane has 8 of its 256
// values. fp32 inside, one rounding. Bound by bytes.
//
// head_norm_rope: y [T, heads * 256] bf16 = rotated norm of x. kv_append: k, v of each row into the cache.
// qk_prepare (D4c): both for queries and keys in one dispatch, and the append; heads n_q .. n_q + n_kv - 1 of
//   the grid are the keys.
#include "attention.h"

inline void store_head(device bfloat* y, uint lane, thread const float* values) {
  for (uint i = 0; i < kLaneDims; ++i) y[lane * kLaneDims + i] = bfloat(values[i]);
}

[[kernel]] void head_norm_rope(device const bfloat* x [[buffer(0)]], device bfloat* y [[buffer(1)]],
                               device const float* w [[buffer(2)]], constant HeadParams& p [[buffer(20)]],
                               device const StepRow* rows [[buffer(29)]],
                               constant StepHeader& step [[buffer(30)]],
                               uint2 at [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]]) {
  if (at.y >= step.n_rows) return;
  float values[8];
  norm_rotate(x + ulong(at.y) * p.x_stride + p.x_first + at.x * p.head_stride, w, p.turns,
              rows[at.y].position, lane, values);
  store_head(y + ulong(at.y) * p.y_stride + at.x * kAttentionHead, lane, values);
}

template <int kKvBits>
[[kernel]] void kv_append(device const bfloat* k [[buffer(0)]], device const bfloat* v [[buffer(1)]],
                          device uchar* k_cache [[buffer(2)]], device uchar* v_cache [[buffer(3)]],
                          constant HeadParams& p [[buffer(20)]], device const uint* blocks [[buffer(27)]],
                          device const StepSegment* segments [[buffer(28)]],
                          device const StepRow* rows [[buffer(29)]], constant StepHeader& step [[buffer(30)]],
                          uint2 at [[threadgroup_position_in_grid]],
                          uint lane [[thread_index_in_simdgroup]]) {
  if (at.y >= step.n_rows) return;
  const uint position = rows[at.y].position;
  const ulong plane =
      plane_at<kKvBits>(blocks, segments[rows[at.y].segment].first_block, position, at.x, step.block_words);
  const uint token = position % kCacheTokens;
  const uint d = at.x * kAttentionHead;
  store_cached<kKvBits>(k_cache + plane, token, lane, k + ulong(at.y) * p.k_stride + p.k_first + d);
  store_cached<kKvBits>(v_cache + plane, token, lane, v + ulong(at.y) * p.v_stride + p.v_first + d);
}

template <int kKvBits>
[[kernel]] void qk_prepare(device const bfloat* in [[buffer(0)]], device bfloat* q [[buffer(1)]],
                           device const float* q_norm [[buffer(2)]], device const float* k_norm [[buffer(3)]],
                           device uchar* k_cache [[buffer(4)]], device uchar* v_cache [[buffer(5)]],
                           constant HeadParams& p [[buffer(20)]], device const uint* blocks [[buffer(27)]],
                           device const StepSegment* segments [[buffer(28)]],
                           device const StepRow* rows [[buffer(29)]],
                           constant StepHeader& step [[buffer(30)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
  if (at.y >= step.n_rows) return;
  const uint position = rows[at.y].position;
  float values[8];
  if (at.x < p.n_q_heads) {
    norm_rotate(in + ulong(at.y) * p.x_stride + p.x_first + at.x * p.head_stride, q_norm, p.turns, position,
                lane, values);
    store_head(q + ulong(at.y) * p.y_stride + at.x * kAttentionHead, lane, values);
    return;
  }
  const uint head = at.x - p.n_q_heads;
  norm_rotate(in + ulong(at.y) * p.k_stride + p.k_first + head * kAttentionHead, k_norm, p.turns, position,
              lane, values);
  const ulong plane =
      plane_at<kKvBits>(blocks, segments[rows[at.y].segment].first_block, position, head, step.block_words);
  const uint token = position % kCacheTokens;
  store_cached<kKvBits>(k_cache + plane, token, lane, values);
  store_cached<kKvBits>(v_cache + plane, token, lane,
                        in + ulong(at.y) * p.v_stride + p.v_first + head * kAttentionHead);
}

#define INSTANTIATE(bits, name)                                                                  \
  template [[host_name("kv_append" name)]] [[kernel]] decltype(kv_append<bits>) kv_append<bits>; \
  template [[host_name("qk_prepare" name)]] [[kernel]] decltype(qk_prepare<bits>) qk_prepare<bits>;
INSTANTIATE(16, "")
INSTANTIATE(8, "_int8")
