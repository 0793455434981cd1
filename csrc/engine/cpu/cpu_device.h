// The CPU device. Every function returns when its work is done. The thread pool
// computes the GEMMs.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/cpu/thread_pool.h"
#include "engine/cpu/work_list.h"
#include "engine/device.h"
#include "engine/trace.h"

namespace jax_ub {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(ThreadPool& pool, const TraceContext& trace = {})
      : pool_(pool), trace_(trace) {}

  int num_product_lanes() const override { return 1; }
  bool enqueues() const override { return false; }
  DType PartialDType(const CallAttributes& attributes,
                     const RankCall& call) const override {
    return DType::kF32;
  }
  int DefaultSplits(CollectiveKind pattern) const override;

  Tensor Allocate(DType dtype, int64_t batch, int64_t rows, int64_t features) override;

  void Multiply(Lane lane,
                std::vector<GemmProblem> problems,
                const Step& step) override;
  void Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) override;
  void Sum(Lane lane,
           std::span<const ConstMatrix> parts,
           int64_t rows,
           int64_t columns,
           const Matrix& out) override;

  EventId Record(Lane lane) override { return kNoEvent; }
  void Await(Lane lane, EventId event) override {}

 private:
  ThreadPool& pool_;
  const TraceContext trace_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

// A work list as a job that its rank waits for.
class WorkListJob : public WaitedJob {
 public:
  explicit WorkListJob(WorkList work)
      : WaitedJob(work.estimated_us()), work_(std::move(work)) {}
  int64_t num_units() const override { return work_.num_units(); }
  void Run(int64_t unit, Scratch& scratch) override { work_.Run(unit, scratch); }

 private:
  const WorkList work_;
};

// Runs the work and waits for it. The calling thread must be allowed to block.
void RunWork(WorkList work, ThreadPool& pool);

// Runs work concurrently with the calling thread, which must be allowed to block in
// Wait.
class ConcurrentWork {
 public:
  ConcurrentWork(WorkList work, ThreadPool& pool);
  ~ConcurrentWork();  // waits; ignores exceptions of the units
  ConcurrentWork(const ConcurrentWork&) = delete;
  ConcurrentWork& operator=(const ConcurrentWork&) = delete;

  // Waits for the work. If no other thread has begun it, as at the system's limit of
  // threads, the calling thread runs it. Rethrows the exception of a unit.
  void Wait();

 private:
  ThreadPool& pool_;
  const std::shared_ptr<WorkListJob> job_;
  const std::shared_ptr<std::atomic<bool>> is_begun_;
};

}  // namespace jax_ub
