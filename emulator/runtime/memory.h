// Device memory between guard pages, filled with NaN, and the signal handler that turns a kernel's access to
// a guard page into a finding.
#pragma once

#include <cstddef>
#include <string>

namespace lily::emulator {

// `length` usable bytes that end (rounded up to 16) at a guard page, so that even the plain build stops at
// the first access past the end. Below lies at least one guard page too.
class GuardedMemory {
 public:
  GuardedMemory(size_t length, std::string label);  // throws Error(Fault::device)
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  char* data() const { return data_; }
  size_t length() const { return length_; }
  const std::string& label() const { return label_; }

 private:
  const size_t length_;
  const std::string label_;
  char* map_ = nullptr;
  size_t map_bytes_ = 0;
  char* data_ = nullptr;
};

// "weights+4096 (length 4096)" for an address in or near a GuardedMemory of this process, else an empty text.
// Any thread.
std::string describe_address(const void* address);
// All of [address, address + size) lies within one GuardedMemory, not in its guards. Any thread.
bool is_device_memory(const void* address, size_t size);

struct KernelFault {
  const void* address;  // null for a misaligned pointer
  bool arithmetic;      // integer division by zero or of the smallest number by -1
};
// Once a thread that runs kernels: faults then end in on_kernel_fault(), called on the faulting fiber's stack
// as if the kernel had called it. A fault outside of kernels takes its usual course.
void catch_faults_on_this_thread();
[[noreturn]] void on_kernel_fault(const KernelFault& fault);  // worker.cc

}  // namespace lily::emulator
