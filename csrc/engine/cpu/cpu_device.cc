#include "engine/cpu/cpu_device.h"

#include <utility>

#include "reduce/reduce.h"

namespace jax_ub {

Tensor CpuDevice::Allocate(DType dtype, int64_t batch, int64_t rows, int64_t features) {
  Tensor tensor{dtype, batch, rows, features, nullptr};
  // The memory is allocated before push_back, so that it has an owner if push_back
  // throws.
  auto memory = std::make_unique_for_overwrite<std::byte[]>(tensor.size_bytes());
  memory_.push_back(std::move(memory));
  tensor.data = memory_.back().get();
  return tensor;
}

void CpuDevice::Multiply(Lane lane,
                         std::vector<GemmProblem> problems,
                         const Step& step) {
  WorkList work;
  for (GemmProblem& problem : problems) {
    work.Add(std::move(problem), pool_.workers());
  }
  work.set_trace(trace_, step);
  RunWork(work, pool_);
}

void CpuDevice::Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) {
  CopyRows(from.data, from.stride_bytes, to, to_stride, from.num_rows, from.row_bytes);
}

void CpuDevice::Sum(Lane lane,
                    std::span<const ConstMatrix> parts,
                    int64_t rows,
                    int64_t columns,
                    const Matrix& out) {
  SumChunks(parts, rows, columns, out);
}

}  // namespace jax_ub
