// The emulated device's buffers, pipelines, events and command buffers.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "emulator/device/host_order.h"
#include "emulator/emulated_device.h"
#include "emulator/runtime/dispatch.h"
#include "emulator/runtime/memory.h"
#include "emulator/runtime/shadow.h"
#include "emulator/shim/msl_runtime.h"

namespace lily::emulator {

class EmulatedBuffer : public metal::Buffer {
 public:
  EmulatedBuffer(size_t length, metal::BufferUse use, std::string label, bool traced, HostOrder& host_order);
  ~EmulatedBuffer() override;

  size_t length() const override { return memory_.length(); }
  bool immutable() const override { return immutable_; }
  const std::string& label() const override { return memory_.label(); }
  void read(size_t offset, std::span<std::byte> destination) const override;
  void write(size_t offset, std::span<const std::byte> source) override;
  std::span<std::byte> contents() override;

  char* data() const { return memory_.data(); }
  BufferShadow* shadow() const { return shadow_.get(); }

 private:
  GuardedMemory memory_;
  const bool immutable_;
  const std::unique_ptr<BufferShadow> shadow_;
  HostOrder& host_order_;
};

class EmulatedPipeline : public metal::Pipeline {
 public:
  EmulatedPipeline(const CompiledFile& file, const CompiledKernel& kernel, bool traced, uint32_t max_threads,
                   std::span<const metal::FunctionConstant> constants);

  const std::string& name() const override { return name_; }
  uint32_t max_threads_per_threadgroup() const override { return max_threads_; }
  uint32_t execution_width() const override { return kLanes; }

  const CompiledKernel& kernel() const { return kernel_; }
  bool traced() const { return traced_; }
  // Function constants are variables of the compiled file, shared by its kernels. Holds them at this
  // pipeline's values as long as the lock lives.
  std::unique_lock<std::mutex> set_constants() const;
  // Function constants of the file that this pipeline gives no value: their variables and names.
  std::vector<std::pair<ByteRange, const char*>> undefined_constants() const;

 private:
  const CompiledFile& file_;
  const CompiledKernel& kernel_;
  const std::string name_;
  const bool traced_;
  const uint32_t max_threads_;
  std::vector<metal::FunctionConstant> constants_;
};

class EmulatedEvent : public metal::Event {
 public:
  explicit EmulatedEvent(HostOrder& host_order) : host_order_(host_order) {}
  uint64_t value() const override;
  bool wait(uint64_t value, int64_t timeout_ms) override;

  void signal(uint64_t value, uint64_t command_buffer);  // on the GPU's thread

 private:
  void learn(uint64_t value) const;

  HostOrder& host_order_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t value_ = 0;
  std::map<uint64_t, uint64_t> signalled_by_;  // command buffer by value
};

struct Argument {
  const EmulatedBuffer* buffer = nullptr;
  size_t offset = 0;
  std::vector<std::byte> bytes;  // of set_bytes, if there is no buffer
  bool is_set() const { return buffer != nullptr || !bytes.empty(); }
};

struct DispatchCommand {
  const EmulatedPipeline* pipeline = nullptr;
  std::array<Argument, metal::kMaxBuffers> arguments;
  std::array<uint32_t, metal::kMaxBuffers> threadgroup_lengths{};
  metal::Size3 groups, threads;
  const EmulatedBuffer* indirect = nullptr;  // its threadgroup counts replace `groups`
  size_t indirect_offset = 0;
  std::vector<metal::Access> accesses;
};
struct BarrierCommand {};
struct SignalCommand {
  EmulatedEvent* event;
  uint64_t value;
};
using Command = std::variant<DispatchCommand, BarrierCommand, SignalCommand>;

class EmulatedEncoder : public metal::Encoder {
 public:
  EmulatedEncoder(std::vector<Command>& commands, Findings& findings)
      : commands_(commands), findings_(findings) {}

  void set_pipeline(const metal::Pipeline& pipeline) override;
  void set_buffer(int index, const metal::Buffer& buffer, size_t offset) override;
  void set_bytes(int index, std::span<const std::byte> bytes) override;
  void set_threadgroup_memory_length(int index, size_t length) override;
  void dispatch_threadgroups(metal::Size3 groups, metal::Size3 threads,
                             std::span<const metal::Access> accesses) override;
  void dispatch_indirect(const metal::Buffer& arguments, size_t offset, metal::Size3 threads,
                         std::span<const metal::Access> accesses) override;
  void memory_barrier() override;
  void end() override;
  bool ended() const { return ended_; }

 private:
  DispatchCommand& add_dispatch(metal::Size3 threads, std::span<const metal::Access> accesses);

  std::vector<Command>& commands_;
  Findings& findings_;
  DispatchCommand state_;
  bool ended_ = false;
};

class EmulatedCommandBuffer : public metal::CommandBuffer {
 public:
  using Submit = std::function<void(EmulatedCommandBuffer&)>;  // gives it a sequence number and queues it

  EmulatedCommandBuffer(std::string label, Findings& findings, HostOrder& host_order, Submit submit);
  ~EmulatedCommandBuffer() override;

  metal::Encoder& make_encoder() override;
  void signal(metal::Event& event, uint64_t value) override;
  void commit() override;
  void wait_until_completed(int64_t timeout_ms) override;
  bool completed() const override;
  std::optional<std::string> error() const override;
  double gpu_seconds() const override;

  // ---- For the device
  const std::string& label() const { return label_; }
  const std::vector<Command>& commands() const { return commands_; }
  std::vector<BufferUseRange> uses() const;
  void set_sequence(uint64_t sequence) { sequence_ = sequence; }
  uint64_t sequence() const { return sequence_; }
  void complete(std::optional<std::string> error, double gpu_seconds);  // on the GPU's thread

 private:
  const std::string label_;
  Findings& findings_;
  HostOrder& host_order_;
  const Submit submit_;
  std::vector<Command> commands_;
  std::unique_ptr<EmulatedEncoder> encoder_;
  bool committed_ = false;
  uint64_t sequence_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable done_;
  bool completed_ = false;
  std::optional<std::string> error_;
  double gpu_seconds_ = 0;
};

}  // namespace lily::emulator
