// What an op costs: distinct bytes of device memory and floating-point operations, for the roofline.
#pragma once

#include <cstdint>
#include <functional>

#include "plan/plan.h"

namespace lily::plan {

struct Cost {
  int64_t weight_bytes = 0;
  int64_t state_read_bytes = 0, state_write_bytes = 0;  // delta state, fp32
  int64_t conv_state_bytes = 0;                         // read and written
  int64_t kv_read_bytes = 0, kv_write_bytes = 0;
  int64_t scratch_bytes = 0;  // values read and written; on chip or in cache on most devices
  int64_t flops = 0;

  int64_t total_bytes() const {
    return weight_bytes + state_read_bytes + state_write_bytes + conv_state_bytes + kv_read_bytes +
           kv_write_bytes;
  }
  Cost& operator+=(const Cost& other);
};

// What the cost of a step depends on besides the plan.
struct Workload {
  int64_t rows = 1;  // of one sequence
  int64_t outputs = 1;
  int64_t position = 0;  // tokens in the cache before the step
  // How a weight is stored; by default as in the published checkpoint.
  std::function<model::Storage(WeightId)> storage;
};

// Experts that `rows` tokens are expected to touch under uniform routing: E (1 - (1 - k/E)^rows).
double expected_experts(int n_experts, int64_t rows);

Cost cost(const Plan& plan, const Op& op, const Workload& workload);
Cost cost(const Plan& plan, const Workload& workload);

// A device as far as the roofline needs it. Sources and dates of the figures: docs/performance.
struct DeviceRates {
  const char* name;
  double read_gb_s;      // sustained read bandwidth, or nominal where nothing was measured
  double matrix_tflops;  // 16-bit matrix products with fp32 accumulation
  bool measured;
  const char* backend;  // what drives it
};
// Throws Error(Fault::user) with the list of names.
DeviceRates device_rates(const std::string& name);

struct Roofline {
  double tok_s = 0;
  const char* bound = "";  // "memory" or "compute"
};
Roofline roofline(const Cost& cost, int64_t rows, const DeviceRates& device);

}  // namespace lily::plan
