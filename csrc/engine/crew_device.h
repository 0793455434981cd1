// The CPU as a device: everything is done when a function returns, products by the crew.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/crew.h"
#include "engine/device.h"
#include "engine/trace.h"
#include "engine/work.h"

namespace jax_ub {

class CrewDevice : public Device {
 public:
  explicit CrewDevice(Crew& crew, const TraceContext& trace = {})
      : crew_(crew), trace_(trace) {}

  int num_product_lanes() const override { return 1; }
  bool enqueues() const override { return false; }
  DType PartialDType(const Attributes& attributes,
                     const RankCall& call) const override {
    return DType::kF32;
  }
  int DefaultSplits(Pattern pattern) const override;

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

  Mark Record(Lane lane) override { return kNoMark; }
  void Await(Lane lane, Mark mark) override {}

 private:
  Crew& crew_;
  const TraceContext trace_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

// Work as a job that its rank waits for.
class WorkJob : public WaitedJob {
 public:
  explicit WorkJob(Work work)
      : WaitedJob(work.estimated_us()), work_(std::move(work)) {}
  int64_t num_units() const override { return work_.num_units(); }
  void Run(int64_t unit, Scratch& scratch) override { work_.Run(unit, scratch); }

 private:
  const Work work_;
};

// Returns when the work is done; from a thread that may wait.
void RunWork(Work work, Crew& crew);

// Work that a run does beside what the caller does, who may wait.
class WorkBeside {
 public:
  WorkBeside(Work work, Crew& crew);
  ~WorkBeside();  // Wait, whatever a unit threw
  WorkBeside(const WorkBeside&) = delete;
  WorkBeside& operator=(const WorkBeside&) = delete;

  // Returns when it is done, by this thread where no other one has come for it: at the
  // system's limit of threads none does. Throws what a unit threw.
  void Wait();

 private:
  Crew& crew_;
  const std::shared_ptr<WorkJob> job_;
  const std::shared_ptr<std::atomic<bool>> is_begun_;
};

}  // namespace jax_ub
