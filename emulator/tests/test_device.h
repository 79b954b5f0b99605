// A device for tests: buffers from vectors, one dispatch a line, results back as vectors.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "emulator/emulated_device.h"

namespace lily::emulator {

inline constexpr int64_t kTimeoutMs = 60000;

class TestDevice {
 public:
  TestDevice(const metal::KernelLibrary& library, Options options)
      : device_(make_emulated_device(std::move(options))), library_(device_->make_library(library)) {}

  EmulatedDevice& operator*() { return *device_; }
  EmulatedDevice* operator->() { return device_.get(); }

  template <typename T>
  std::unique_ptr<metal::Buffer> buffer(const std::string& label, const std::vector<T>& data,
                                        metal::BufferUse use = metal::BufferUse::mutable_data) {
    auto buffer = device_->make_buffer(data.size() * sizeof(T), use, label);
    buffer->write(0, std::as_bytes(std::span(data)));
    return buffer;
  }
  template <typename T>
  static std::vector<T> values(const metal::Buffer& buffer) {
    std::vector<T> data(buffer.length() / sizeof(T));
    buffer.read(0, std::as_writable_bytes(std::span(data)));
    return data;
  }

  const metal::Pipeline& pipeline(std::string_view name,
                                  std::span<const metal::FunctionConstant> constants = {}) {
    pipelines_.push_back(library_->make_pipeline(name, constants));
    return *pipelines_.back();
  }

  // Encodes with `encode`, commits, waits. Returns the command buffer's error, empty if there was none.
  template <typename Encode>
  std::string run(Encode encode) {
    auto command_buffer = device_->make_command_buffer("test");
    metal::Encoder& encoder = command_buffer->make_encoder();
    encode(encoder);
    encoder.end();
    command_buffer->commit();
    try {
      command_buffer->wait_until_completed(kTimeoutMs);
    } catch (const std::exception& e) {
      return e.what();
    }
    return {};
  }

  bool found(Finding::Kind kind) const {
    for (const Finding& f : device_->findings())
      if (f.kind == kind) return true;
    return false;
  }
  std::string report() const {
    std::string text;
    for (const Finding& f : device_->findings())
      text += std::string(to_string(f.kind)) + " in " + f.kernel + ": " + f.message + "\n";
    return text.empty() ? "no finding" : text;
  }

 private:
  std::unique_ptr<EmulatedDevice> device_;
  std::unique_ptr<metal::Library> library_;
  std::vector<std::unique_ptr<metal::Pipeline>> pipelines_;
};

}  // namespace lily::emulator
