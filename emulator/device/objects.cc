#include "emulator/device/objects.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/error.h"

namespace lily::emulator {

namespace {

const EmulatedBuffer& emulated(const metal::Buffer& buffer) {
  const auto* own = dynamic_cast<const EmulatedBuffer*>(&buffer);
  LILY_CHECK(own != nullptr, "{} belongs to another device", buffer.label());
  return *own;
}

}  // namespace

// ---- Buffer

EmulatedBuffer::EmulatedBuffer(size_t length, metal::BufferUse use, std::string label, bool traced,
                               HostOrder& host_order)
    : memory_(length, std::move(label)),
      immutable_(use == metal::BufferUse::weights),
      shadow_(traced ? std::make_unique<BufferShadow>(length) : nullptr),
      host_order_(host_order) {}

EmulatedBuffer::~EmulatedBuffer() { host_order_.check(*this, 0, length(), HostOrder::CpuAccess::destroy); }

void EmulatedBuffer::read(size_t offset, std::span<std::byte> destination) const {
  LILY_CHECK(offset <= length() && destination.size() <= length() - offset, "{}: [{}, +{}) of {}", label(),
             offset, destination.size(), length());
  host_order_.check(*this, offset, offset + destination.size(), HostOrder::CpuAccess::read);
  std::memcpy(destination.data(), data() + offset, destination.size());
}

void EmulatedBuffer::write(size_t offset, std::span<const std::byte> source) {
  LILY_CHECK(offset <= length() && source.size() <= length() - offset, "{}: [{}, +{}) of {}", label(), offset,
             source.size(), length());
  host_order_.check(*this, offset, offset + source.size(), HostOrder::CpuAccess::write);
  std::memcpy(data() + offset, source.data(), source.size());
}

std::span<std::byte> EmulatedBuffer::contents() {
  host_order_.check(*this, 0, length(), HostOrder::CpuAccess::write);
  return {reinterpret_cast<std::byte*>(data()), length()};
}

// ---- Pipeline

EmulatedPipeline::EmulatedPipeline(const CompiledFile& file, const CompiledKernel& kernel, bool traced,
                                   uint32_t max_threads, std::span<const metal::FunctionConstant> constants)
    : file_(file),
      kernel_(kernel),
      name_(kernel.host_name),
      traced_(traced),
      max_threads_(max_threads),
      constants_(constants.begin(), constants.end()) {
  static constexpr char kTypes[] = {'b', 'i', 'u', 'f'};  // as the variant's
  for (const metal::FunctionConstant& c : constants_) {
    const auto* end = file.constants + file.n_constants;
    const auto* slot = std::find_if(file.constants, end, [&](const auto& s) { return s.index == c.index; });
    if (slot == end) fail(Fault::device, "{}: {} has no function constant {}", name_, file.name, c.index);
    if (slot->type != kTypes[c.value.index()])
      fail(Fault::device, "{}: function constant {} ({}) is given a value of another type", name_, c.index,
           slot->name);
  }
}

std::unique_lock<std::mutex> EmulatedPipeline::set_constants() const {
  static std::mutex mutex;
  if (file_.n_constants == 0) return {};
  std::unique_lock lock(mutex);
  for (unsigned i = 0; i < file_.n_constants; ++i) {
    const FunctionConstantSlot& slot = file_.constants[i];
    *slot.defined = false;
    std::memset(slot.value, 0, slot.size);
    for (const metal::FunctionConstant& c : constants_) {
      if (c.index != slot.index) continue;
      *slot.defined = true;
      std::visit([&](auto value) { std::memcpy(slot.value, &value, sizeof value); }, c.value);
    }
  }
  return lock;
}

std::vector<std::pair<ByteRange, const char*>> EmulatedPipeline::undefined_constants() const {
  std::vector<std::pair<ByteRange, const char*>> undefined;
  for (unsigned i = 0; i < file_.n_constants; ++i) {
    const FunctionConstantSlot& slot = file_.constants[i];
    const bool has_value =
        std::any_of(constants_.begin(), constants_.end(),
                    [&](const metal::FunctionConstant& c) { return c.index == slot.index; });
    const auto* begin = static_cast<const char*>(slot.value);
    if (!has_value) undefined.push_back({{begin, begin + slot.size}, slot.name});
  }
  return undefined;
}

// ---- Event

void EmulatedEvent::learn(uint64_t value) const {
  const auto after = signalled_by_.upper_bound(value);
  if (after != signalled_by_.begin()) host_order_.learnt_of(std::prev(after)->second);
}

uint64_t EmulatedEvent::value() const {
  const std::lock_guard lock(mutex_);
  learn(value_);
  return value_;
}

bool EmulatedEvent::wait(uint64_t value, int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return value_ >= value; }))
    return false;
  // Only what was waited for: that more has happened by now is luck.
  const auto by = signalled_by_.lower_bound(value);
  if (by != signalled_by_.end()) host_order_.learnt_of(by->second);
  return true;
}

void EmulatedEvent::signal(uint64_t value, uint64_t command_buffer) {
  {
    const std::lock_guard lock(mutex_);
    value_ = std::max(value_, value);
    signalled_by_.emplace(value, command_buffer);
  }
  changed_.notify_all();
}

// ---- Encoder

void EmulatedEncoder::set_pipeline(const metal::Pipeline& pipeline) {
  LILY_CHECK(!ended_, "encoder used after end()");
  const auto* own = dynamic_cast<const EmulatedPipeline*>(&pipeline);
  LILY_CHECK(own != nullptr, "{} belongs to another device", pipeline.name());
  state_.pipeline = own;
}

void EmulatedEncoder::set_buffer(int index, const metal::Buffer& buffer, size_t offset) {
  LILY_CHECK(!ended_ && index >= 0 && index < metal::kMaxBuffers, "index {}", index);
  state_.arguments[static_cast<size_t>(index)] = {&emulated(buffer), offset, {}};
}

void EmulatedEncoder::set_bytes(int index, std::span<const std::byte> bytes) {
  LILY_CHECK(!ended_ && index >= 0 && index < metal::kMaxBuffers, "index {}", index);
  if (bytes.size() > metal::kMaxBytesLength)
    findings_.add(Finding::Kind::limit, state_.pipeline != nullptr ? state_.pipeline->name() : "",
                  static_cast<uint64_t>(index),
                  fmt::format("set_bytes of {} bytes for argument {}, more than {}", bytes.size(), index,
                              metal::kMaxBytesLength));
  state_.arguments[static_cast<size_t>(index)] = {nullptr, 0, {bytes.begin(), bytes.end()}};
}

void EmulatedEncoder::set_threadgroup_memory_length(int index, size_t length) {
  LILY_CHECK(!ended_ && index >= 0 && index < metal::kMaxBuffers, "index {}", index);
  LILY_CHECK(length % 16 == 0, "threadgroup memory {}: {} bytes, not a multiple of 16", index, length);
  state_.threadgroup_lengths[static_cast<size_t>(index)] = static_cast<uint32_t>(length);
}

DispatchCommand& EmulatedEncoder::add_dispatch(metal::Size3 threads,
                                               std::span<const metal::Access> accesses) {
  LILY_CHECK(!ended_ && state_.pipeline != nullptr, "dispatch without a pipeline or after end()");
  for (const metal::Access& a : accesses) LILY_CHECK(a.buffer != nullptr, "{}", state_.pipeline->name());
  auto& command = std::get<DispatchCommand>(commands_.emplace_back(state_));
  command.threads = threads;
  command.accesses.assign(accesses.begin(), accesses.end());
  return command;
}

void EmulatedEncoder::dispatch_threadgroups(metal::Size3 groups, metal::Size3 threads,
                                            std::span<const metal::Access> accesses) {
  add_dispatch(threads, accesses).groups = groups;
}

void EmulatedEncoder::dispatch_indirect(const metal::Buffer& arguments, size_t offset, metal::Size3 threads,
                                        std::span<const metal::Access> accesses) {
  const EmulatedBuffer& buffer = emulated(arguments);
  LILY_CHECK(offset % 4 == 0 && offset + 12 <= buffer.length(), "{}: arguments at {}", buffer.label(),
             offset);
  DispatchCommand& command = add_dispatch(threads, accesses);
  command.indirect = &buffer;
  command.indirect_offset = offset;
}

void EmulatedEncoder::memory_barrier() {
  LILY_CHECK(!ended_, "encoder used after end()");
  commands_.emplace_back(BarrierCommand{});
}

void EmulatedEncoder::end() {
  LILY_CHECK(!ended_, "encoder ended twice");
  commands_.emplace_back(BarrierCommand{});
  ended_ = true;
}

// ---- Command buffer

EmulatedCommandBuffer::EmulatedCommandBuffer(std::string label, Findings& findings, HostOrder& host_order,
                                             Submit submit)
    : label_(std::move(label)), findings_(findings), host_order_(host_order), submit_(std::move(submit)) {}

EmulatedCommandBuffer::~EmulatedCommandBuffer() {
  if (!committed_) return;
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return completed_; });
  host_order_.learnt_of(sequence_);
}

metal::Encoder& EmulatedCommandBuffer::make_encoder() {
  LILY_CHECK(!committed_ && (encoder_ == nullptr || encoder_->ended()), "{}: the encoder before is open",
             label_);
  encoder_ = std::make_unique<EmulatedEncoder>(commands_, findings_);
  return *encoder_;
}

void EmulatedCommandBuffer::signal(metal::Event& event, uint64_t value) {
  LILY_CHECK(!committed_ && (encoder_ == nullptr || encoder_->ended()), "{}: signal within an encoder",
             label_);
  auto* own = dynamic_cast<EmulatedEvent*>(&event);
  LILY_CHECK(own != nullptr, "{}: event of another device", label_);
  commands_.emplace_back(SignalCommand{own, value});
}

void EmulatedCommandBuffer::commit() {
  LILY_CHECK(!committed_ && (encoder_ == nullptr || encoder_->ended()), "{}: commit with an open encoder",
             label_);
  committed_ = true;
  submit_(*this);
}

void EmulatedCommandBuffer::wait_until_completed(int64_t timeout_ms) {
  LILY_CHECK(committed_, "{}: not committed", label_);
  std::unique_lock lock(mutex_);
  if (!done_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return completed_; }))
    fail(Fault::device, "{}: the GPU did not finish within {} ms", label_, timeout_ms);
  host_order_.learnt_of(sequence_);
  if (error_) fail(Fault::device, "{}: {}", label_, *error_);
}

bool EmulatedCommandBuffer::completed() const {
  const std::lock_guard lock(mutex_);
  if (completed_) host_order_.learnt_of(sequence_);
  return completed_;
}

std::optional<std::string> EmulatedCommandBuffer::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

double EmulatedCommandBuffer::gpu_seconds() const {
  const std::lock_guard lock(mutex_);
  return gpu_seconds_;
}

void EmulatedCommandBuffer::complete(std::optional<std::string> error, double gpu_seconds) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  gpu_seconds_ = gpu_seconds;
  completed_ = true;
  done_.notify_all();  // with the mutex held: the waiter may destroy this object next
}

// What the dispatches declared; where they declared nothing, all that they bind.
std::vector<BufferUseRange> EmulatedCommandBuffer::uses() const {
  std::vector<BufferUseRange> uses;
  for (const Command& c : commands_) {
    const auto* d = std::get_if<DispatchCommand>(&c);
    if (d == nullptr) continue;
    for (const metal::Access& a : d->accesses)
      uses.push_back({&emulated(*a.buffer), a.offset, a.offset + a.length,
                      a.kind != metal::Access::Kind::read, a.stride, a.count});
    if (d->indirect != nullptr)
      uses.push_back({d->indirect, d->indirect_offset, d->indirect_offset + 12, false});
    if (!d->accesses.empty()) continue;
    const CompiledKernel& kernel = d->pipeline->kernel();
    for (unsigned i = 0; i < kernel.n_arguments; ++i) {
      const Argument& a = d->arguments[kernel.arguments[i].index];
      if (a.buffer != nullptr)
        uses.push_back({a.buffer, 0, a.buffer->length(), kernel.arguments[i].writable});
    }
  }
  return uses;
}

}  // namespace lily::emulator
