#include "engine/crew_device.h"

#include <utility>

#include "reduce/reduce.h"

namespace jax_ub {

namespace {

// Pieces of a shard when the caller leaves it to the engine: enough that all but a
// quarter of the communication can hide.
constexpr int kDefaultSplits = 4;

}  // namespace

int CrewDevice::DefaultSplits(Pattern pattern) const { return kDefaultSplits; }

Tensor CrewDevice::Allocate(DType dtype,
                            int64_t batch,
                            int64_t rows,
                            int64_t features) {
  Tensor tensor{dtype, batch, rows, features, nullptr};
  memory_.emplace_back(new std::byte[tensor.size_bytes()]);
  tensor.data = memory_.back().get();
  return tensor;
}

void CrewDevice::Multiply(Lane lane,
                          std::vector<GemmProblem> problems,
                          const Step& step) {
  Work work;
  for (GemmProblem& problem : problems) {
    work.Add(std::move(problem), crew_.workers());
  }
  work.set_trace(trace_, step);
  RunWork(std::move(work), crew_);
}

void CrewDevice::Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) {
  CopyRows(from.data, from.stride_bytes, to, to_stride, from.num_rows, from.row_bytes);
}

void CrewDevice::Sum(Lane lane,
                     std::span<const ConstMatrix> parts,
                     int64_t rows,
                     int64_t columns,
                     const Matrix& out) {
  SumChunks(parts, rows, columns, out);
}

void RunWork(Work work, Crew& crew) {
  const bool small = work.estimated_us() < kInlineUs;
  const auto job = std::make_shared<WorkJob>(std::move(work));
  if (small) {
    crew.RunInline(*job);
    job->Wait();
  } else {
    crew.RunAndWait(job);
  }
}

WorkBeside::WorkBeside(Work work, Crew& crew)
    : crew_(crew),
      job_(std::make_shared<WorkJob>(std::move(work))),
      is_begun_(std::make_shared<std::atomic<bool>>(false)) {
  crew.Start([&crew, job = job_, is_begun = is_begun_] {
    if (!is_begun->exchange(true)) crew.Help(job);
  });
}

WorkBeside::~WorkBeside() {
  try {
    Wait();
  } catch (...) {
    // Told by the Wait before; or less than what has ended the caller.
  }
}

void WorkBeside::Wait() {
  if (!is_begun_->exchange(true)) crew_.Help(job_);
  job_->Wait();
}

}  // namespace jax_ub
