#include "engine/cpu/work_list.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "reduce/reduce.h"

namespace jax_ub {

namespace {

// Maximum size of a work unit that copies (in bytes) or sums (in elements). Such a unit
// takes some tens of microseconds.
constexpr int64_t kUnitBytes = 256 << 10;
constexpr int64_t kUnitElements = 32 << 10;

// Throughput of copies and sums on one thread, estimated low. The pool decides from it
// how many threads to wake.
constexpr double kCopyBytesPerUs = 5e3;
constexpr double kSumBytesPerUs = 3e3;

// Advances the data pointer of a matrix to element (row, column).
void Advance(auto& matrix, int64_t row, int64_t column) {
  matrix.data += (row * matrix.row_stride + column) * SizeOf(matrix.dtype);
}

void RunSum(const Sum& sum) {
  const Matrix& first = sum.to[0];
  SumChunks(sum.parts, sum.rows, sum.columns, first);
  const int64_t element_bytes = SizeOf(first.dtype);
  for (size_t i = 1; i < sum.to.size(); ++i) {
    CopyRows(first.data, first.row_stride * element_bytes, sum.to[i].data,
             sum.to[i].row_stride * element_bytes, sum.rows,
             sum.columns * element_bytes);
  }
}

}  // namespace

void WorkList::Add(GemmProblem problem, const Workers& workers) {
  const double us = EstimateGemmUs(problem);
  const int num_workers = std::min(WorkersFor(us), workers.num);
  estimated_us_ += us;
  plans_.push_back(PlanGemm(std::move(problem), {num_workers, workers.blockings}));
  const int64_t begin = plan_ends_.empty() ? 0 : plan_ends_.back();
  plan_ends_.push_back(begin + plans_.back()->num_units());
}

void WorkList::Add(Copy copy) {
  estimated_us_ += static_cast<double>(copy.size_bytes) / kCopyBytesPerUs;
  while (copy.size_bytes > 0) {
    if (copy_ends_.empty() || copy_unit_bytes_ == kUnitBytes) {
      copy_ends_.push_back(copies_.size());
      copy_unit_bytes_ = 0;
    }
    const int64_t slice = std::min(copy.size_bytes, kUnitBytes - copy_unit_bytes_);
    copies_.push_back({copy.from, copy.to, slice});
    copy_ends_.back() = copies_.size();
    copy_unit_bytes_ += slice;
    copy.from += slice;
    copy.to += slice;
    copy.size_bytes -= slice;
  }
}

void WorkList::Add(const Sum& sum) {
  int64_t element_bytes = 0;
  for (const ConstMatrix& part : sum.parts) element_bytes += SizeOf(part.dtype);
  for (const Matrix& to : sum.to) element_bytes += SizeOf(to.dtype);
  estimated_us_ +=
      static_cast<double>(sum.rows * sum.columns * element_bytes) / kSumBytesPerUs;
  // Divides the sum into slices of at most kUnitElements elements. A slice consists of
  // whole rows, or of a part of one row.
  const int64_t num_rows = std::max<int64_t>(kUnitElements / sum.columns, 1);
  for (int64_t row = 0; row < sum.rows; row += num_rows) {
    for (int64_t column = 0; column < sum.columns; column += kUnitElements) {
      Sum slice = sum;
      slice.rows = std::min(num_rows, sum.rows - row);
      slice.columns = std::min(kUnitElements, sum.columns - column);
      for (ConstMatrix& part : slice.parts) Advance(part, row, column);
      for (Matrix& to : slice.to) Advance(to, row, column);
      AddSlice(std::move(slice));
    }
  }
}

void WorkList::AddSlice(Sum slice) {
  const int64_t num_elements = slice.rows * slice.columns;
  if (sum_ends_.empty() || sum_unit_elements_ + num_elements > kUnitElements) {
    sum_ends_.push_back(0);
    sum_unit_elements_ = 0;
  }
  sum_unit_elements_ += num_elements;
  sums_.push_back(std::move(slice));
  sum_ends_.back() = sums_.size();
}

int64_t WorkList::num_units() const {
  return (plan_ends_.empty() ? 0 : plan_ends_.back()) +
         static_cast<int64_t>(copy_ends_.size() + sum_ends_.size());
}

void WorkList::Run(int64_t unit, Scratch& scratch) const {
  const auto plan = std::upper_bound(plan_ends_.begin(), plan_ends_.end(), unit);
  const size_t i = plan - plan_ends_.begin();
  const int64_t rest = unit - (i == 0 ? 0 : plan_ends_[i - 1]);
  if (plan != plan_ends_.end()) {
    const TraceScope scope(trace_, TraceKind::kUnit, step_);
    return plans_[i]->Run(rest, scratch);
  }
  size_t block = static_cast<size_t>(rest);
  if (block < copy_ends_.size()) {
    const TraceScope scope(trace_, TraceKind::kCopy, step_);
    for (size_t c = block == 0 ? 0 : copy_ends_[block - 1]; c < copy_ends_[block];
         ++c) {
      std::memcpy(copies_[c].to, copies_[c].from, copies_[c].size_bytes);
    }
    return;
  }
  block -= copy_ends_.size();
  const TraceScope scope(trace_, TraceKind::kReduce, step_);
  for (size_t s = block == 0 ? 0 : sum_ends_[block - 1]; s < sum_ends_[block]; ++s) {
    RunSum(sums_[s]);
  }
}

std::shared_ptr<ParallelJob> MakeJob(WorkList work, ParallelJob::Done done) {
  const int64_t num_units = work.num_units();
  const double estimated_us = work.estimated_us();
  return std::make_shared<ParallelJob>(
      num_units,
      [work = std::make_shared<const WorkList>(std::move(work))](
          int64_t unit, Scratch& scratch) { work->Run(unit, scratch); },
      estimated_us, std::move(done));
}

void RunWork(const WorkList& work, ThreadPool& pool) {
  pool.ParallelFor(
      work.num_units(),
      [&](int64_t unit, Scratch& scratch) { work.Run(unit, scratch); },
      work.estimated_us());
}

ConcurrentWork::ConcurrentWork(WorkList work, ThreadPool& pool)
    : pool_(pool),
      job_(MakeJob(std::move(work))),
      is_begun_(std::make_shared<std::atomic<bool>>(false)) {}

ConcurrentWork::~ConcurrentWork() {
  if (!is_begun_->exchange(true)) return;
  try {
    job_->Wait();
  } catch (...) {
    // A destructor must not throw, so the exception is ignored. Either Wait has
    // reported it, or the caller already ends with another error.
  }
}

void ConcurrentWork::Start() {
  pool_.SubmitBlocking([&pool = pool_, job = job_, is_begun = is_begun_] {
    if (!is_begun->exchange(true)) pool.Participate(job);
  });
}

void ConcurrentWork::Participate() noexcept {
  if (!is_begun_->exchange(true)) pool_.Participate(job_);
}

void ConcurrentWork::Wait() {
  Participate();
  job_->Wait();
}

}  // namespace jax_ub
