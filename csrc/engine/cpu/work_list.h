// The work units of one collective call: GEMMs, copies and sums. They run as one
// parallel job of the thread pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/cpu/thread_pool.h"
#include "engine/trace.h"
#include "gemm/gemm.h"
#include "reduce/reduce.h"

namespace jax_ub {

// A copy of `size_bytes` contiguous bytes, as part of a work unit.
struct Copy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t size_bytes = 0;
};

// A sum of matrices: to[j][r, c] = round(parts[0][r, c] + parts[1][r, c] + ...), added
// in f32 in this order. All destinations j have the same dtype and get the same values.
// A destination may be exactly the memory of a part, but may not overlap a part
// otherwise.
struct Sum {
  std::vector<ConstMatrix> parts;
  std::vector<Matrix> to;
  int64_t rows = 0;
  int64_t columns = 0;
};

class WorkList {
 public:
  // Adds a GEMM, a copy or a sum. A GEMM is divided into units for as many of the
  // `workers` as its estimated time allows.
  void Add(GemmProblem problem, const Workers& workers);
  void Add(Copy copy);
  void Add(const Sum& sum);

  // Run computes one unit, 0 <= unit < num_units(). Units are independent, so they may
  // run on any thread and in any order.
  int64_t num_units() const;
  void Run(int64_t unit, Scratch& scratch) const;

  // Sets the call and schedule step under which the units appear in a trace.
  void set_trace(const TraceContext& context, const Step& step) {
    trace_ = context;
    step_ = step;
  }

  // Returns a rough estimate of the run time on one thread. The pool uses it to decide
  // how many threads to wake.
  double estimated_us() const { return estimated_us_; }

 private:
  // Adds a sum of at most kUnitElements elements to the last work unit of sums. If the
  // unit would then exceed kUnitElements elements, the sum gets a new unit.
  void AddSlice(Sum slice);

  std::vector<std::unique_ptr<GemmPlan>> plans_;
  // GEMM plan i has the units [plan_ends_[i - 1], plan_ends_[i]).
  std::vector<int64_t> plan_ends_;
  // A unit may contain several copies or several sums. Copy unit i contains the copies
  // [copy_ends_[i - 1], copy_ends_[i]); the same holds for sums. The units of GEMM
  // plans have the lowest numbers, followed by copy units and sum units.
  std::vector<Copy> copies_;
  std::vector<size_t> copy_ends_;
  std::vector<Sum> sums_;
  std::vector<size_t> sum_ends_;
  int64_t copy_unit_bytes_ = 0;  // size of the last copy unit so far
  int64_t sum_unit_elements_ = 0;
  double estimated_us_ = 0;
  TraceContext trace_;
  Step step_;
};

// Returns a job for the thread pool that owns `work` and runs its units.
std::shared_ptr<ParallelJob> MakeJob(WorkList work, ParallelJob::Done done = nullptr);

// Runs all units of `work` and waits for them. The calling thread must be allowed to
// block.
void RunWork(const WorkList& work, ThreadPool& pool);

// The GEMMs of a bulk op. Threads of the pool compute them while each rank's thread
// communicates. After its communication, a rank's thread calls Wait, which may block.
class ConcurrentWork {
 public:
  ConcurrentWork(WorkList work, ThreadPool& pool);
  // If a thread has begun the work, waits for all units and ignores their exceptions.
  // Otherwise, the work is never run.
  ~ConcurrentWork();
  ConcurrentWork(const ConcurrentWork&) = delete;
  ConcurrentWork& operator=(const ConcurrentWork&) = delete;

  // Queues the work. A thread of the pool begins the work, unless Participate or Wait
  // begins it first.
  void Start();
  // Runs units on the calling thread, unless another thread has already begun the work.
  // Returns when no unit is left to begin.
  void Participate() noexcept;
  // Waits for all units. Begins the work if no other thread has begun it, which happens
  // if the system limits the number of threads. Rethrows the exception of a unit.
  void Wait();

 private:
  ThreadPool& pool_;
  const std::shared_ptr<ParallelJob> job_;
  const std::shared_ptr<std::atomic<bool>> is_begun_;
};

}  // namespace jax_ub
