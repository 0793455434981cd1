// Runs the project's kernels on the host: compiles their sources as C++, and replaces the few PTX instructions by std::atomic_ref. Tests without a GPU
// therefore run the kernels' own source, and ThreadSanitizer detects accesses that a
// missing wait leaves unordered.
#pragma once

#include <cstddef>
#include <string_view>

namespace jax_ub {

struct EmulatedKernel {
  std::string_view name;
  size_t params_bytes = 0;  // of its one argument
  // Runs all threads of the kernel in the calling thread, each block from the last
  // thread to the first, as SyncWarp in jax_ub_end requires. Returns when the kernel
  // ends. Throws std::logic_error for an address with less alignment than the launcher
  // states.
  void (*run)(const void* params, unsigned num_blocks, unsigned num_threads) = nullptr;
};

// Phases of jax_ub_all_reduce, which exchange its flags. protocol_model.h runs them as
// kernels of their own.
inline constexpr char kAnnouncePhase[] = "jax_ub_all_reduce: announce";
inline constexpr char kAwaitFreePhase[] = "jax_ub_all_reduce: await free slots";
inline constexpr char kSignalPhase[] = "jax_ub_all_reduce: signal";
inline constexpr char kAwaitPhase[] = "jax_ub_all_reduce: await partial sums";

// Returns the kernel with this name, or nullptr. Its parameters contain addresses of
// this process.
const EmulatedKernel* FindEmulatedKernel(std::string_view name);

}  // namespace jax_ub
