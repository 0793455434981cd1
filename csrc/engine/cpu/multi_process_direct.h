// The method "direct" for a group that spans processes. Each process copies the data
// that peers need into the shared-memory buffers of the call. The remaining GEMMs and
// sums are those of direct_planner.h, over the results of the local ranks.
//
// Ops that gather: each process copies the shards of its local ranks into their
// buffers. After the arrival barrier, all processes read them there.
//
// Ops that reduce-scatter without a GEMM: the same. The process of the rank that
// receives a block sums it.
//
// matmul_reduce_scatter: a process stores its partial sum, contracted over its local
// ranks, into the buffers of the ranks that own the rows. After the barrier, the owners
// add the partial sums in the order of the processes, then bias and residual, and round
// once.
//
//   buffer of rank q | rows of q by process 0 | by process 1 | ...   f32 [batch, m, N]
//
// Ops that all-reduce: the same, but the rows are divided among the processes. Each
// process stores the sums of its rows after the partial sums in its buffer, and a
// second barrier makes them visible to the other processes. Small all-reduces need no
// second barrier: every process receives the partial sums of all rows and adds them
// itself.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/call.h"
#include "engine/cpu/thread_pool.h"
#include "engine/trace.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {

// Returns the bytes that a call needs in each rank's buffer.
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

// Executes this process's part of a call. The calling thread must be allowed to block.
// `compare_signatures` waits at the arrival barrier, Barrier(number, 0), and throws if
// the processes passed different signatures.
void ExecuteMultiProcess(const MultiProcessCall& call,
                         SharedMemoryCommunicator& communicator,
                         ThreadPool& pool,
                         const std::function<void()>& compare_signatures);

}  // namespace jax_ub
