// What the processor can do at most, measured as it stands: what the cpu backend's figures are held against.
#pragma once

#include <string_view>

namespace lily::backend {

struct ProcessorRates {
  // All threads together read memory that no cache holds, in huge pages where they are granted.
  double read_gb_s = 0;
  // Multiplications and additions of 4-bit weights with 16-bit activations, which are two 8-bit products
  // each, by the fastest instruction that the backend uses, on operands that lie in registers.
  double matrix_tflops = 0;
};

// The best of some passes each; takes about half a second, and 1 GiB of memory while it lasts. `backend` is
// cpu or cpu-avx2. No step may be in flight.
ProcessorRates measure_processor(std::string_view backend, int n_threads);

}  // namespace lily::backend
