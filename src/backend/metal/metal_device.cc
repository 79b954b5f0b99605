#include "backend/metal/metal_device.h"

#include "backend/metal/kernels/params.h"
#include "backend/metal/lower.h"
#include "backend/metal/program.h"
#include "backend/metal/tensor_check.h"
#include "base/error.h"
#include "base/log.h"

namespace lily::metal {

using backend::StateSlot;

MetalDevice::MetalDevice(std::unique_ptr<metal::Device> gpu, std::string backend,
                         const KernelLibrary& kernels, const KernelLibrary& tensor_kernels,
                         bool use_tensor_ops, int64_t timeout_ms)
    : gpu_(std::move(gpu)),
      timeout_ms_(timeout_ms),
      info_{.backend = std::move(backend),
            .name = gpu_->name(),
            .memory_bytes = static_cast<int64_t>(gpu_->limits().recommended_working_set)},
      library_(gpu_->make_library(kernels)) {
  if (!use_tensor_ops || !gpu_->limits().tensor_ops) return;
  try {
    auto library = gpu_->make_library(tensor_kernels);
    const std::optional<std::string> fault = tensor_fault(*gpu_, *library_, *library, timeout_ms_);
    if (!fault) tensor_library_ = std::move(library);
    else log(LogLevel::warning, "Metal: tensor operations are not used: {}", *fault);
  } catch (const Error& error) {
    log(LogLevel::warning, "Metal: tensor operations are not used: {}", error.what());
  }
}

MetalDevice::~MetalDevice() = default;

plan::Policy MetalDevice::policy(const model::Dims&) const {
  plan::Policy policy = default_policy();
  if (tensor_library_ != nullptr) policy.matrix_unit = plan::MatrixUnit::tensor;
  return policy;
}

void MetalDevice::load(const model::Checkpoint& checkpoint, const backend::Progress& progress) {
  LILY_CHECK(!weights_.has_value(), "a device loads once");
  dims_ = checkpoint.dims();
  weights_.emplace(*gpu_, checkpoint, progress);
  gpu_->make_resident();
}

void MetalDevice::reserve(const backend::MemorySpec& spec, const plan::Policy& policy) {
  LILY_CHECK(weights_.has_value(), "reserve before load");
  LILY_CHECK(n_in_flight_ == 0, "{} steps are in flight", n_in_flight_);
  check_kv_type(policy);
  wait_for_copy();
  const size_t limit = gpu_->limits().recommended_working_set;
  const MemoryLayout layout(dims_, policy.kv);
  const size_t needed = layout.total_bytes(spec) + static_cast<size_t>(weights_->n_bytes());
  const auto gb = [](size_t bytes) { return static_cast<double>(bytes) * 1e-9; };
  if (limit != 0 && needed > limit)
    fail(Fault::device,
         "weights, {} states and {} KV blocks take {:.1f} GB and this GPU should hold at most {:.1f} GB; ask "
         "for a shorter context or fewer sequences",
         spec.n_state_slots, spec.n_kv_blocks, gb(needed), gb(limit));
  if (const size_t largest = layout.largest_buffer(spec), most = gpu_->limits().max_buffer_length;
      largest > most)
    fail(
        Fault::device,
        "{} states and {} KV blocks need a buffer of {:.1f} GB and those of this GPU have at most {:.1f} GB; "
        "ask for a shorter context or fewer sequences",
        spec.n_state_slots, spec.n_kv_blocks, gb(largest), gb(most));
  memory_.reset();
  memory_.emplace(*gpu_, dims_, spec, policy.kv);
  gpu_->make_resident();
}

backend::SharedPlaces MetalDevice::shared_places(const model::Dims& dims, const plan::Policy& policy) const {
  return {.blocks_per_state = MemoryLayout(dims, policy.kv).blocks_per_state(),
          .most_bytes = static_cast<int64_t>(gpu_->limits().max_buffer_length)};
}

const Memory& MetalDevice::memory() const {
  LILY_CHECK(memory_.has_value(), "no memory is reserved");
  return *memory_;
}

std::unique_ptr<backend::Program> MetalDevice::compile(plan::Plan plan) {
  LILY_CHECK(weights_.has_value(), "compile before load");
  if (plan.policy.matrix_unit == plan::MatrixUnit::tensor && tensor_library_ == nullptr)
    fail(Fault::user, "policy.matrix_unit: {} computes on simdgroup matrices, not on tensor operations",
         info_.name);
  return std::make_unique<MetalProgram>(*this, std::move(plan));
}

const Pipeline& MetalDevice::pipeline(const std::string& kernel) {
  auto& slot = pipelines_[kernel];
  if (slot == nullptr) slot = (is_tensor_kernel(kernel) ? tensor_library_ : library_)->make_pipeline(kernel);
  return *slot;
}

void MetalDevice::need_scratch(size_t bytes) {
  if (n_in_flight_ == 0) outgrown_.clear();
  if (scratch_ != nullptr && scratch_->length() >= bytes) return;
  if (scratch_ != nullptr && n_in_flight_ > 0) outgrown_.push_back(std::move(scratch_));
  scratch_.reset();
  scratch_ = gpu_->make_buffer(bytes, BufferUse::mutable_data, "scratch");
}

// On the GPU's queue, behind the steps that write src and in front of those that read dst.
void MetalDevice::copy_state(StateSlot src, StateSlot dst) {
  const Memory& m = memory();
  const auto check = [&](StateSlot slot) {
    LILY_CHECK(static_cast<int>(slot) >= 0 && static_cast<int>(slot) < m.spec().n_state_slots,
               "state slot {}", static_cast<int>(slot));
  };
  check(dst);
  if (src != backend::kNoState) check(src);
  wait_for_copy();
  copy_ = gpu_->make_command_buffer("copy state");
  Encoder& encoder = copy_->make_encoder();
  encoder.set_pipeline(pipeline("copy_slot"));
  const MemoryPart states = m.states();
  const auto n = static_cast<uint32_t>(states.length / kernels::kWordBytes);
  encoder.set_buffer(0, *states.buffer);
  encoder.set_value(kParamsIndex,
                    kernels::CopyParams{.n = n,
                                        .stride = static_cast<uint32_t>(states.stride / kernels::kWordBytes),
                                        .from = static_cast<int32_t>(src),
                                        .to = static_cast<uint32_t>(dst)});
  std::vector<Access> accesses = {
      {states.buffer, states.at(static_cast<int>(dst)), states.length, Access::Kind::write}};
  if (src != backend::kNoState)
    accesses.push_back({states.buffer, states.at(static_cast<int>(src)), states.length, Access::Kind::read});
  encoder.dispatch_threadgroups({(n + 255) / 256, 1, 1}, {256, 1, 1}, accesses);
  encoder.end();
  copy_->commit();
}

void MetalDevice::wait_for_copy() {
  if (copy_ == nullptr) return;
  const std::unique_ptr<CommandBuffer> copy = std::move(copy_);
  copy->wait_until_completed(timeout_ms_);
}

std::vector<float> MetalDevice::read_delta_state(StateSlot slot, int layer) {
  wait_for_copy();
  return memory().read_delta(static_cast<int>(slot), layer);
}
void MetalDevice::write_delta_state(StateSlot slot, int layer, std::span<const float> data) {
  wait_for_copy();
  memory_->write_delta(static_cast<int>(slot), layer, data);
}
std::vector<float> MetalDevice::read_conv_state(StateSlot slot, int layer) {
  wait_for_copy();
  return memory().read_conv(static_cast<int>(slot), layer);
}
void MetalDevice::write_conv_state(StateSlot slot, int layer, std::span<const float> data) {
  wait_for_copy();
  memory_->write_conv(static_cast<int>(slot), layer, data);
}
std::vector<float> MetalDevice::read_kv(Kv which, int layer, int block, int n_tokens) {
  return memory().read_kv(which == Kv::k, layer, block, n_tokens);
}
void MetalDevice::write_kv(Kv which, int layer, int block, int n_tokens, std::span<const float> data) {
  memory_->write_kv(which == Kv::k, layer, block, n_tokens, data);
}

}  // namespace lily::metal
