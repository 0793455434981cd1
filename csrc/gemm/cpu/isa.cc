#include "gemm/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <stdexcept>
#include <string>

#include "gemm/gemm.h"

namespace jax_ub {

namespace {

bool Always() { return true; }

#if defined(__x86_64__)
bool HasAvx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

bool HasAvx512Vbmi() { return HasAvx512() && __builtin_cpu_supports("avx512vbmi"); }

// The AVX512_BF16 kernels also use VBMI. Among the processors with AVX512_BF16, only
// Cooper Lake lacks VBMI.
bool HasAvx512Bf16() { return HasAvx512Vbmi() && __builtin_cpu_supports("avx512bf16"); }

// Returns whether this process can use AMX BF16. Linux lets a process use the tile
// registers only after it has requested permission.
bool HasAmxBf16() {
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  if (!HasAvx512Bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) ||
      (edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The instruction sets that have kernels, from oldest to newest. Each row has the
// kernels for all dtypes, the kernels for operands whose values bf16 represents
// exactly, and a function that returns whether this machine can run both. The name of
// an instruction set is KernelSet::isa of the second kernels, because they use its
// newest instructions.
constexpr Isa kIsas[] = {
    {&kPortableKernels, &kPortableKernels, Always},
#if defined(__x86_64__)
    {&kAvx2Kernels, &kAvx2Kernels, HasAvx2},
    {&kAvx512Kernels, &kAvx512Kernels, HasAvx512},
    {&kAvx512VbmiKernels, &kAvx512VbmiKernels, HasAvx512Vbmi},
    {&kAvx512VbmiKernels, &kAvx512Bf16Kernels, HasAvx512Bf16},
    {&kAvx512VbmiKernels, &kAmxBf16Kernels, HasAmxBf16},
#endif
};

// Returns the newest available instruction set. Never returns AVX512_BF16 on Intel's
// processors, where it is slower than f32 multiply-adds: vdpbf16ps adds twice as many
// products, but only a quarter as many instructions start per cycle (measured with
// gemm_bench on a Xeon that has AMX disabled).
const Isa& FastestIsa() {
  const Isa* fastest = &kIsas[0];
  for (const Isa& isa : kIsas) {
#if defined(__x86_64__)
    if (isa.bf16 == &kAvx512Bf16Kernels && __builtin_cpu_is("intel")) continue;
#endif
    if (isa.is_available()) fastest = &isa;
  }
  return *fastest;
}

// The selected instruction set, or null before its first use. Loads and stores need no
// memory order, because it points to constant data.
constinit std::atomic<const Isa*> isa_in_use = nullptr;

}  // namespace

const Isa& IsaInUse() {
  const Isa* isa = isa_in_use.load(std::memory_order_relaxed);
  if (isa == nullptr) {
    isa = &FastestIsa();
    isa_in_use.store(isa, std::memory_order_relaxed);
  }
  return *isa;
}

std::vector<std::string_view> AvailableIsas() {
  std::vector<std::string_view> names;
  for (const Isa& isa : kIsas) {
    if (isa.is_available()) names.push_back(isa.bf16->isa);
  }
  return names;
}

std::string_view CurrentIsa() { return IsaInUse().bf16->isa; }

void SetIsa(std::string_view name) {
  std::string available;
  for (const Isa& isa : kIsas) {
    if (!isa.is_available()) continue;
    if (name == isa.bf16->isa) {
      isa_in_use.store(&isa, std::memory_order_relaxed);
      return;
    }
    available.append(available.empty() ? "" : ", ").append(isa.bf16->isa);
  }
  throw std::invalid_argument("instruction set '" + std::string(name) +
                              "' is not available here; choose one of: " + available);
}

}  // namespace jax_ub
