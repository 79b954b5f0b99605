// What a plan becomes: dispatches of kernels, with the memory that each argument is and how it is touched.
// Plain data, made once a program (lower.h) and encoded each step (program.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "backend/metal/device.h"
#include "model/weight.h"

namespace lily::metal {

// Memory that a dispatch touches. Offsets and lengths are bytes.
struct Place {
  enum class Kind : uint8_t {
    scratch,      // the plan's values
    result,       // values that the host reads after the step; one buffer for each of two steps in flight
    work,         // between the dispatches of one op
    weight,       // `weight`, from its start
    delta_state,  // all slots of `layer`
    conv_state,
    k_cache,  // all blocks of `layer`
    v_cache,
    token_slots,
    step,  // `part` of the step's inputs
  };
  enum class Part : uint8_t { header, rows, segments, blocks, tiles, output_rows, sampling };

  Kind kind = Kind::scratch;
  Part part = Part::header;
  int layer = model::kNoLayer;
  model::WeightId weight{};
  int64_t offset = 0;
  int64_t bytes = 0;  // 0: all of it, where the size is the device's or the step's affair

  bool operator==(const Place&) const = default;
};

struct Argument {
  int index = 0;
  Place place;
  Access::Kind access = Access::Kind::read;
};

// A grid's length in one direction: ceil(count / per).
struct Extent {
  enum class Count : uint8_t { fixed, rows, assignments, outputs, segments, query_tiles };
  Count count = Count::fixed;
  uint32_t n = 1;  // the count itself if fixed
  uint32_t per = 1;
};
inline Extent fixed(int64_t n) { return {Extent::Count::fixed, static_cast<uint32_t>(n), 1}; }
inline Extent per(Extent::Count count, uint32_t per = 1) { return {count, 0, per}; }

struct Dispatch {
  std::string kernel;  // host name
  std::vector<Argument> arguments;
  std::vector<std::byte> params;  // argument kParamsIndex, if any
  std::array<Extent, 3> grid{};
  Size3 threads{};
  bool is_indirect = false;  // the grid is read from `indirect`
  Place indirect;
  int phase = 0;                  // within the op: phases of an op are separated by barriers
  bool whole_vocabulary = false;  // encoded only if an output of the step samples beyond the ranked logits
};

// Whether a kernel is one of the library for chips with tensor operations.
inline bool is_tensor_kernel(std::string_view kernel) {
  return kernel.find("_tensor_") != std::string_view::npos;
}

inline constexpr int kParamsIndex = 20;
inline constexpr int kSamplingIndex = 24, kOutputRowsIndex = 25, kTilesIndex = 26, kBlocksIndex = 27,
                     kSegmentsIndex = 28, kRowsIndex = 29, kHeaderIndex = 30;

}  // namespace lily::metal
