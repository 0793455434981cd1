// Tests the emulated cuBLASLt: compares products of all layouts with sums in double,
// and checks what it rejects.
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/library_calls.h"

using namespace jax_ub;
using namespace jax_ub::library_calls;

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
                    .workspace_bytes = 64 << 10},
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
       std::vector<std::pair<uint64_t, int>>{{0, 1}, {64 << 10, 2}, {256 << 10, 3}}) {
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

TEST(MatmulsRunInTheOrderOfTheirStreamAndAreCaptured) {
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
