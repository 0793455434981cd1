// Tests the emulated cuBLASLt: compares products of all layouts with sums in double,
// and checks what it rejects.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"
#include "random_gemm.h"

using namespace jax_ub;

namespace {

const Driver& driver = EmulatedDriver();
const CublasLt& library = EmulatedCublasLt();
using Gpu = EmulatedGpu;
using lt::Status;

// A batch of column-major matrices of small integers, in host memory that devices can
// access.
struct Matrix {
  Matrix(
      DType dtype, int64_t rows, int64_t columns, int64_t gap, int batch, bool repeats)
      : dtype(dtype),
        rows(rows),
        columns(columns),
        leading(rows + gap),
        stride(repeats ? 0 : leading * columns),
        batch(batch),
        memory(driver, leading * columns * batch * SizeOf(dtype)) {
    Check(
        library,
        library.MatrixLayoutCreate(&layout, DataTypeOf(dtype), rows, columns, leading),
        "layout");
    if (batch == 1) return;
    Set(lt::LayoutAttribute::kBatchCount, int32_t{batch});
    Set(lt::LayoutAttribute::kStridedBatchOffset, stride);
  }
  ~Matrix() { library.MatrixLayoutDestroy(layout); }
  Matrix(const Matrix&) = delete;

  template <typename Value>
  void Set(lt::LayoutAttribute attribute, Value value) {
    Check(library,
          library.MatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)),
          "attribute");
  }
  std::byte* At(int64_t b, int64_t row, int64_t column) const {
    return static_cast<std::byte*>(memory.get()) +
           (b * stride + column * leading + row) * SizeOf(dtype);
  }
  float Get(int64_t b, int64_t row, int64_t column) const {
    return Read(At(b, row, column), dtype);
  }
  void Randomize(std::mt19937& random) {
    for (int64_t i = 0; i < leading * columns * batch; ++i) {
      Write(static_cast<std::byte*>(memory.get()) + i * SizeOf(dtype), dtype,
            static_cast<float>(static_cast<int>(random() % 7) - 3));
    }
  }

  DType dtype;
  int64_t rows, columns, leading, stride;
  int batch;
  HostMemory memory;
  lt::Layout layout = nullptr;
};

struct Options {
  DType operands = DType::kBF16;
  DType results = DType::kBF16;
  bool transpose_a = false, transpose_b = false;
  int64_t m = 5, n = 7, k = 9;
  int batch = 1;
  bool repeats_b = false;
  bool has_bias = false;
  float alpha = 1, beta = 0;
  uint64_t workspace_bytes = 0;
  lt::ComputeType compute = lt::ComputeType::k32F;
};

// A product with its descriptors, matrices and workspace.
class Product {
 public:
  explicit Product(const Options& options)
      : o(options),
        a(o.operands,
          o.transpose_a ? o.k : o.m,
          o.transpose_a ? o.m : o.k,
          3,
          o.batch,
          false),
        b(o.operands,
          o.transpose_b ? o.n : o.k,
          o.transpose_b ? o.k : o.n,
          0,
          o.batch,
          o.repeats_b),
        c(o.results, o.m, o.n, 1, o.batch, false),
        d(o.results, o.m, o.n, 2, o.batch, false),
        bias(o.results, o.m, 1, 0, o.batch, false),
        workspace(driver, 8 << 20),
        stream(driver, 0) {
    Check(library, library.Create(&handle), "handle");
    Check(library, library.MatmulDescCreate(&desc, o.compute, lt::DataType::kF32),
          "desc");
    Set(lt::DescAttribute::kTransA, int32_t{o.transpose_a});
    Set(lt::DescAttribute::kTransB, int32_t{o.transpose_b});
    if (o.has_bias) {
      Set(lt::DescAttribute::kEpilogue, static_cast<uint32_t>(lt::Epilogue::kBias));
      Set(lt::DescAttribute::kBiasPointer, static_cast<const void*>(bias.memory.get()));
      Set(lt::DescAttribute::kBiasBatchStride, bias.stride);
    }
    Check(library, library.MatmulPreferenceCreate(&preference), "preference");
    Prefer(lt::PreferenceAttribute::kMaxWorkspaceBytes, o.workspace_bytes);
  }
  ~Product() {
    library.MatmulPreferenceDestroy(preference);
    library.MatmulDescDestroy(desc);
    library.Destroy(handle);
  }
  Product(const Product&) = delete;

  template <typename Value>
  void Set(lt::DescAttribute attribute, Value value) {
    Check(library,
          library.MatmulDescSetAttribute(desc, attribute, &value, sizeof(value)),
          "attribute");
  }
  template <typename Value>
  void Prefer(lt::PreferenceAttribute attribute, Value value) {
    Check(library,
          library.MatmulPreferenceSetAttribute(preference, attribute, &value,
                                               sizeof(value)),
          "attribute");
  }

  Status Find() {
    found = {};
    num_found = 0;
    return library.MatmulAlgoGetHeuristic(handle, desc, a.layout, b.layout, c.layout,
                                          d.layout, preference, 3, found.data(),
                                          &num_found);
  }
  Status Run(int64_t d_offset_bytes = 0, size_t workspace_bytes = 8 << 20) {
    return library.Matmul(handle, desc, &o.alpha, a.memory.get(), a.layout,
                          b.memory.get(), b.layout, &o.beta, c.memory.get(), c.layout,
                          static_cast<std::byte*>(d.memory.get()) + d_offset_bytes,
                          d.layout, &found[0].algorithm,
                          reinterpret_cast<void*>(workspace.get()), workspace_bytes,
                          stream.get());
  }
  double Expected(int64_t i, int64_t row, int64_t column) const {
    double sum = 0;
    for (int64_t p = 0; p < o.k; ++p) {
      sum += double{o.transpose_a ? a.Get(i, p, row) : a.Get(i, row, p)} *
             (o.transpose_b ? b.Get(i, column, p) : b.Get(i, p, column));
    }
    sum *= o.alpha;
    if (o.beta != 0) sum += double{o.beta} * c.Get(i, row, column);
    return o.has_bias ? sum + bias.Get(i, row, 0) : sum;
  }

  const Options o;
  Matrix a, b, c, d, bias;
  DeviceMemory workspace;
  Stream stream;
  lt::Handle handle = nullptr;
  lt::MatmulDesc desc = nullptr;
  lt::Preference preference = nullptr;
  std::array<lt::HeuristicResult, 3> found = {};
  int num_found = 0;
};

// Checks that a product of small integers is exact, in any dtype and order.
void CheckExact(const Options& options, uint64_t seed) {
  Product product(options);
  std::mt19937 random(seed);
  for (Matrix* matrix : {&product.a, &product.b, &product.c, &product.bias}) {
    matrix->Randomize(random);
  }
  CHECK_EQ(static_cast<int>(product.Find()), 0);
  CHECK_EQ(static_cast<int>(product.Run()), 0);
  Gpu::Synchronize(product.stream.get());
  for (int64_t i = 0; i < options.batch; ++i) {
    for (int64_t row = 0; row < options.m; ++row) {
      for (int64_t column = 0; column < options.n; ++column) {
        CHECK_EQ(double{product.d.Get(i, row, column)},
                 product.Expected(i, row, column));
      }
    }
  }
}

bool Is(Status status, Status wanted) { return status == wanted; }

}  // namespace

TEST(ProductsOfAllLayoutsAreExact) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    uint64_t seed = 0;
    const std::vector<std::pair<DType, DType>> dtypes = {{DType::kBF16, DType::kBF16},
                                                         {DType::kBF16, DType::kF32},
                                                         {DType::kF16, DType::kF16},
                                                         {DType::kF16, DType::kF32},
                                                         {DType::kF32, DType::kF32}};
    for (const auto& [operands, results] : dtypes) {
      for (int bits = 0; bits < 32; ++bits) {
        CheckExact({.operands = operands,
                    .results = results,
                    .transpose_a = (bits & 1) != 0,
                    .transpose_b = (bits & 2) != 0,
                    .batch = (bits & 4) != 0 ? 3 : 1,
                    .repeats_b = (bits & 4) != 0,
                    .has_bias = (bits & 8) != 0,
                    .beta = (bits & 16) != 0 ? 1.0f : 0.0f,
                    .workspace_bytes = 1 << 20},
                   ++seed);
      }
    }
  }
  CHECK_EQ(machine.Complaints(), "");
  CHECK_EQ(ReadEmulatedCublasLt().num_objects, 0);
  CHECK_EQ(ReadEmulatedCublasLt().num_handles, 0);
  CHECK_EQ(ReadEmulatedCublasLt().num_matmuls, 160);
}

TEST(Tf32IsOnlyUsedWhereItIsAsked) {
  EmulatedMachine machine;
  const Gpu gpu;
  for (const bool is_tf32 : {false, true}) {
    Product product(
        {.operands = DType::kF32,
         .results = DType::kF32,
         .m = 1,
         .n = 1,
         .k = 1,
         .compute = is_tf32 ? lt::ComputeType::k32FFastTF32 : lt::ComputeType::k32F});
    const float third = 1.0f / 3;
    Write(product.a.At(0, 0, 0), DType::kF32, third);
    Write(product.b.At(0, 0, 0), DType::kF32, 1);
    CHECK(Is(product.Find(), Status::kSuccess));
    CHECK(Is(product.Run(), Status::kSuccess));
    Gpu::Synchronize(product.stream.get());
    CHECK_EQ(product.d.Get(0, 0, 0) == third, !is_tf32);
    CHECK_NEAR(product.d.Get(0, 0, 0), third, std::ldexp(1.0, -12));
  }
}

TEST(AlgorithmsFitTheWorkspaceAndUseIt) {
  EmulatedMachine machine;
  const Gpu gpu;
  for (const auto& [bytes, wanted] :
       std::vector<std::pair<uint64_t, int>>{{0, 1}, {1 << 20, 2}, {4 << 20, 3}}) {
    Product product({.workspace_bytes = bytes});
    CHECK(Is(product.Find(), Status::kSuccess));
    CHECK_EQ(product.num_found, wanted);
    CHECK(product.found[0].workspace_bytes <= bytes);
    if (bytes == 0) continue;
    CHECK(Is(product.Run(0, product.found[0].workspace_bytes - 1),
             Status::kInvalidValue));
    CHECK(Is(product.Run(), Status::kSuccess));
    CHECK(Gpu::Read(product.stream.get(), product.workspace.get(), 4) ==
          std::vector<uint32_t>(4, 0xABABABAB));
  }
}

TEST(AnAlgorithmIsForItsProductAndAlignment) {
  EmulatedMachine machine;
  const Gpu gpu;
  Product product({.m = 4, .has_bias = true});
  CHECK(Is(product.Find(), Status::kSuccess));
  CHECK(Is(product.Run(16), Status::kInvalidValue));
  product.Prefer(lt::PreferenceAttribute::kMinAlignmentD, uint32_t{4});
  CHECK(Is(product.Find(), Status::kSuccess));
  CHECK(Is(product.Run(4), Status::kSuccess));
  product.Set(lt::DescAttribute::kBiasPointer,
              static_cast<const void*>(product.bias.At(0, 1, 0)));
  CHECK(Is(product.Run(), Status::kInvalidValue));
  product.Set(lt::DescAttribute::kBiasPointer,
              static_cast<const void*>(product.bias.At(0, 0, 0)));
  CHECK(Is(product.Find(), Status::kSuccess));
  product.Set(lt::DescAttribute::kEpilogue,
              static_cast<uint32_t>(lt::Epilogue::kDefault));
  CHECK(Is(product.Run(), Status::kInvalidValue));
  Gpu::Synchronize(product.stream.get());
}

TEST(WhatMakesNoSenseOrHasNoKernelIsRefused) {
  EmulatedMachine machine;
  const Gpu gpu;
  CHECK(Is(Product({.operands = DType::kBF16, .results = DType::kF16}).Find(),
           Status::kNotSupported));
  CHECK(Is(Product({.operands = DType::kF32, .results = DType::kBF16}).Find(),
           Status::kNotSupported));
  CHECK(Is(Product({.compute = lt::ComputeType::k32FFastTF32}).Find(),
           Status::kNotSupported));
  Product product({});
  product.Set(lt::DescAttribute::kTransA, int32_t{1});
  CHECK(Is(product.Find(), Status::kInvalidValue));
  product.Set(lt::DescAttribute::kTransA, int32_t{0});
  product.Set(lt::DescAttribute::kEpilogue, uint32_t{2});
  CHECK(Is(product.Find(), Status::kNotSupported));
  product.Set(lt::DescAttribute::kEpilogue, static_cast<uint32_t>(lt::Epilogue::kBias));
  product.Set(lt::DescAttribute::kBiasDataType,
              static_cast<int32_t>(lt::DataType::kF16));
  CHECK(Is(product.Find(), Status::kNotSupported));
  const int32_t small = 0;
  CHECK(Is(library.MatmulDescSetAttribute(product.desc, lt::DescAttribute::kBiasPointer,
                                          &small, sizeof(small)),
           Status::kInvalidValue));
  Product batched({.batch = 2});
  batched.a.Set(lt::LayoutAttribute::kBatchCount, int32_t{3});
  CHECK(Is(batched.Find(), Status::kInvalidValue));
  RefuseEmulatedMatmuls(true, Status::kInternalError);
  Product refused({});
  CHECK(Is(refused.Find(), Status::kNotSupported));
  CHECK_EQ(refused.num_found, 0);
  CHECK(Is(refused.Run(), Status::kInternalError));
  RefuseEmulatedMatmuls(false);
}

TEST(BiasesAndASeparateCNeedMoreAlignment) {
  EmulatedMachine machine;
  const Gpu gpu;
  const auto finds = [](DType results, bool has_bias, uint32_t c_alignment,
                        uint32_t d_alignment, uint64_t bias_alignment) {
    Product product({.results = results, .has_bias = has_bias});
    product.c.Set(lt::LayoutAttribute::kStridedBatchOffset, product.d.stride);
    product.Prefer(lt::PreferenceAttribute::kMinAlignmentC, c_alignment);
    product.Prefer(lt::PreferenceAttribute::kMinAlignmentD, d_alignment);
    product.Set(lt::DescAttribute::kBiasPointer,
                reinterpret_cast<const void*>(bias_alignment));
    return Is(product.Find(), Status::kSuccess);
  };
  CHECK(finds(DType::kBF16, true, 16, 16, 16));
  CHECK(!finds(DType::kBF16, true, 16, 16, 8));
  CHECK(!finds(DType::kBF16, true, 2, 2, 16));
  CHECK(finds(DType::kBF16, false, 16, 4, 0));
  CHECK(!finds(DType::kBF16, false, 16, 2, 0));
  CHECK(!finds(DType::kF32, false, 16, 4, 0));
}

TEST(AnAlgorithmsFirstMatmulLoadsItsKernels) {
  EmulatedMachine machine;
  const Gpu gpu;
  Product product({.operands = DType::kF32, .results = DType::kF32});
  CHECK(Is(product.Find(), Status::kSuccess));
  for (int i = 0; i < 2; ++i) {
    const EmulatedLaunchesOnly nothing_loads;
    CHECK(Is(product.Run(), Status::kSuccess));
  }
  Gpu::Synchronize(product.stream.get());
  CHECK_EQ(machine.Violations().size(), 1u);
  CHECK_EQ(machine.Violations()[0],
           "cublasLtMatmul loads lazily while a peer may spin");
}

TEST(MatmulsComeInTheOrderOfTheirStreamAndAreCaptured) {
  EmulatedMachine machine({.max_delay_us = 500});
  const Gpu gpu;
  Product product({.operands = DType::kF32, .results = DType::kF32});
  CHECK(Is(product.Find(), Status::kSuccess));
  const auto floats = [](float value) { return std::bit_cast<uint32_t>(value); };
  const CUstream stream = product.stream.get();
  const auto enqueue = [&] {
    Gpu::Fill(stream, product.a.memory.device(), floats(1),
              product.a.leading * product.a.columns);
    Gpu::Fill(stream, product.b.memory.device(), floats(2),
              product.b.leading * product.b.columns);
    CHECK(Is(product.Run(), Status::kSuccess));
    Gpu::Fill(stream, product.a.memory.device(), floats(7), product.a.leading);
  };
  enqueue();
  Gpu::Synchronize(stream);
  CHECK_EQ(product.d.Get(0, 0, 0), 18.0f);
  Gpu::Fill(stream, product.d.memory.device(), 0,
            product.d.leading * product.d.columns);
  Gpu::Synchronize(stream);
  Check(driver, driver.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        "begin");
  enqueue();
  CUgraph graph = nullptr;
  Check(driver, driver.StreamEndCapture(stream, &graph), "end");
  CUgraphExec exec = nullptr;
  Check(driver, driver.GraphInstantiate(&exec, graph, 0), "instantiate");
  CHECK_EQ(product.d.Get(0, 4, 6), 0.0f);
  Check(driver, driver.GraphLaunch(exec, stream), "launch");
  Gpu::Synchronize(stream);
  CHECK_EQ(product.d.Get(0, 4, 6), 18.0f);
  Check(driver, driver.GraphExecDestroy(exec), "destroy");
  Check(driver, driver.GraphDestroy(graph), "destroy");
}

TEST(AMatmulTouchesOnlyWhatItsDeviceReaches) {
  EmulatedMachine machine({.num_devices = 2});
  const Gpu other(1);
  const DeviceMemory elsewhere(driver, 4096);
  const Gpu gpu(0);
  Product product({});
  CHECK(Is(product.Find(), Status::kSuccess));
  CHECK(Is(
      library.Matmul(product.handle, product.desc, &product.o.alpha,
                     reinterpret_cast<void*>(elsewhere.get()), product.a.layout,
                     product.b.memory.get(), product.b.layout, &product.o.beta, nullptr,
                     product.c.layout, product.d.memory.get(), product.d.layout,
                     &product.found[0].algorithm, nullptr, 0, product.stream.get()),
      Status::kExecutionFailed));
  CHECK_EQ(machine.Violations().size(), 1u);
}

CHECK_MAIN()
