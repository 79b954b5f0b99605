// What the Metal backend asks of a GPU: buffers, kernels by name, one queue of command buffers, events.
//
// Two implementations: Apple's Metal (device_apple.cc) and an emulated GPU that executes the same kernels on
// Linux and verifies how they are used (emulator/). Everything above this interface, barrier placement and
// buffer reuse included, is the same code on both.
//
// Threads. A Device and what it makes belong to one thread, except: Event::wait and Event::value may be
// called from any thread, and Buffer::read from the thread that waited for the event which the read relies
// on. Lifetimes. A device outlives all that it made. Buffers, pipelines and events outlive the command
// buffers that use them: nothing is retained on the caller's behalf. A command buffer in flight waits in its
// destructor. Errors. Everything throws lily::Error: Fault::device for what the GPU or memory refuses; misuse
// of this interface (an index out of range, an encoder used after end()) is our own mistake, hence a
// LILY_CHECK. What goes wrong while a command buffer executes is its error state: see CommandBuffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace lily::metal {

inline constexpr int kMaxBuffers = 31;           // argument indices 0 .. 30
inline constexpr size_t kMaxBytesLength = 4096;  // of set_bytes
inline constexpr int kSimdWidth = 32;            // every pipeline is checked to have it

struct Size3 {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Limits {
  int apple_family = 0;     // 7: M1, 8: M2, 9: M3 and M4, 10: M5; 0: not an Apple GPU
  bool tensor_ops = false;  // Metal 4 tensor operations run on matrix units (metal_tensor in kernels)
  uint32_t max_threads_per_threadgroup = 1024;
  size_t max_threadgroup_memory = 32 * 1024;
  size_t max_buffer_length = 0;
  size_t recommended_working_set = 0;  // all buffers together should stay below it
  size_t buffer_offset_alignment = 4;  // of set_buffer, and of the argument's type if that is larger
};

// Memory that CPU and GPU share. Contents are undefined (in the emulator: NaN) until written.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual size_t length() const = 0;
  virtual bool immutable() const = 0;  // kernels never write it
  virtual const std::string& label() const = 0;

  // Copies out of and into the buffer. A range read must not be written by a command buffer in flight, a
  // range written must not be used by one: wait for its event first. The emulator reports the contrary.
  virtual void read(size_t offset, std::span<std::byte> destination) const = 0;
  virtual void write(size_t offset, std::span<const std::byte> source) = 0;

  // The whole memory in place, for loading weights and for spans of results. No command buffer that uses the
  // buffer may be in flight when this is called, nor while the span is written; reading through the span is
  // for ranges whose event was waited for.
  virtual std::span<std::byte> contents() = 0;

  template <typename T>
  T read_value(size_t offset) const {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    read(offset, std::as_writable_bytes(std::span<T, 1>(&value, 1)));
    return value;
  }
  template <typename T>
  void write_value(size_t offset, const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    write(offset, std::as_bytes(std::span<const T, 1>(&value, 1)));
  }
};

enum class BufferUse : uint8_t {
  mutable_data,
  weights,  // written by the CPU before the first command buffer uses it, never by a kernel
};

// One .metal file with its own #includes expanded, as metal_kernel_library() of cmake/MetalKernels.cmake
// embeds it. Files are compiled apart from one another, so names may repeat; host names may not.
struct KernelFile {
  std::string_view name;  // "linear_q4.metal"
  std::string_view text;
};

enum class MathMode : uint8_t { safe, fast };

struct KernelLibrary {
  std::string_view name;  // the target's name
  std::span<const KernelFile> files;
  MathMode math = MathMode::safe;  // safe: infinities and NaN behave, no reassociation
  bool tensor_ops = false;         // needs Limits::tensor_ops and Metal 4
};

// A value for `constant T name [[function_constant(index)]]`; the variant's type must be T.
struct FunctionConstant {
  uint32_t index = 0;
  std::variant<bool, int32_t, uint32_t, float> value;
};

class Pipeline {
 public:
  virtual ~Pipeline() = default;
  virtual const std::string& name() const = 0;
  virtual uint32_t max_threads_per_threadgroup() const = 0;
  virtual uint32_t execution_width() const = 0;  // kSimdWidth
};

class Library {
 public:
  virtual ~Library() = default;
  // By host_name. Throws Error(Fault::device) if there is no such kernel, if a function constant is missing,
  // and if the GPU's simdgroups are not kSimdWidth wide.
  virtual std::unique_ptr<Pipeline> make_pipeline(std::string_view host_name,
                                                  std::span<const FunctionConstant> constants = {}) = 0;
};

// What a dispatch may touch, as its op declared it: `count` ranges, each `stride` bytes behind the one
// before.
struct Access {
  enum class Kind : uint8_t { read, write, read_write };
  const Buffer* buffer = nullptr;
  size_t offset = 0, length = 0;  // of the first range
  Kind kind = Kind::read;
  size_t stride = 0;
  size_t count = 1;
};

// A concurrent compute encoder: dispatches are unordered among themselves except across memory_barrier().
// Pipeline, buffers, bytes and threadgroup lengths stay set until they are replaced.
//
// Each dispatch names the ranges it may touch. The emulator fails a dispatch that strays from them, and
// Buffer::read and write are checked against them; Apple's implementation does not look at them. They are
// copied. An empty list declares nothing: only the bindings are verified.
class Encoder {
 public:
  virtual ~Encoder() = default;
  virtual void set_pipeline(const Pipeline& pipeline) = 0;
  virtual void set_buffer(int index, const Buffer& buffer, size_t offset = 0) = 0;
  virtual void set_bytes(int index, std::span<const std::byte> bytes) = 0;   // copied; <= kMaxBytesLength
  virtual void set_threadgroup_memory_length(int index, size_t length) = 0;  // a multiple of 16

  virtual void dispatch_threadgroups(Size3 groups, Size3 threads, std::span<const Access> accesses) = 0;
  // Three uint32 threadgroup counts are read from `arguments` when the dispatch starts: a read like a
  // kernel's, to be ordered by a barrier. `offset` is a multiple of 4.
  virtual void dispatch_indirect(const Buffer& arguments, size_t offset, Size3 threads,
                                 std::span<const Access> accesses) = 0;

  // Orders everything encoded before against everything after; needed for write-after-read as well.
  virtual void memory_barrier() = 0;
  virtual void end() = 0;  // the encoder may not be used any more

  template <typename T>
  void set_value(int index, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMaxBytesLength);
    set_bytes(index, std::as_bytes(std::span<const T, 1>(&value, 1)));
  }
};

// A counter that command buffers raise and the CPU waits for. Starts at 0 and only grows.
class Event {
 public:
  virtual ~Event() = default;
  virtual uint64_t value() const = 0;
  // True when the value has been reached, false after timeout_ms. A failed command buffer still sets its
  // events, so look at CommandBuffer::error() before using what was waited for.
  virtual bool wait(uint64_t value, int64_t timeout_ms) = 0;
};

// Command buffers of a device execute in the order of their commits; encoders within one likewise. The GPU
// works while the CPU encodes the next one.
class CommandBuffer {
 public:
  virtual ~CommandBuffer() = default;
  // Begins an encoder, which belongs to this command buffer. One at a time: end() it before the next call
  // here.
  virtual Encoder& make_encoder() = 0;
  // Raises the event when everything encoded so far is complete. Between encoders only.
  virtual void signal(Event& event, uint64_t value) = 0;
  virtual void commit() = 0;

  // Throws Error(Fault::device) if execution failed or took longer than timeout_ms.
  virtual void wait_until_completed(int64_t timeout_ms) = 0;
  virtual bool completed() const = 0;  // well or badly
  // Why execution failed; empty while in flight and after success. Later command buffers still run.
  virtual std::optional<std::string> error() const = 0;
  virtual double gpu_seconds() const = 0;  // after completion, from start to end on the GPU
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;
  virtual const Limits& limits() const = 0;

  virtual std::unique_ptr<Buffer> make_buffer(size_t length, BufferUse use, std::string label) = 0;
  // Compiles the library (emulator: finds it compiled). Throws with the compiler's messages.
  virtual std::unique_ptr<Library> make_library(const KernelLibrary& library) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  virtual std::unique_ptr<CommandBuffer> make_command_buffer(std::string label) = 0;

  // Keeps the buffers made so far resident; call once after the weights are loaded, and again after further
  // buffers were made. No effect where the system has no residency sets.
  virtual void make_resident() = 0;
};

// The GPU of this Mac; throws Error(Fault::device) if there is none. Both only in Apple builds.
std::unique_ptr<Device> make_apple_device();
bool apple_device_present();

}  // namespace lily::metal
