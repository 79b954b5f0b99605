#include "emulator/device/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <tuple>

#include "emulator/runtime/trace.h"
#include "emulator/runtime/worker.h"

namespace lily::emulator {

namespace {

// Below this many GPU threads waking the other cores costs more than they save.
constexpr uint64_t kMinParallelThreads = 256;
constexpr uint64_t kMaxThreadgroups = uint64_t{1} << 26;  // more: the grid was not meant

// Sorted, overlapping and adjacent ones joined.
void join(std::vector<ByteRange>& ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  size_t n = 0;
  for (const ByteRange& r : ranges) {
    if (n != 0 && r.begin <= ranges[n - 1].end) ranges[n - 1].end = std::max(ranges[n - 1].end, r.end);
    else ranges[n++] = r;
  }
  ranges.resize(n);
}

void join(std::vector<Touched>& touched) {
  const auto key = [](const Touched& t) { return std::tuple(t.buffer, t.is_write, t.begin); };
  std::sort(touched.begin(), touched.end(),
            [&](const Touched& a, const Touched& b) { return key(a) < key(b); });
  size_t n = 0;
  for (const Touched& t : touched) {
    const bool goes_on = n != 0 && touched[n - 1].buffer == t.buffer &&
                         touched[n - 1].is_write == t.is_write && t.begin <= touched[n - 1].end;
    if (goes_on) touched[n - 1].end = std::max(touched[n - 1].end, t.end);
    else touched[n++] = t;
  }
  touched.resize(n);
}

}  // namespace

Executor::Executor(const Options& options, Findings& findings)
    : options_(options),
      findings_(findings),
      pool_(options.n_threads > 0 ? options.n_threads : physical_cores()),
      random_(options.seed) {}

std::optional<std::string> Executor::run(const EmulatedCommandBuffer& command_buffer,
                                         const std::function<void(DispatchCounters)>& count) {
  delay();
  const uint64_t n_findings_before = findings_.n_added();
  const auto& commands = command_buffer.commands();
  const bool injected = options_.failing_command_buffer == static_cast<int64_t>(command_buffer.sequence());
  bool completed = !injected;
  uint32_t stage = 0;
  for (size_t i = 0; i < commands.size();) {
    if (std::holds_alternative<BarrierCommand>(commands[i])) {
      interval_start_ = n_dispatches_ + 1;
      names_.clear();
      ++stage;
      ++i;
    } else if (const auto* signal = std::get_if<SignalCommand>(&commands[i])) {
      delay();
      signal->event->signal(signal->value, command_buffer.sequence());
      ++i;
    } else {
      size_t end = i;
      while (end < commands.size() && std::holds_alternative<DispatchCommand>(commands[end])) ++end;
      std::vector<size_t> order(end - i);
      std::iota(order.begin(), order.end(), size_t{0});
      if (options_.shuffle) std::shuffle(order.begin(), order.end(), random_);
      const uint32_t first_serial = n_dispatches_ + 1;
      for (size_t k = i; k < end; ++k)
        names_.push_back(std::get<DispatchCommand>(commands[k]).pipeline->name());
      n_dispatches_ += static_cast<uint32_t>(order.size());
      for (size_t k : order) {
        // After a failure the rest is skipped, as a GPU does; events are still signalled.
        if (!completed) break;
        Outcome outcome =
            dispatch(std::get<DispatchCommand>(commands[i + k]), first_serial + static_cast<uint32_t>(k));
        completed = outcome.completed;
        outcome.counters.command_buffer = static_cast<uint32_t>(command_buffer.sequence());
        outcome.counters.stage = stage;
        if (options_.keep_counters) count(std::move(outcome.counters));
      }
      i = end;
    }
  }
  if (injected) return "injected failure";
  const bool has_findings = findings_.n_added() != n_findings_before;
  if (completed && (!has_findings || options_.on_finding == Options::OnFinding::nothing)) return {};
  const auto all = findings_.list();
  if (all.empty()) return "execution failed";
  return fmt::format("{}: {}: {}", all.back().kernel, to_string(all.back().kind), all.back().message);
}

void Executor::delay() {
  if (options_.max_delay_us <= 0) return;
  const auto us = std::uniform_int_distribution<int>(0, options_.max_delay_us)(random_);
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

Executor::Outcome Executor::dispatch(const DispatchCommand& command, uint32_t serial) {
  Outcome outcome;
  outcome.counters.kernel = command.pipeline->name();
  outcome.counters.indirect = command.indirect != nullptr;
  Dispatch d;
  d.kernel = &command.pipeline->kernel();
  d.max_threadgroup_memory = options_.limits.max_threadgroup_memory;
  d.serial = serial;
  d.interval_start = interval_start_;
  d.seed = options_.seed;
  d.shuffle = options_.shuffle;
  d.traced = command.pipeline->traced();
  d.keeps_accesses = options_.keep_accesses;
  d.names = &names_;
  d.findings = &findings_;
  outcome.completed = check(command);
  if (!outcome.completed) return outcome;
  const metal::Size3 groups = command.groups, threads = command.threads;
  std::copy_n(std::begin({groups.x, groups.y, groups.z}), 3, d.launch.groups);
  std::copy_n(std::begin({threads.x, threads.y, threads.z}), 3, d.launch.threads);
  outcome.completed = command.indirect == nullptr || read_indirect(command, serial, d);
  if (!outcome.completed) return outcome;
  bind(command, d);

  const uint32_t n_groups = d.n_groups();
  if (options_.shuffle && n_groups > 1) {
    d.order.resize(n_groups);
    std::iota(d.order.begin(), d.order.end(), 0u);
    std::shuffle(d.order.begin(), d.order.end(), random_);
  }
  if (n_groups != 0) {
    const auto constants = command.pipeline->set_constants();
    if (n_groups > 1 && uint64_t{n_groups} * d.n_threads() >= kMinParallelThreads)
      pool_.run([&](int) { Worker::of_this_thread().run(d); });
    else Worker::of_this_thread().run(d);
  }
  outcome.completed = !d.failed;
  outcome.counters.n_threadgroups = n_groups;
  outcome.counters.n_threads = uint64_t{n_groups} * d.n_threads();
  outcome.counters.n_threadgroup_barriers = d.n_barriers;
  outcome.counters.bytes_read = d.bytes[0];
  outcome.counters.bytes_written = d.bytes[1];
  outcome.counters.traffic_read = d.traffic[0];
  outcome.counters.traffic_written = d.traffic[1];
  join(d.touched);
  outcome.counters.touched = std::move(d.touched);
  return outcome;
}

// What Metal's validation layer would refuse.
bool Executor::check(const DispatchCommand& command) {
  const CompiledKernel& kernel = command.pipeline->kernel();
  const uint64_t n_threads = command.threads.count();
  bool good = true;
  const auto refuse = [&](Finding::Kind kind, uint64_t place, const std::string& message) {
    findings_.add(kind, kernel.host_name, place, message);
    good = false;
  };
  if (n_threads == 0 || n_threads > command.pipeline->max_threads_per_threadgroup())
    refuse(Finding::Kind::limit, 1000,
           fmt::format("{} threads a threadgroup; 1 to {} are possible", n_threads,
                       command.pipeline->max_threads_per_threadgroup()));
  const uint64_t n_groups = command.groups.count();
  if (command.indirect == nullptr && (n_groups == 0 || n_groups > kMaxThreadgroups))
    refuse(Finding::Kind::limit, 1001, fmt::format("a grid of {} threadgroups", n_groups));
  for (unsigned i = 0; i < kernel.n_arguments; ++i) good &= check_argument(command, kernel.arguments[i]);
  for (const metal::Access& a : command.accesses) {
    const size_t last = a.offset + (std::max<size_t>(1, a.count) - 1) * a.stride;
    if (last > a.buffer->length() || a.length > a.buffer->length() - last)
      refuse(Finding::Kind::bad_argument, 2000,
             fmt::format("declares [{}, {}) of {}, which has {} bytes", last, last + a.length,
                         a.buffer->label(), a.buffer->length()));
    if (a.kind != metal::Access::Kind::read && a.buffer->immutable())
      refuse(Finding::Kind::immutable_write, 2001, fmt::format("declares a write to {}", a.buffer->label()));
  }
  return good;
}

bool Executor::check_argument(const DispatchCommand& command, const ArgumentInfo& info) {
  const Argument& argument = command.arguments[info.index];
  std::string problem;
  if (!argument.is_set()) {
    if (info.optional) return true;
    problem = "is not set";
  } else if (argument.buffer == nullptr) {
    if (argument.bytes.size() > metal::kMaxBytesLength) return false;  // listed when it was set
    if (info.writable) problem = "is written by the kernel and was given by set_bytes";
    else if (argument.bytes.size() < info.size)
      problem = fmt::format("has {} bytes from set_bytes, the kernel's type has {}", argument.bytes.size(),
                            info.size);
  } else {
    const size_t alignment = std::max<size_t>(options_.limits.buffer_offset_alignment, info.alignment);
    const size_t length = argument.buffer->length();
    if (argument.offset % alignment != 0)
      problem = fmt::format("has offset {} in {}, not a multiple of {}", argument.offset,
                            argument.buffer->label(), alignment);
    else if (argument.offset > length ||
             (info.kind == ArgumentInfo::reference && argument.offset + info.size > length))
      problem = fmt::format("at offset {} does not fit in {} of {} bytes", argument.offset,
                            argument.buffer->label(), length);
  }
  if (problem.empty()) return true;
  findings_.add(Finding::Kind::bad_argument, command.pipeline->name(), info.index,
                fmt::format("argument {} {}", info.index, problem));
  return false;
}

// A read like a kernel's: earlier dispatches that write the arguments must be before a barrier.
bool Executor::read_indirect(const DispatchCommand& command, uint32_t serial, Dispatch& dispatch) {
  const EmulatedBuffer& buffer = *command.indirect;
  const char* source = buffer.data() + command.indirect_offset;
  std::copy_n(source, sizeof dispatch.launch.groups, reinterpret_cast<char*>(dispatch.launch.groups));
  if (buffer.shadow() != nullptr) {
    if (dispatch.keeps_accesses)
      dispatch.touched.push_back(
          {&buffer, command.indirect_offset, command.indirect_offset + sizeof dispatch.launch.groups, false});
    AccessRecord access;
    access.dispatch = serial;
    access.group = kNoGroup;
    access.is_set = true;
    AccessRecord other;
    Clash found = Clash::none;
    buffer.shadow()->add(command.indirect_offset, 12, access, false, true, interval_start_, found, other);
    if (found != Clash::none)
      findings_.add(
          Finding::Kind::missing_dispatch_barrier, command.pipeline->name(), 3000,
          fmt::format(
              "the indirect arguments in {}+{} are written by {} (dispatch {}), with no barrier between",
              buffer.label(), command.indirect_offset, dispatch.name(other.dispatch), other.dispatch));
  }
  uint64_t n_groups = 1;
  for (uint32_t n : dispatch.launch.groups) n_groups = std::min<uint64_t>(n_groups * n, uint64_t{1} << 40);
  if (n_groups <= kMaxThreadgroups) return true;
  findings_.add(Finding::Kind::limit, command.pipeline->name(), 3001,
                fmt::format("an indirect grid of {} x {} x {} threadgroups; were {}+{} written?",
                            dispatch.launch.groups[0], dispatch.launch.groups[1], dispatch.launch.groups[2],
                            buffer.label(), command.indirect_offset));
  return false;
}

void Executor::bind(const DispatchCommand& command, Dispatch& dispatch) {
  const CompiledKernel& kernel = *dispatch.kernel;
  if (dispatch.traced) dispatch.undefined_constants = command.pipeline->undefined_constants();
  std::copy(command.threadgroup_lengths.begin(), command.threadgroup_lengths.end(),
            dispatch.launch.threadgroup_lengths);
  std::vector<const EmulatedBuffer*> bound;
  for (unsigned i = 0; i < kernel.n_arguments; ++i) {
    const unsigned index = kernel.arguments[i].index;
    const Argument& argument = command.arguments[index];
    if (argument.buffer == nullptr) {
      // Kernels do not write it; the table's type serves buffers as well.
      auto* bytes = const_cast<std::byte*>(argument.bytes.data());
      dispatch.launch.buffers[index] = bytes;
      const auto* begin = reinterpret_cast<const char*>(bytes);
      if (!argument.bytes.empty())
        dispatch.memory.push_back({{begin, begin + argument.bytes.size()},
                                   fmt::format("bytes of argument {}", index),
                                   true,
                                   nullptr,
                                   nullptr,
                                   false,
                                   {},
                                   {}});
      continue;
    }
    const EmulatedBuffer& buffer = *argument.buffer;
    dispatch.launch.buffers[index] = buffer.data() + argument.offset;
    if (!dispatch.traced || std::find(bound.begin(), bound.end(), &buffer) != bound.end()) continue;
    bound.push_back(&buffer);
    BoundMemory& memory = dispatch.memory.emplace_back();
    memory.range = {buffer.data(), buffer.data() + buffer.length()};
    memory.label = buffer.label();
    memory.immutable = buffer.immutable();
    memory.shadow = buffer.shadow();
    memory.buffer = &buffer;
    memory.declared = !command.accesses.empty();
    for (const metal::Access& a : command.accesses) {
      if (a.buffer != &buffer) continue;
      for (size_t r = 0; r < a.count; ++r) {
        const char* begin = buffer.data() + a.offset + r * a.stride;
        if (a.kind != metal::Access::Kind::write) memory.readable.push_back({begin, begin + a.length});
        if (a.kind != metal::Access::Kind::read) memory.writable.push_back({begin, begin + a.length});
      }
    }
    join(memory.readable);
    join(memory.writable);
  }
}

}  // namespace lily::emulator
