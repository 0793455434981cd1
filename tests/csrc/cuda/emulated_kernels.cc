#include "cuda/emulated_kernels.h"

#include <vector_types.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/emulated_machine.h"
#include "gemm/views.h"
#include "random_gemm.h"

// Replaces keywords that only nvcc supports.
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

static thread_local uint3 threadIdx;
static thread_local uint3 blockIdx;
static thread_local uint3 blockDim;
static thread_local uint3 gridDim;

#include "platform/cuda/instructions.cuh"

namespace jax_ub::gpu {

uint64_t LoadAcquire(uint64_t address) {
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(address))
      .load(std::memory_order_acquire);
}

uint32_t LoadAcquire(const uint32_t* address) {
  return std::atomic_ref(*const_cast<uint32_t*>(address))
      .load(std::memory_order_acquire);
}

void StoreRelease(uint64_t address, uint64_t value) {
  std::atomic_ref(*reinterpret_cast<uint64_t*>(address))
      .store(value, std::memory_order_release);
}

void StoreRelease(uint32_t* address, uint32_t value) {
  std::atomic_ref(*address).store(value, std::memory_order_release);
}

uint64_t LoadRelaxed(uint64_t address) {
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(address))
      .load(std::memory_order_relaxed);
}

void StoreRelaxed(uint64_t address, uint64_t value) {
  std::atomic_ref(*reinterpret_cast<uint64_t*>(address))
      .store(value, std::memory_order_relaxed);
}

bool Claim(uint64_t address, uint64_t value) {
  uint64_t expected = 0;
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(address))
      .compare_exchange_strong(expected, value, std::memory_order_relaxed);
}

uint64_t Now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

// Sleeps for longer than on a device, because usually more threads wait than there are
// cores.
void Pause(uint32_t ns) {
  if (ns < 512) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::microseconds(20));
}

void SyncWarp() {}
// Not called: RunPhases runs the parts of a kernel between its barriers.
void SyncBlock() { throw std::logic_error("a kernel with barriers has phases"); }
bool SyncBlockAny(bool) { throw std::logic_error("a kernel with barriers has phases"); }

float2 WidenBF16(uint32_t pair) {
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xffff0000u)};
}

float2 WidenF16(uint32_t pair) {
  return {F16ToF32(static_cast<uint16_t>(pair)),
          F16ToF32(static_cast<uint16_t>(pair >> 16))};
}

// Checks that each thread executes a fence before its first and after its last use of
// the instructions below.
struct Fences {
  bool is_open = false;
  bool has_stored = false;
};
static thread_local Fences fences;

void FenceAliases() { fences = {.is_open = true, .has_stored = false}; }

static std::vector<uint64_t> Behind(uint64_t address) {
  if (!fences.is_open) throw std::logic_error("multicast without a fence before it");
  if (address % sizeof(uint4) != 0) throw std::logic_error("misaligned multicast");
  return emulated::BehindMulticast(address);
}

void MulticastStore(uint64_t address, uint4 vector) {
  fences.has_stored = true;
  for (const uint64_t one : Behind(address)) *reinterpret_cast<uint4*>(one) = vector;
}

uint4 MulticastSumF32(uint64_t address) {
  float4 sum = {};
  for (const uint64_t one : Behind(address)) {
    const float4 part = *reinterpret_cast<const float4*>(one);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
  }
  return std::bit_cast<uint4>(sum);
}

template <float2 (*kWiden)(uint32_t), uint32_t (*kNarrow)(float2)>
static uint4 SumPairs(uint64_t address) {
  float2 sums[4] = {};
  for (const uint64_t one : Behind(address)) {
    const auto* const pairs = reinterpret_cast<const uint32_t*>(one);
    for (int i = 0; i < 4; ++i) {
      const float2 part = kWiden(pairs[i]);
      sums[i] = {sums[i].x + part.x, sums[i].y + part.y};
    }
  }
  return {kNarrow(sums[0]), kNarrow(sums[1]), kNarrow(sums[2]), kNarrow(sums[3])};
}

uint4 MulticastSumBF16(uint64_t address) {
  return SumPairs<WidenBF16, NarrowBF16>(address);
}
uint4 MulticastSumF16(uint64_t address) {
  return SumPairs<WidenF16, NarrowF16>(address);
}

static uint32_t Narrow(float2 pair, DType dtype) {
  uint32_t narrow = 0;
  std::byte* bytes = reinterpret_cast<std::byte*>(&narrow);
  Write(bytes, dtype, pair.x);
  Write(bytes + 2, dtype, pair.y);
  return narrow;
}

uint32_t NarrowBF16(float2 pair) { return Narrow(pair, DType::kBF16); }
uint32_t NarrowF16(float2 pair) { return Narrow(pair, DType::kF16); }

uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}

}  // namespace jax_ub::gpu

#include "gemm/cuda/fp8_scale_kernels.cu"
#include "reduce/cuda/sum_kernels.cu"
#include "transport/cuda/all_reduce_kernel.cu"
#include "transport/cuda/flag_kernels.cu"
#include "transport/cuda/multicast_kernels.cu"

namespace jax_ub {

namespace {

void Require(bool condition, const char* what) {
  if (!condition)
    throw std::logic_error("emulated kernel: misaligned " + std::string(what));
}

void CheckAlignment(const SumParams& params) {
  const auto check = [&](const SumPart& part, const char* what) {
    const int64_t stride = part.row_stride * SizeOf(part.dtype);
    const int64_t bytes = params.is_aligned ? 16 : SizeOf(part.dtype);
    Require(part.data % bytes == 0 && (params.rows == 1 || stride % bytes == 0), what);
  };
  check(params.out, "result of a sum");
  for (uint32_t i = 0; i < params.num_parts; ++i)
    check(params.parts[i], "part of a sum");
}

void CheckAlignment(const CopyParams& params) {
  const int64_t bytes = params.unit_bytes;
  Require(params.from % bytes == 0 && params.to % bytes == 0, "copy");
  Require(params.row_bytes % bytes == 0, "rows of a copy");
  if (params.num_rows == 1) return;
  Require(params.from_stride % bytes == 0 && params.to_stride % bytes == 0,
          "strides of a copy");
}

void CheckAlignment(const AllReduceParams& params) {
  const int64_t bytes = params.is_aligned != 0 ? 16 : SizeOf(params.dtype);
  Require(params.partial % bytes == 0, "partial sum");
  for (uint32_t i = 0; i < params.num_peers; ++i) {
    Require(params.peers[i].to % bytes == 0 && params.peers[i].from % bytes == 0,
            "slot");
  }
}

void CheckAlignment(const TransposeParams& params) {
  const int64_t strides = params.from_stride | params.to_stride;
  Require((params.from | params.to) % 16 == 0 && strides % 16 == 0, "transposition");
}

void CheckAlignment(const BlockScalesParams& params) {
  Require(params.to % 16 == 0, "scales of blocks");
}

void CheckAlignment(const RowScalesParams& params) {
  Require(params.scales % 4 == 0 && params.to % 4 == 0 && params.largest % 4 == 0,
          "scales of rows");
  Require(params.converted % 16 == 0 && params.k % 16 == 0, "converted rows");
}

template <typename Params>
void CheckAlignment(const Params&) {}

// Runs a kernel whose phases are separated by barriers: all threads of a block run a
// phase before the next one begins. Blocks run one after another.
template <typename Params, auto... kPhases>
void RunPhases(const void* untyped, unsigned num_blocks, unsigned num_threads) {
  const Params& params = *static_cast<const Params*>(untyped);
  CheckAlignment(params);
  gridDim = {num_blocks, 1, 1};
  blockDim = {num_threads, 1, 1};
  const auto run = [&](auto phase) {
    for (threadIdx = {num_threads, 0, 0}; threadIdx.x-- > 0;) {
      gpu::fences = {};
      phase(params);
      Require(!gpu::fences.has_stored, "order: multicast without a fence behind it");
    }
  };
  for (blockIdx = {}; blockIdx.x < num_blocks; ++blockIdx.x) (run(kPhases), ...);
}

template <auto kKernel, typename Params>
constexpr auto Run = RunPhases<Params, kKernel>;

// Phases of the kernels with barriers. Each begins with the words that the kernel loads
// once.
gpu::CallWords WordsOf(const WaitingCall& waiting) {
  return gpu::LoadCall(waiting.own, waiting.tag);
}
bool HasFailed(const RankWords& own) { return gpu::LoadAcquire(own.failed) != 0; }

void SignalAndAnnounce(const WaitParams& params) {
  gpu::SignalAndAnnounce(params, WordsOf(params.waiting));
}
void WaitForFlags(const WaitParams& params) {
  gpu::WaitForFlags(params, WordsOf(params.waiting));
}
void EndCall(const EndParams& params) { gpu::EndCall(params); }
void FillResults(const EndParams& params) {
  if (HasFailed(params.own)) gpu::FillNan(params.nan_fill);
}
void AnnounceAllReduce(const AllReduceParams& params) {
  gpu::AnnounceAllReduce(params, WordsOf(params.waiting));
}
void AwaitFreeSlots(const AllReduceParams& params) {
  gpu::AwaitFreeSlots(params, WordsOf(params.waiting));
}
void PushPartials(const AllReduceParams& params) {
  if (!HasFailed(params.waiting.own)) gpu::PushPartials(params);
}
void SignalPushed(const AllReduceParams& params) {
  if (HasFailed(params.waiting.own)) return;
  gpu::SignalPushed(params, WordsOf(params.waiting));
}
void AwaitPushed(const AllReduceParams& params) {
  if (HasFailed(params.waiting.own)) return;
  gpu::AwaitPushed(params, WordsOf(params.waiting));
}
void SumPartials(const AllReduceParams& params) {
  if (!HasFailed(params.waiting.own)) gpu::SumPartials(params);
}

constexpr EmulatedKernel kKernels[] = {
    {kSignalKernel, sizeof(SignalParams), Run<gpu::jax_ub_signal, SignalParams>},
    {kEndKernel, sizeof(EndParams), RunPhases<EndParams, EndCall, FillResults>},
    {kWaitKernel, sizeof(WaitParams),
     RunPhases<WaitParams, SignalAndAnnounce, WaitForFlags>},
    {kCheckPartitionKernel, sizeof(PartitionCheckParams),
     Run<gpu::jax_ub_check_partition, PartitionCheckParams>},
    {kFillNanKernel, sizeof(NanFillParams), Run<gpu::jax_ub_fill_nan, NanFillParams>},
    {kSumKernel, sizeof(SumParams), Run<gpu::jax_ub_sum, SumParams>},
    {kCopyKernel, sizeof(CopyParams), Run<gpu::jax_ub_copy, CopyParams>},
    {kTransposeKernel, sizeof(TransposeParams),
     Run<gpu::jax_ub_transpose, TransposeParams>},
    {kBlockScalesKernel, sizeof(BlockScalesParams),
     Run<gpu::jax_ub_block_scales, BlockScalesParams>},
    {kRowAmaxKernel, sizeof(RowScalesParams),
     Run<gpu::jax_ub_row_amax, RowScalesParams>},
    {kConvertRowsKernel, sizeof(RowScalesParams),
     Run<gpu::jax_ub_convert_rows, RowScalesParams>},
    {kAllReduceKernel, sizeof(AllReduceParams),
     RunPhases<AllReduceParams,
               AnnounceAllReduce,
               AwaitFreeSlots,
               PushPartials,
               SignalPushed,
               AwaitPushed,
               SumPartials>},
    {kAnnouncePhase, sizeof(AllReduceParams), Run<AnnounceAllReduce, AllReduceParams>},
    {kAwaitFreePhase, sizeof(AllReduceParams), Run<AwaitFreeSlots, AllReduceParams>},
    {kSignalPhase, sizeof(AllReduceParams), Run<SignalPushed, AllReduceParams>},
    {kAwaitPhase, sizeof(AllReduceParams), Run<AwaitPushed, AllReduceParams>},
    {kMulticastSumKernel, sizeof(MulticastSumParams),
     Run<gpu::jax_ub_multicast_sum, MulticastSumParams>},
};

}  // namespace

const EmulatedKernel* FindEmulatedKernel(std::string_view name) {
  for (const EmulatedKernel& kernel : kKernels) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

}  // namespace jax_ub
