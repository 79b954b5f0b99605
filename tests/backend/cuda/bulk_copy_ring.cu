// What racecheck makes of the pattern that the kernels' rings of bulk copies have, with nothing around it: a
// ring of two stages, one thread that asks for copies (cp.async.bulk, counted in bytes at a stage's "full"
// barrier), readers that wait for that barrier's phase, read with ordinary loads and arrive at the stage's
// "empty" barrier, for which the thread waits before it asks for the stage again. By the memory model it has
// no race; a tool that reports one here does not see an order in a barrier's completion by bytes.
//   bulk_copy_ring [racing|meeting|rows]
// racing: neither side waits for the other, so that a tool has a race to find. meeting: a warp's readers meet
// (__syncwarp) and one lane gives the stage back for all. rows: besides, the threads of a second group copy
// half of each stage (cp.async), and each arrives at "full" when its own copies have landed.
// Ends with 0 where all sums are right, with 77 where there is no device that can run it.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int kStages = 2, kTurns = 64, kReaders = 128, kWords = 1024;  // words of a stage
constexpr int kCopiers = 32;  // the first of them asks for the bulk copies

enum class Mode { plain, racing, meeting, rows };

__device__ unsigned address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
__device__ void init(uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}
__device__ void wait(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

template <Mode kMode>
__global__ void __launch_bounds__(kReaders + kCopiers) ring(const uint32_t* from, uint32_t* sums) {
  constexpr bool kRacing = kMode == Mode::racing, kRows = kMode == Mode::rows;
  constexpr bool kMeeting = kMode == Mode::meeting || kRows;
  constexpr int kBulkWords = kRows ? kWords / 2 : kWords;  // the rest comes by cp.async
  __shared__ alignas(128) uint32_t stage[kStages][kWords];
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s)
      init(&full[s], kRows ? 1 + kCopiers : 1), init(&empty[s], kMeeting ? kReaders / 32 : kReaders);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kReaders) {
    const int copier = static_cast<int>(threadIdx.x) - kReaders;
    if (!kRows && copier != 0) return;
    for (int turn = 0; turn < kTurns; ++turn) {
      const int s = turn % kStages;
      // The phase in front of the first counts as complete.
      if (!kRacing) wait(&empty[s], static_cast<unsigned>(turn / kStages + 1) & 1u);
      if (copier == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&full[s])),
                     "r"(kBulkWords * 4)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                address(stage[s])),
            "l"(from + turn * kWords), "r"(kBulkWords * 4), "r"(address(&full[s]))
            : "memory");
      }
      if (kRows) {
        for (int i = kBulkWords + 4 * copier; i < kWords; i += 4 * kCopiers)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(&stage[s][i])),
                       "l"(from + turn * kWords + i)
                       : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(&full[s]))
                     : "memory");
      }
      // Without the readers' word the phase must still be over before the next is asked for.
      if (kRacing) wait(&full[s], static_cast<unsigned>(turn / kStages) & 1u);
    }
    return;
  }
  uint32_t sum = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int s = turn % kStages;
    if (!kRacing) wait(&full[s], static_cast<unsigned>(turn / kStages) & 1u);
    for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kReaders) sum += stage[s][i];
    if (kMeeting) __syncwarp();
    if (!kMeeting || threadIdx.x % 32 == 0)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&empty[s])) : "memory");
  }
  sums[threadIdx.x] = sum;
}

bool failed(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    std::fprintf(stderr, "bulk_copy_ring: %s: %s\n", what, cudaGetErrorString(status));
  return status != cudaSuccess;
}

}  // namespace

int main(int argc, char** argv) {
  Mode mode = Mode::plain;
  for (const auto& [name, value] :
       {std::pair{"racing", Mode::racing}, {"meeting", Mode::meeting}, {"rows", Mode::rows}})
    if (argc > 1 && std::strcmp(argv[1], name) == 0) mode = value;
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess || major < 9) {
    std::puts("bulk_copy_ring: no CUDA device with bulk copies");
    return 77;
  }
  std::vector<uint32_t> from(kTurns * kWords), sums(kReaders);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i) * 2654435761u;
  uint32_t *device_from = nullptr, *device_sums = nullptr;
  if (failed(cudaMalloc(&device_from, from.size() * 4), "allocating") ||
      failed(cudaMalloc(&device_sums, sums.size() * 4), "allocating") ||
      failed(cudaMemcpy(device_from, from.data(), from.size() * 4, cudaMemcpyHostToDevice), "uploading"))
    return 1;
  const auto kernel = mode == Mode::plain     ? ring<Mode::plain>
                      : mode == Mode::racing  ? ring<Mode::racing>
                      : mode == Mode::meeting ? ring<Mode::meeting>
                                              : ring<Mode::rows>;
  kernel<<<1, kReaders + kCopiers>>>(device_from, device_sums);
  if (failed(cudaGetLastError(), "launching") ||
      failed(cudaMemcpy(sums.data(), device_sums, sums.size() * 4, cudaMemcpyDeviceToHost), "running"))
    return 1;
  int n_wrong = 0;
  for (int reader = 0; reader < kReaders; ++reader) {
    const auto first = static_cast<size_t>(reader);
    uint32_t sum = 0;
    for (size_t i = first; i < from.size(); i += kReaders) sum += from[i];
    n_wrong += sums[first] != sum;
  }
  std::printf("bulk_copy_ring: %d of %d sums are wrong\n", n_wrong, kReaders);
  return n_wrong != 0 && mode != Mode::racing;
}
