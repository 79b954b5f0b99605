// Memory on the device and pinned memory on the host, owned.
#pragma once

#include <cstddef>
#include <utility>

#include "backend/cuda/check.h"

namespace lily::cuda {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t n_bytes) : n_bytes_(n_bytes) {
    if (n_bytes > 0) check(cudaMalloc(&p_, n_bytes), "allocating device memory");
  }
  DeviceMemory(DeviceMemory&& o) noexcept
      : p_(std::exchange(o.p_, nullptr)), n_bytes_(std::exchange(o.n_bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& o) noexcept {
    std::swap(p_, o.p_);
    std::swap(n_bytes_, o.n_bytes_);
    return *this;
  }
  ~DeviceMemory() { cudaFree(p_); }
  template <typename T = std::byte>
  T* get(size_t offset_bytes = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(p_) + offset_bytes);
  }
  size_t n_bytes() const { return n_bytes_; }

 private:
  void* p_ = nullptr;
  size_t n_bytes_ = 0;
};

class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(size_t n_bytes) : n_bytes_(n_bytes) {
    if (n_bytes > 0) check(cudaMallocHost(&p_, n_bytes), "allocating pinned memory");
  }
  PinnedMemory(PinnedMemory&& o) noexcept
      : p_(std::exchange(o.p_, nullptr)), n_bytes_(std::exchange(o.n_bytes_, 0)) {}
  PinnedMemory& operator=(PinnedMemory&& o) noexcept {
    std::swap(p_, o.p_);
    std::swap(n_bytes_, o.n_bytes_);
    return *this;
  }
  ~PinnedMemory() { cudaFreeHost(p_); }
  template <typename T = std::byte>
  T* get(size_t offset_bytes = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(p_) + offset_bytes);
  }
  size_t n_bytes() const { return n_bytes_; }

 private:
  void* p_ = nullptr;
  size_t n_bytes_ = 0;
};

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void synchronize() const { check(cudaStreamSynchronize(stream_), "waiting for the device"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(const Stream& stream) { check(cudaEventRecord(event_, stream.get()), "recording an event"); }
  void wait() const { check(cudaEventSynchronize(event_), "waiting for the device"); }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace lily::cuda
