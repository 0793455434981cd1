#include "reduce/reduce.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "gemm/cpu/isa.h"
#include "gemm/views.h"
#include "platform/arithmetic_mode.h"

namespace jax_ub {

void SumChunks(std::span<const ConstMatrix> chunks,
               int64_t rows,
               int64_t columns,
               const Matrix& out) {
  if (chunks.empty()) throw std::invalid_argument("SumChunks: no chunks to sum");
  const bool is_contiguous =
      out.row_stride == columns &&
      std::all_of(chunks.begin(), chunks.end(), [&](const ConstMatrix& chunk) {
        return chunk.row_stride == columns;
      });
  // Contiguous matrices are summed as one long row, because short rows do not fill a
  // vector.
  if (is_contiguous) {
    columns *= rows;
    rows = 1;
  }
  const ArithmeticMode mode;
  std::vector<Summand> summands;
  summands.reserve(chunks.size());
  for (const ConstMatrix& chunk : chunks) {
    const int64_t stride = chunk.row_stride * SizeOf(chunk.dtype);
    summands.push_back({chunk.data, stride, chunk.dtype});
  }
  IsaInUse().general->sum(summands.data(), static_cast<int>(summands.size()), rows,
                          columns, out.data, out.row_stride * SizeOf(out.dtype),
                          out.dtype);
}

void CopyRows(const std::byte* source,
              int64_t source_stride,
              std::byte* target,
              int64_t target_stride,
              int64_t rows,
              int64_t row_bytes) {
  if (source_stride == row_bytes && target_stride == row_bytes) {
    std::memcpy(target, source, rows * row_bytes);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(target + r * target_stride, source + r * source_stride, row_bytes);
  }
}

}  // namespace jax_ub
