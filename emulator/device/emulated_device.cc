#include "emulator/emulated_device.h"

#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "base/error.h"
#include "emulator/device/executor.h"
#include "emulator/device/objects.h"

namespace lily::emulator {

namespace {

class EmulatedLibrary : public metal::Library {
 public:
  EmulatedLibrary(const CompiledLibrary& library, const metal::Limits& limits)
      : library_(library), limits_(limits) {}

  std::unique_ptr<metal::Pipeline> make_pipeline(
      std::string_view host_name, std::span<const metal::FunctionConstant> constants) override {
    for (unsigned f = 0; f < library_.n_files; ++f) {
      const CompiledFile& file = *library_.files[f];
      for (unsigned k = 0; k < file.n_kernels; ++k)
        if (file.kernels[k].host_name == host_name)
          return std::make_unique<EmulatedPipeline>(file, file.kernels[k], library_.traced,
                                                    limits_.max_threads_per_threadgroup, constants);
    }
    fail(Fault::device, "library {} has no kernel {}", library_.name, host_name);
  }

 private:
  const CompiledLibrary& library_;
  const metal::Limits limits_;
};

class Implementation final : public EmulatedDevice {
 public:
  explicit Implementation(Options options)
      : options_(std::move(options)), findings_(options_.on_finding), host_order_(findings_) {
    for (const CompiledLibrary* library : options_.libraries) {
      traced_ = options_.libraries.front()->traced;
      if (library->traced != traced_)
        fail(Fault::user, "emulator: library {} is {}, {} is not", library->name,
             traced_ ? "plain" : "traced", options_.libraries.front()->name);
    }
    name_ = traced_ ? "emulated GPU, traced" : "emulated GPU";
    gpu_ = std::thread([this] { gpu_loop(); });
  }

  ~Implementation() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    gpu_.join();
  }

  const std::string& name() const override { return name_; }
  const metal::Limits& limits() const override { return options_.limits; }

  std::unique_ptr<metal::Buffer> make_buffer(size_t length, metal::BufferUse use,
                                             std::string label) override {
    if (length == 0 || length > options_.limits.max_buffer_length)
      fail(Fault::device, "{}: a buffer of {} bytes; 1 to {} are possible", label, length,
           options_.limits.max_buffer_length);
    return std::make_unique<EmulatedBuffer>(length, use, std::move(label), traced_, host_order_);
  }

  std::unique_ptr<metal::Library> make_library(const metal::KernelLibrary& library) override {
    for (const CompiledLibrary* compiled : options_.libraries)
      if (compiled->name == library.name)
        return std::make_unique<EmulatedLibrary>(*compiled, options_.limits);
    fail(Fault::device, "kernel library {} is not among the emulator's", library.name);
  }

  std::unique_ptr<metal::Event> make_event() override { return std::make_unique<EmulatedEvent>(host_order_); }

  std::unique_ptr<metal::CommandBuffer> make_command_buffer(std::string label) override {
    return std::make_unique<EmulatedCommandBuffer>(std::move(label), findings_, host_order_,
                                                   [this](EmulatedCommandBuffer& b) { submit(b); });
  }

  void make_resident() override {}

  std::vector<Finding> findings() const override { return findings_.list(); }
  void clear_findings() override { findings_.clear(); }
  std::vector<DispatchCounters> take_counters() override {
    const std::lock_guard lock(mutex_);
    return std::exchange(counters_, {});
  }

 private:
  void submit(EmulatedCommandBuffer& command_buffer) {
    auto uses = command_buffer.uses();
    {
      const std::lock_guard lock(mutex_);
      command_buffer.set_sequence(n_submitted_++);
      host_order_.committed(command_buffer.sequence(), std::move(uses));
      queue_.push_back(&command_buffer);
    }
    wake_.notify_all();
  }

  // One command buffer after the other: those of a queue that touch the same buffers do not overlap on a GPU
  // either.
  void gpu_loop() {
    Executor executor(options_, findings_);
    while (true) {
      EmulatedCommandBuffer* next = nullptr;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        next = queue_.front();
        queue_.pop_front();
      }
      const auto start = std::chrono::steady_clock::now();
      // Counted one by one: whoever waits for an event of this command buffer shall find them all.
      auto error = executor.run(*next, [this](DispatchCounters counters) {
        const std::lock_guard lock(mutex_);
        counters_.push_back(std::move(counters));
      });
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      next->complete(std::move(error), seconds.count());
    }
  }

  const Options options_;
  std::string name_;
  bool traced_ = false;
  Findings findings_;
  HostOrder host_order_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<EmulatedCommandBuffer*> queue_;
  uint64_t n_submitted_ = 0;
  std::vector<DispatchCounters> counters_;
  bool stop_ = false;
  std::thread gpu_;
};

}  // namespace

std::unique_ptr<EmulatedDevice> make_emulated_device(Options options) {
  return std::make_unique<Implementation>(std::move(options));
}

}  // namespace lily::emulator
