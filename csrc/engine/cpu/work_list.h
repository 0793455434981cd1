// The work units of one collective call: GEMMs, copies and sums, run as one parallel
// job.
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

// to[j][r, c] = round(parts[0][r, c] + parts[1][r, c] + ...), added in f32 in this
// order. All destinations j have the same dtype and get the same values. A destination
// may be exactly the memory of a part.
struct Sum {
  std::vector<ConstMatrix> parts;
  std::vector<Matrix> to;
  int64_t rows = 0;
  int64_t columns = 0;
};

class WorkList {
 public:
  // Adds work: a GEMM, a copy or a sum. Divides a GEMM into units for as many of the
  // `workers` as its size justifies.
  void Add(GemmProblem problem, const Workers& workers);
  void Add(Copy copy);
  void Add(const Sum& sum);

  // Runs one unit, 0 <= unit < num_units(). Units are independent: they may run on any
  // thread and in any order.
  int64_t num_units() const;
  void Run(int64_t unit, Scratch& scratch) const;

  // Sets the call and schedule step under which the units appear in a trace.
  void set_trace(const TraceContext& context, const Step& step) {
    trace_ = context;
    step_ = step;
  }

  // Returns a rough estimate of the run time on one thread, by which the pool decides
  // how many threads to wake.
  double estimated_us() const { return estimated_us_; }

 private:
  // Adds a sum to the last work unit that computes sums or, if this unit would exceed
  // kUnitElements elements, to a new unit. `slice` must not have more elements than
  // that.
  void AddSlice(Sum slice);

  std::vector<std::unique_ptr<GemmPlan>> plans_;
  // The units of GEMM plan i have the numbers [plan_ends_[i - 1], plan_ends_[i]).
  std::vector<int64_t> plan_ends_;
  // Copies and sums. One unit may contain several of them: copy unit i consists of the
  // copies [copy_ends_[i - 1], copy_ends_[i]), and likewise for sums. Units are
  // numbered in the order: units of the plans, copy units, sum units.
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

// Returns a job for the thread pool that runs the units of `work` and owns it.
std::shared_ptr<ParallelJob> MakeJob(WorkList work, ParallelJob::Done done = nullptr);

// Runs all units and waits for them. The calling thread must be allowed to block.
void RunWork(const WorkList& work, ThreadPool& pool);

// The GEMMs of a bulk op, which threads of the pool compute while each rank's thread
// communicates. When a rank has communicated, it calls Wait, which may block.
class ConcurrentWork {
 public:
  ConcurrentWork(WorkList work, ThreadPool& pool);
  // If a thread has begun the work, waits for all units and ignores their exceptions.
  // If no thread has begun it, the work is never run.
  ~ConcurrentWork();
  ConcurrentWork(const ConcurrentWork&) = delete;
  ConcurrentWork& operator=(const ConcurrentWork&) = delete;

  // Queues the work. A thread of the pool begins it, unless Participate or Wait does so
  // first.
  void Start();
  // Runs units on the calling thread, unless another thread has already begun the work.
  // Returns when no unit is left to begin.
  void Participate() noexcept;
  // Waits for all units. Begins them if no other thread has, which happens if the
  // system limits the number of threads. Rethrows an exception of a unit.
  void Wait();

 private:
  ThreadPool& pool_;
  const std::shared_ptr<ParallelJob> job_;
  const std::shared_ptr<std::atomic<bool>> is_begun_;
};

}  // namespace jax_ub
