// Dense products in device memory, on an emulated driver and an emulated cuBLASLt that
// rejects what the real one rejects.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/random_arena.h"
#include "engine/segments.h"
#include "gemm/cuda/cuda_gemm.h"
#include "platform/cuda/owners.h"

namespace jax_ub {

// A device with a CudaGemm. Its destructor checks that no object is left.
class Fixture {
 public:
  explicit Fixture(EmulatedOptions options = {}) : machine_(options) {}
  ~Fixture() {
    device_.reset();
    CHECK_EQ(machine_.Complaints(), "");
    const EmulatedCublasLtState left = ReadEmulatedCublasLt();
    CHECK_EQ(left.num_handles + left.num_objects, 0);
  }

  CudaGemm& gemm() { return device_->gemm; }
  CUstream stream() const { return device_->stream.get(); }
  EmulatedMachine& machine() { return machine_; }

  // Allocates device memory that is freed with the fixture. The host may access it
  // while no work runs.
  std::byte* Allocate(int64_t size_bytes) {
    device_->memory.emplace_back(EmulatedDriver(), size_bytes);
    return reinterpret_cast<std::byte*>(device_->memory.back().get());
  }
  GemmWorkspace WorkspaceFor(const GemmProblem& problem) {
    const int64_t size_bytes = CudaGemm::WorkspaceBytes(problem);
    return {reinterpret_cast<CUdeviceptr>(Allocate(size_bytes)), size_bytes};
  }
  void Synchronize() {
    Check(EmulatedDriver(), EmulatedDriver().StreamSynchronize(stream()),
          "cuStreamSynchronize");
  }
  void Run(const GemmProblem& problem, const GemmOptions& options = {}) {
    gemm().Enqueue(problem, options, WorkspaceFor(problem), stream());
    Synchronize();
  }

 private:
  struct Device {
    Context context{EmulatedDriver(), 0};
    ScopedContext current{EmulatedDriver(), context.get()};
    SumKernels sums{EmulatedDriver(), context.device()};
    CudaGemm gemm{EmulatedCublasLt(), EmulatedDriver(), sums};
    Stream stream{EmulatedDriver()};
    std::vector<DeviceMemory> memory;
  };

  EmulatedMachine machine_;
  std::unique_ptr<Device> device_ = std::make_unique<Device>();
};

inline int64_t NumMatmuls() { return ReadEmulatedCublasLt().num_matmuls; }
inline int64_t NumHeuristics() { return ReadEmulatedCublasLt().num_heuristics; }

// Dense arrays of small integers: y [batch, M, N] = x [batch, M, K] w [K, N].
struct Layer {
  Tensor x, w, y;

  Layer(Fixture& fixture,
        int64_t batch,
        int64_t m,
        int64_t k,
        int64_t n,
        DType dtype = DType::kBF16,
        DType result_dtype = DType::kBF16) {
    x = Make(fixture, dtype, batch, m, k);
    w = Make(fixture, dtype, 1, k, n);
    y = Make(fixture, result_dtype, batch, m, n);
  }

  // Returns an array of random elements from -2 to 2.
  static Tensor Make(
      Fixture& fixture, DType dtype, int64_t batch, int64_t rows, int64_t features) {
    Tensor tensor{dtype, batch, rows, features, nullptr};
    tensor.data = fixture.Allocate(std::max<int64_t>(tensor.size_bytes(), 1));
    Fill(tensor, static_cast<uint64_t>(rows * 31 + features));
    return tensor;
  }
  static void Fill(const Tensor& tensor, uint64_t seed) {
    Random random(seed);
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      Write(tensor.data + i * SizeOf(tensor.dtype), tensor.dtype,
            static_cast<float>(Pick(random, -2, 2)));
    }
  }

  // Returns the product of rows [begin, begin + rows) of every batch; it adds `times`
  // pairs of the same operands.
  GemmProblem Rows(int64_t begin, int64_t rows, int times = 1) const {
    OperandSegments a(x.dtype);
    OperandSegments b(x.dtype);
    ResultSegments c(y.dtype);
    b.AddOuter(w.features);
    c.AddColumns(w.features);
    for (int i = 0; i < times; ++i) {
      a.AddInner(x.features);
      b.AddInner(x.features);
      b.Append(KernelOf(w, false));
    }
    for (int64_t batch = 0; batch < x.batch; ++batch) {
      a.AddOuter(rows);
      c.AddRows(rows);
      for (int i = 0; i < times; ++i) a.Append(RowsOf(x, batch, begin));
      c.Append(RowsOf(y, batch, begin));
    }
    return Problem(1, std::move(a), std::move(b), std::move(c));
  }
  GemmProblem All(int times = 1) const { return Rows(0, x.rows, times); }

  float Expected(int64_t batch, int64_t m, int64_t n) const {
    float sum = 0;
    for (int64_t k = 0; k < x.features; ++k) {
      sum += ReadAt(x, batch, m, k) * ReadAt(w, 0, k, n);
    }
    return sum;
  }
  static float ReadAt(const Tensor& tensor,
                      int64_t batch,
                      int64_t row,
                      int64_t column) {
    return Read(tensor.At(batch, row) + column * SizeOf(tensor.dtype), tensor.dtype);
  }
};

inline AddendView AddendOf(const Tensor& tensor, const Tensor& y, int64_t begin) {
  AddendView addend{tensor.dtype, {}};
  for (int64_t batch = 0; batch < y.batch; ++batch) {
    const bool is_bias = tensor.rows == 1 && y.rows > 1;
    addend.segments.push_back(
        is_bias ? AddendSegment{tensor.data, 0}
                : AddendSegment{tensor.At(batch, begin), tensor.features});
  }
  return addend;
}

}  // namespace jax_ub
