// Runs the local ranks of a call that sends data through slots (receive buffers). Each
// rank executes its schedule on its own thread of the pool, because it may have to wait
// for its peers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "engine/cpu/collective_call.h"
#include "engine/cpu/thread_pool.h"
#include "engine/cpu/work_list.h"
#include "engine/slot_plans.h"
#include "transport/transport.h"

namespace jax_ub {

// Returns the number and size of the slots (receive buffers) that the call needs.
// Throws UnsupportedError if the op does not support the method.
SlotRequirements SlotRequirementsOf(const CollectiveCall& collective, ThreadPool& pool);

class SlotRun : public std::enable_shared_from_this<SlotRun> {
 public:
  // Callbacks to the owner of the run, which the threads of the ranks call. No callback
  // is called after `done` of the last rank. If `done` is empty, no callback is called
  // after RunAndWait has returned, so callbacks may use local variables of RunAndWait's
  // caller.
  struct Hooks {
    // Returns the transport that exchanges the data of calls[i] with its peers.
    std::function<Transport&(size_t i)> transport;
    // Returns the error that has ended all waits of the transports, or nullptr if no
    // error has occurred.
    std::function<std::exception_ptr()> poison;
    // Called with the first error of a rank or of the concurrent GEMMs of a bulk op.
    // Must end the waits of the other ranks.
    std::function<void(const std::exception_ptr& reason)> fail;
    // Called when calls[i] has ended, with the error of the call or nullptr. Must not
    // throw. May be empty.
    std::function<void(size_t i, const std::exception_ptr& failure, bool is_last)> done;
  };

  SlotRun(std::shared_ptr<const CollectiveCall> collective,
          const SlotRequirements& requirements,
          double timeout_s,
          ThreadPool& pool,
          Hooks hooks);

  // Starts all ranks, and returns without waiting for them. If the op is bulk, the
  // calling thread first computes GEMM units, which do not depend on the communication.
  // If Start throws std::bad_alloc, no rank has started.
  void Start();

  // Runs all ranks and waits for them. The calling thread must be allowed to block,
  // because it runs the ranks for which there is no other thread. Rethrows the first
  // error of a rank. If RunAndWait throws std::bad_alloc, no rank has run.
  void RunAndWait();

 private:
  size_t num_ranks() const { return collective_->calls.size(); }
  Queue<BlockingTask> MakeTasks(size_t num_tasks);
  void RunNextRank() noexcept;
  void RunRank(size_t i);
  template <typename Body>
  std::exception_ptr Try(const Body& body) noexcept;
  void Report(std::exception_ptr& failure) noexcept;

  const std::shared_ptr<const CollectiveCall> collective_;
  const SlotRequirements requirements_;
  const double timeout_s_;
  ThreadPool& pool_;
  const Hooks hooks_;
  std::optional<ConcurrentWork> gemms_;  // of a bulk op
  std::atomic<size_t> next_{0};          // index of the next rank to run
  std::atomic<bool> has_failed_{false};

  std::mutex mutex_;  // guards the members below
  std::condition_variable all_ended_;
  size_t num_left_;
  std::exception_ptr failure_;  // the first one
};

}  // namespace jax_ub
