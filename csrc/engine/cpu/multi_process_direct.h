// The method "direct" for a group that spans processes. Each process copies the data
// that its peers need into shared buffers. It then computes the GEMMs and sums of
// direct_planner.h for the results of its local ranks.
//
// Gathers: after the arrival barrier, a process reads the shards in the buffers of its
// peers. Reduce-scatters without a GEMM: each block is summed by the process of the
// rank that receives the block.
//
// matmul_reduce_scatter: a process stores its partial sum over its local ranks in the
// buffers of the ranks that own the rows. After the barrier, the owners add the partial
// sums in process order, then bias and residual, and round once.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/call.h"
#include "engine/cpu/thread_pool.h"
#include "engine/trace.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {

// Returns the size in bytes of the shared buffer of each rank in a call. Processes
// exchange operands or partial sums through these buffers.
int64_t DirectBufferBytes(const CallAttributes& attributes,
                          const RankCall& call,
                          int num_processes);

struct MultiProcessCall {
  const CallAttributes& attributes;
  const std::vector<RankCall>& local;  // of the local ranks, checked by CheckCall
  int64_t number = 0;                  // index of the call in the communicator
  double timeout_s = 0;
  TraceContext trace;
};

// Executes a call for the ranks of this process. May block. `compare_signatures` must
// wait at the arrival barrier, Barrier(number, 0), and throw if the processes have
// different call signatures.
void ExecuteMultiProcess(const MultiProcessCall& call,
                         SharedMemoryCommunicator& communicator,
                         ThreadPool& pool,
                         const std::function<void()>& compare_signatures);

}  // namespace jax_ub
