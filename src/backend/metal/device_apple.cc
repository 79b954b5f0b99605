// metal::Device on Apple's Metal, through metal-cpp: the classic command API with one queue, concurrent
// encoders and shared events.
//
// Objects that Metal hands out autoreleased live in a pool of the function that asks for them; those kept are
// in NS::SharedPtr. Command buffers do not retain what they use, as device.h says. Metal's completion handler
// runs on a thread of its own and touches nothing but its Completion.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
//
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/metal/device.h"
#include "base/error.h"

namespace lily::metal {

namespace {

// A command buffer that takes longer has hung; the system's own watchdog is faster.
constexpr int64_t kHangMs = 60'000;

class Pool {
 public:
  Pool() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~Pool() { pool_->release(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  NS::AutoreleasePool* const pool_;
};

NS::String* ns_string(std::string_view text) {
  return NS::String::string(std::string(text).c_str(), NS::UTF8StringEncoding);
}

std::string describe(const NS::Error* error) {
  if (error == nullptr || error->localizedDescription() == nullptr) return "no reason given";
  return error->localizedDescription()->utf8String();
}

MTL::Size size(Size3 s) { return MTL::Size(s.x, s.y, s.z); }

// Buffers that stay in the GPU's address space between command buffers; macOS 15 and later.
class Residency {
 public:
  Residency(MTL::Device* device, MTL::CommandQueue* queue) : queue_(queue) {
    if (__builtin_available(macOS 15, *)) {
      auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
      NS::Error* error = nullptr;
      set_ = NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
      if (!set_) fail(Fault::device, "Metal: no residency set: {}", describe(error));
    }
  }
  void add(const MTL::Buffer* buffer) {
    if (set_) set_->addAllocation(buffer);
  }
  void remove(const MTL::Buffer* buffer) {
    if (!set_) return;
    set_->removeAllocation(buffer);
    set_->commit();
  }
  void request() {
    if (!set_) return;
    set_->commit();
    set_->requestResidency();
    if (!std::exchange(in_queue_, true)) queue_->addResidencySet(set_.get());
  }

 private:
  MTL::CommandQueue* const queue_;
  NS::SharedPtr<MTL::ResidencySet> set_;
  bool in_queue_ = false;
};

class AppleBuffer final : public Buffer {
 public:
  AppleBuffer(NS::SharedPtr<MTL::Buffer> buffer, BufferUse use, std::string label, Residency& residency)
      : buffer_(std::move(buffer)),
        immutable_(use == BufferUse::weights),
        label_(std::move(label)),
        residency_(residency) {
    buffer_->setLabel(ns_string(label_));
    residency_.add(buffer_.get());
  }
  ~AppleBuffer() override { residency_.remove(buffer_.get()); }

  size_t length() const override { return buffer_->length(); }
  bool immutable() const override { return immutable_; }
  const std::string& label() const override { return label_; }

  void read(size_t offset, std::span<std::byte> destination) const override {
    check_range(offset, destination.size());
    std::memcpy(destination.data(), static_cast<const std::byte*>(buffer_->contents()) + offset,
                destination.size());
  }
  void write(size_t offset, std::span<const std::byte> source) override {
    check_range(offset, source.size());
    std::memcpy(static_cast<std::byte*>(buffer_->contents()) + offset, source.data(), source.size());
  }
  std::span<std::byte> contents() override {
    return {static_cast<std::byte*>(buffer_->contents()), length()};
  }

  const MTL::Buffer* get() const { return buffer_.get(); }

 private:
  void check_range(size_t offset, size_t n) const {
    LILY_CHECK(offset <= length() && n <= length() - offset, "{}: [{}, +{}) of {}", label_, offset, n,
               length());
  }

  const NS::SharedPtr<MTL::Buffer> buffer_;
  const bool immutable_;
  const std::string label_;
  Residency& residency_;
};

class ApplePipeline final : public Pipeline {
 public:
  ApplePipeline(std::string name, NS::SharedPtr<MTL::ComputePipelineState> state)
      : name_(std::move(name)), state_(std::move(state)) {
    if (state_->threadExecutionWidth() != kSimdWidth)
      fail(Fault::device, "{}: simdgroups of {} threads; the kernels need {}", name_,
           state_->threadExecutionWidth(), kSimdWidth);
  }
  const std::string& name() const override { return name_; }
  uint32_t max_threads_per_threadgroup() const override {
    return static_cast<uint32_t>(state_->maxTotalThreadsPerThreadgroup());
  }
  uint32_t execution_width() const override { return static_cast<uint32_t>(state_->threadExecutionWidth()); }

  const MTL::ComputePipelineState* get() const { return state_.get(); }

 private:
  const std::string name_;
  const NS::SharedPtr<MTL::ComputePipelineState> state_;
};

MTL::DataType data_type(const std::variant<bool, int32_t, uint32_t, float>& value) {
  constexpr MTL::DataType kTypes[] = {MTL::DataTypeBool, MTL::DataTypeInt, MTL::DataTypeUInt,
                                      MTL::DataTypeFloat};
  return kTypes[value.index()];
}

class AppleLibrary final : public Library {
 public:
  AppleLibrary(MTL::Device* device, const KernelLibrary& library) : device_(device), name_(library.name) {
    const Pool pool;
    auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
    set_language(*options.get(), library);
    for (const KernelFile& file : library.files) {
      NS::Error* error = nullptr;
      auto compiled = NS::TransferPtr(device->newLibrary(ns_string(file.text), options.get(), &error));
      if (!compiled)
        fail(Fault::device, "{} does not compile on this system: {}", file.name, describe(error));
      files_.push_back(std::move(compiled));
    }
  }

  std::unique_ptr<Pipeline> make_pipeline(std::string_view host_name,
                                          std::span<const FunctionConstant> constants) override {
    const Pool pool;
    auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
    for (const FunctionConstant& c : constants)
      std::visit(
          [&](const auto& v) { values->setConstantValue(&v, data_type(c.value), NS::UInteger{c.index}); },
          c.value);
    NS::String* name = ns_string(host_name);
    MTL::Library* file = file_with(name);
    if (file == nullptr) fail(Fault::device, "library {} has no kernel {}", name_, host_name);
    NS::Error* error = nullptr;
    auto function = NS::TransferPtr(file->newFunction(name, values.get(), &error));
    if (!function) fail(Fault::device, "{}: {}", host_name, describe(error));
    auto state = NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
    if (!state) fail(Fault::device, "{}: no pipeline: {}", host_name, describe(error));
    return std::make_unique<ApplePipeline>(std::string(host_name), std::move(state));
  }

 private:
  static void set_language(MTL::CompileOptions& options, const KernelLibrary& library) {
    MTL::LanguageVersion version = MTL::LanguageVersion3_1;
    if (__builtin_available(macOS 15, *)) version = MTL::LanguageVersion3_2;
    if (library.tensor_ops) {
      if (__builtin_available(macOS 26, *)) version = MTL::LanguageVersion4_0;
      else fail(Fault::device, "library {} needs Metal 4; this system is older than macOS 26", library.name);
    }
    options.setLanguageVersion(version);
    const bool fast = library.math == MathMode::fast;
    if (__builtin_available(macOS 15, *)) options.setMathMode(fast ? MTL::MathModeFast : MTL::MathModeSafe);
    else options.setFastMathEnabled(fast);
  }

  MTL::Library* file_with(const NS::String* kernel) const {
    for (const auto& file : files_) {
      const NS::Array* names = file->functionNames();
      for (NS::UInteger i = 0; i < names->count(); ++i)
        if (names->object<NS::String>(i)->isEqualToString(kernel)) return file.get();
    }
    return nullptr;
  }

  MTL::Device* const device_;
  const std::string name_;
  std::vector<NS::SharedPtr<MTL::Library>> files_;
};

class AppleEvent final : public Event {
 public:
  explicit AppleEvent(MTL::Device* device) : event_(NS::TransferPtr(device->newSharedEvent())) {
    if (!event_) fail(Fault::device, "Metal: no shared event");
  }
  uint64_t value() const override { return event_->signaledValue(); }
  bool wait(uint64_t value, int64_t timeout_ms) override {
    return event_->waitUntilSignaledValue(value, static_cast<uint64_t>(timeout_ms));
  }
  const NS::SharedPtr<MTL::SharedEvent>& get() const { return event_; }

 private:
  const NS::SharedPtr<MTL::SharedEvent> event_;
};

class AppleEncoder final : public Encoder {
 public:
  explicit AppleEncoder(MTL::CommandBuffer& command_buffer)
      : encoder_(NS::RetainPtr(command_buffer.computeCommandEncoder(MTL::DispatchTypeConcurrent))) {
    if (!encoder_) fail(Fault::device, "Metal: no compute encoder");
  }
  // Metal aborts the process if an encoder goes away without having ended.
  ~AppleEncoder() override {
    if (!ended_) encoder_->endEncoding();
  }

  void set_pipeline(const Pipeline& pipeline) override {
    pipeline_ = static_cast<const ApplePipeline*>(&pipeline);
    encoder_->setComputePipelineState(pipeline_->get());
  }
  void set_buffer(int index, const Buffer& buffer, size_t offset) override {
    encoder_->setBuffer(static_cast<const AppleBuffer&>(buffer).get(), offset, argument(index));
  }
  void set_bytes(int index, std::span<const std::byte> bytes) override {
    LILY_CHECK(bytes.size() <= kMaxBytesLength, "argument {}: {} bytes", index, bytes.size());
    encoder_->setBytes(bytes.data(), bytes.size(), argument(index));
  }
  void set_threadgroup_memory_length(int index, size_t length) override {
    LILY_CHECK(length % 16 == 0, "threadgroup memory {}: {} bytes, not a multiple of 16", index, length);
    encoder_->setThreadgroupMemoryLength(length, argument(index));
  }
  void dispatch_threadgroups(Size3 groups, Size3 threads, std::span<const Access>) override {
    check_dispatch(threads);
    encoder_->dispatchThreadgroups(size(groups), size(threads));
  }
  void dispatch_indirect(const Buffer& arguments, size_t offset, Size3 threads,
                         std::span<const Access>) override {
    check_dispatch(threads);
    encoder_->dispatchThreadgroups(static_cast<const AppleBuffer&>(arguments).get(), offset, size(threads));
  }
  void memory_barrier() override { encoder_->memoryBarrier(MTL::BarrierScopeBuffers); }
  void end() override {
    LILY_CHECK(!ended_, "encoder ended twice");
    encoder_->endEncoding();
    ended_ = true;
  }
  bool ended() const { return ended_; }

 private:
  static NS::UInteger argument(int index) {
    LILY_CHECK(index >= 0 && index < kMaxBuffers, "argument {}", index);
    return static_cast<NS::UInteger>(index);
  }
  void check_dispatch(Size3 threads) const {
    LILY_CHECK(!ended_ && pipeline_ != nullptr, "dispatch without a pipeline or after end()");
    LILY_CHECK(threads.count() <= pipeline_->max_threads_per_threadgroup(),
               "{}: {} threads a threadgroup, at most {}", pipeline_->name(), threads.count(),
               pipeline_->max_threads_per_threadgroup());
  }

  const NS::SharedPtr<MTL::ComputeCommandEncoder> encoder_;
  const ApplePipeline* pipeline_ = nullptr;
  bool ended_ = false;
};

// How a command buffer ended. Shared with Metal's handler, which may come after we gave up waiting.
struct Completion {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::optional<std::string> error;
  double gpu_seconds = 0;
  // Raised by the handler if execution failed, since the GPU then does not.
  std::vector<std::pair<NS::SharedPtr<MTL::SharedEvent>, uint64_t>> signals;

  void finish(MTL::CommandBuffer& command_buffer) {
    const std::lock_guard lock(mutex);
    if (command_buffer.status() == MTL::CommandBufferStatusError) {
      error = describe(command_buffer.error());
      for (const auto& [event, value] : signals)
        if (event->signaledValue() < value) event->setSignaledValue(value);
    }
    gpu_seconds = command_buffer.GPUEndTime() - command_buffer.GPUStartTime();
    done = true;
    changed.notify_all();
  }
  bool wait(int64_t timeout_ms) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return done; });
  }
};

class AppleCommandBuffer final : public CommandBuffer {
 public:
  AppleCommandBuffer(MTL::CommandQueue& queue, std::string label)
      : label_(std::move(label)), completion_(std::make_shared<Completion>()) {
    const Pool pool;
    command_buffer_ = NS::RetainPtr(queue.commandBufferWithUnretainedReferences());
    if (!command_buffer_) fail(Fault::device, "{}: no command buffer", label_);
    command_buffer_->setLabel(ns_string(label_));
  }
  ~AppleCommandBuffer() override {
    if (committed_) completion_->wait(kHangMs);
  }

  Encoder& make_encoder() override {
    check_between_encoders();
    const Pool pool;
    return encoder_.emplace(*command_buffer_.get());
  }
  void signal(Event& event, uint64_t value) override {
    check_between_encoders();
    const auto& shared = static_cast<AppleEvent&>(event).get();
    command_buffer_->encodeSignalEvent(shared.get(), value);
    completion_->signals.emplace_back(shared, value);
  }
  void commit() override {
    check_between_encoders();
    const Pool pool;
    command_buffer_->addCompletedHandler([completion = completion_](MTL::CommandBuffer* command_buffer) {
      completion->finish(*command_buffer);
    });
    command_buffer_->commit();
    committed_ = true;
  }

  void wait_until_completed(int64_t timeout_ms) override {
    LILY_CHECK(committed_, "{}: not committed", label_);
    if (!completion_->wait(timeout_ms))
      fail(Fault::device, "{}: the GPU did not finish within {} ms", label_, timeout_ms);
    if (const auto reason = error()) fail(Fault::device, "{}: {}", label_, *reason);
  }
  bool completed() const override {
    const std::lock_guard lock(completion_->mutex);
    return completion_->done;
  }
  std::optional<std::string> error() const override {
    const std::lock_guard lock(completion_->mutex);
    return completion_->error;
  }
  double gpu_seconds() const override {
    const std::lock_guard lock(completion_->mutex);
    return completion_->gpu_seconds;
  }

 private:
  void check_between_encoders() const {
    LILY_CHECK(!committed_ && (!encoder_ || encoder_->ended()), "{}: committed, or an encoder is open",
               label_);
  }

  const std::string label_;
  NS::SharedPtr<MTL::CommandBuffer> command_buffer_;
  std::optional<AppleEncoder> encoder_;
  const std::shared_ptr<Completion> completion_;
  bool committed_ = false;
};

class AppleDevice final : public Device {
 public:
  explicit AppleDevice(NS::SharedPtr<MTL::Device> device)
      : device_(std::move(device)),
        queue_(NS::TransferPtr(device_->newCommandQueue())),
        residency_(device_.get(), queue_.get()) {
    const Pool pool;
    name_ = device_->name()->utf8String();
    for (int family = 1; family <= 10; ++family)
      if (device_->supportsFamily(static_cast<MTL::GPUFamily>(MTL::GPUFamilyApple1 + family - 1)))
        limits_.apple_family = family;
    if (limits_.apple_family < 7)
      fail(Fault::device, "{} is not an Apple silicon GPU; use --backend cpu", name_);
    if (__builtin_available(macOS 26.2, *)) limits_.tensor_ops = limits_.apple_family >= 10;
    limits_.max_threads_per_threadgroup = static_cast<uint32_t>(device_->maxThreadsPerThreadgroup().width);
    limits_.max_threadgroup_memory = device_->maxThreadgroupMemoryLength();
    limits_.max_buffer_length = device_->maxBufferLength();
    limits_.recommended_working_set = device_->recommendedMaxWorkingSetSize();
  }

  const std::string& name() const override { return name_; }
  const Limits& limits() const override { return limits_; }

  std::unique_ptr<Buffer> make_buffer(size_t length, BufferUse use, std::string label) override {
    const Pool pool;
    if (length == 0 || length > limits_.max_buffer_length)
      fail(Fault::device, "{}: a buffer of {} bytes; 1 to {} are possible", label, length,
           limits_.max_buffer_length);
    auto buffer = NS::TransferPtr(device_->newBuffer(length, MTL::ResourceStorageModeShared));
    if (!buffer) fail(Fault::device, "{}: no memory for a buffer of {} bytes", label, length);
    return std::make_unique<AppleBuffer>(std::move(buffer), use, std::move(label), residency_);
  }
  std::unique_ptr<Library> make_library(const KernelLibrary& library) override {
    return std::make_unique<AppleLibrary>(device_.get(), library);
  }
  std::unique_ptr<Event> make_event() override { return std::make_unique<AppleEvent>(device_.get()); }
  std::unique_ptr<CommandBuffer> make_command_buffer(std::string label) override {
    return std::make_unique<AppleCommandBuffer>(*queue_.get(), std::move(label));
  }
  void make_resident() override {
    const Pool pool;
    residency_.request();
  }

 private:
  const NS::SharedPtr<MTL::Device> device_;
  const NS::SharedPtr<MTL::CommandQueue> queue_;
  Residency residency_;
  std::string name_;
  Limits limits_;
};

}  // namespace

std::unique_ptr<Device> make_apple_device() {
  const Pool pool;
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  if (!device) fail(Fault::device, "this system has no Metal device; use --backend cpu");
  return std::make_unique<AppleDevice>(std::move(device));
}

bool apple_device_present() {
  const Pool pool;
  return static_cast<bool>(NS::TransferPtr(MTL::CreateSystemDefaultDevice()));
}

}  // namespace lily::metal
