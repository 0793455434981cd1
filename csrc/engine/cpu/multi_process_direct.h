// The method "direct" where the ranks of a group lie in several processes: what peers
// need is put where they can read it, in the buffers of the call; the rest is the
// products and sums of direct.h, over the results of the own ranks.
//
// all_gather kinds: the shards of the own ranks are copied into the own buffers; behind
// the arrival barrier they are read there, wherever they are needed.
// reduce_scatter kinds without a product: the same, and whoever owns a block sums it.
// matmul_reduce_scatter: a process stores its partial sum, contracted over its own
// ranks, into the buffers of the ranks that own the rows; behind the barrier the owners
// add the parts in the order of the processes, then bias and residual, and round once.
//
//   buffer of rank q | rows of q by process 0 | by process 1 | ...   f32 [batch, m, N]
//
// all_reduce kinds: the same for shares of rows, one a process; its sums lie behind the
// parts, where a second barrier makes them visible. Small ones skip that: every process
// gets all parts of everything, and adds for itself.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/call.h"
#include "engine/cpu/thread_pool.h"
#include "engine/trace.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {

// What a call needs of each buffer, in bytes.
int64_t DirectBufferBytes(const CallAttributes& attributes,
                          const RankCall& call,
                          int num_processes);

struct MultiProcessCall {
  const CallAttributes& attributes;
  const std::vector<RankCall>& own;  // of the local ranks, already checked
  int64_t number = 0;                // of the communicator's calls
  double timeout_s = 0;
  TraceContext trace;
};

// Takes this process's part in a call, from a thread that may wait. `meet` is the
// arrival barrier, Barrier(number, 0): it throws when the processes do not agree.
void ExecuteMultiProcess(const MultiProcessCall& call,
                         SharedMemoryCommunicator& communicator,
                         ThreadPool& pool,
                         const std::function<void()>& meet);

}  // namespace jax_ub
