// The CPU device. Each function returns when its work is done. The threads of the pool
// compute the GEMMs.
#pragma once

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
  int DefaultSplits(CollectiveKind collective) const override { return kDefaultSplits; }

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

}  // namespace jax_ub
