// Tests GEMMs in device memory, on an emulated driver and an emulated cuBLASLt that
// rejects what the real one rejects: values, numbers of calls, and errors.
#include "gemm/cuda/cuda_gemm.h"

#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/random_arena.h"
#include "engine/segments.h"
#include "platform/cuda/owners.h"
#include "platform/error.h"

namespace jax_ub {
namespace {

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

int64_t NumMatmuls() { return ReadEmulatedCublasLt().num_matmuls; }
int64_t NumHeuristics() { return ReadEmulatedCublasLt().num_heuristics; }

// The layouts and dtypes of a problem whose arrays have one segment each.
using Kind = std::tuple<bool, bool, DType, DType>;

void CompareRandomProblems(Values values, uint64_t first_seed, int num_problems) {
  std::set<Kind> kinds;
  for (int block = 0; block < num_problems / 50; ++block) {
    Fixture fixture({.seed = first_seed, .max_delay_us = block % 2 ? 20 : 0});
    for (uint64_t i = 0; i < 50; ++i) {
      const uint64_t seed = first_seed + block * 50 + i;
      Random random(seed);
      const auto gemm = MakeDeviceGemm(seed, values);
      MoveInto(fixture.Allocate(ArenaBytes(*gemm)), random, *gemm);
      const GemmProblem& problem = gemm->problem;
      fixture.Run(problem, {.sm_target = 130, .algorithm = static_cast<int>(i % 3)});
      const int64_t num_wrong = CountWrong(*gemm, values);
      if (num_wrong != 0) {
        check::Fail(__FILE__, __LINE__, "seed ", seed, ": ", num_wrong, " wrong");
      }
      kinds.insert({problem.a.segments[0].inner_stride == 1,
                    problem.b.segments[0].inner_stride == 1, problem.a.dtype,
                    problem.c.dtype});
    }
  }
  CHECK_EQ(kinds.size(), size_t{2 * 2 * 3 * 3});
}

TEST(products_of_small_integers_are_exact) {
  CompareRandomProblems(Values::kIntegers, 1, 300);
}

TEST(products_of_normal_numbers_are_close) {
  CompareRandomProblems(Values::kNormal, 20001, 300);
}

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

AddendView AddendOf(const Tensor& tensor, const Tensor& y, int64_t begin) {
  AddendView addend{tensor.dtype, {}};
  for (int64_t batch = 0; batch < y.batch; ++batch) {
    const bool is_bias = tensor.rows == 1 && y.rows > 1;
    addend.segments.push_back(
        is_bias ? AddendSegment{tensor.data, 0}
                : AddendSegment{tensor.At(batch, begin), tensor.features});
  }
  return addend;
}

TEST(bias_and_residual_are_part_of_one_matmul) {
  for (const auto& [dtype, result_dtype] : {std::pair{DType::kBF16, DType::kBF16},
                                            {DType::kF16, DType::kF16},
                                            {DType::kF32, DType::kF32},
                                            {DType::kBF16, DType::kF32}}) {
    Fixture fixture;
    const Layer layer(fixture, 2, 5, 16, 24, dtype, result_dtype);
    const Tensor bias = Layer::Make(fixture, result_dtype, 1, 1, 24);
    const Tensor residual = Layer::Make(fixture, result_dtype, 2, 5, 24);
    GemmProblem problem = layer.All();
    problem.addends = {AddendOf(bias, layer.y, 0), AddendOf(residual, layer.y, 0)};
    problem.scale = 0.5;
    CHECK_EQ(CudaGemm::WorkspaceBytes(problem), kLibraryWorkspaceBytes);
    const int64_t before = NumMatmuls();
    fixture.Run(problem);
    CHECK_EQ(NumMatmuls() - before, 1);
    CHECK_EQ(fixture.machine().NumCalls("LaunchKernelEx"), 0);
    for (int64_t m = 0; m < 10; ++m) {
      for (int64_t n = 0; n < 24; ++n) {
        const float expected = layer.Expected(m / 5, m % 5, n) / 2 +
                               Layer::ReadAt(bias, 0, 0, n) +
                               Layer::ReadAt(residual, m / 5, m % 5, n);
        CHECK_EQ(Layer::ReadAt(layer.y, m / 5, m % 5, n), expected);
      }
    }
  }
}

TEST(an_accumulator_is_added_to_in_place_over_all_terms) {
  Fixture fixture;
  const Layer layer(fixture, 1, 7, 9, 11, DType::kBF16, DType::kF32);
  Layer::Fill(layer.y, 5);
  GemmProblem problem = layer.All(3);
  problem.addends = {AddendOf(layer.y, layer.y, 0)};
  const float before = Layer::ReadAt(layer.y, 0, 3, 4);
  CHECK_EQ(CudaGemm::WorkspaceBytes(problem), kLibraryWorkspaceBytes);
  const int64_t num_matmuls = NumMatmuls();
  fixture.Run(problem);
  CHECK_EQ(NumMatmuls() - num_matmuls, 3);
  CHECK_EQ(fixture.machine().NumCalls("LaunchKernelEx"), 0);
  CHECK_EQ(Layer::ReadAt(layer.y, 0, 3, 4), before + 3 * layer.Expected(0, 3, 4));
}

TEST(pairs_are_rounded_once_with_what_is_added) {
  Fixture fixture;
  const Layer layer(fixture, 1, 4, 1, 8);
  // The bf16 number after 256 is 258. 128 + 128 + 0.75 + 0.75 is 258 if it is rounded
  // once, and 256 if it is rounded after each addition.
  for (int64_t i = 0; i < 4; ++i) Write(layer.x.At(0, i), DType::kBF16, 1);
  for (int64_t n = 0; n < 8; ++n) Write(layer.w.At(0, 0) + 2 * n, DType::kBF16, 128);
  const Tensor bias = Layer::Make(fixture, DType::kF32, 1, 1, 8);
  for (int64_t n = 0; n < 8; ++n) Write(bias.At(0, 0) + 4 * n, DType::kF32, 0.75);
  GemmProblem problem = layer.All(2);
  problem.addends = {AddendOf(bias, layer.y, 0), AddendOf(bias, layer.y, 0)};
  CHECK_EQ(CudaGemm::WorkspaceBytes(problem), kLibraryWorkspaceBytes + 256);
  fixture.Run(problem);
  CHECK_EQ(fixture.machine().NumCalls("LaunchKernelEx"), 1);
  for (int64_t n = 0; n < 8; ++n) {
    CHECK_EQ(Layer::ReadAt(layer.y, 0, 2, n), 258.0f);
  }
}

TEST(rows_of_a_batch_are_one_matmul_and_leave_other_rows_alone) {
  Fixture fixture;
  const Layer layer(fixture, 3, 8, 6, 10);
  Layer::Fill(layer.y, 99);
  const float before = Layer::ReadAt(layer.y, 1, 5, 3);
  const int64_t num_matmuls = NumMatmuls();
  fixture.Run(layer.Rows(2, 3));
  CHECK_EQ(NumMatmuls() - num_matmuls, 1);
  for (int64_t batch = 0; batch < 3; ++batch) {
    for (int64_t m = 2; m < 5; ++m) {
      CHECK_EQ(Layer::ReadAt(layer.y, batch, m, 9), layer.Expected(batch, m, 9));
    }
  }
  CHECK_EQ(Layer::ReadAt(layer.y, 1, 5, 3), before);
}

TEST(the_empty_sum_is_zero_or_what_is_added) {
  Fixture fixture;
  const Layer layer(fixture, 2, 4, 0, 6);
  Layer::Fill(layer.y, 3);
  fixture.Run(layer.Rows(1, 2));
  CHECK_EQ(Layer::ReadAt(layer.y, 1, 2, 5), 0.0f);
  const Tensor bias = Layer::Make(fixture, DType::kBF16, 1, 1, 6);
  GemmProblem problem = layer.All();
  problem.addends = {AddendOf(bias, layer.y, 0)};
  const int64_t num_matmuls = NumMatmuls();
  fixture.Run(problem);
  CHECK_EQ(NumMatmuls() - num_matmuls, 0);
  CHECK_EQ(Layer::ReadAt(layer.y, 1, 3, 5), Layer::ReadAt(bias, 0, 0, 5));
}

TEST(a_prepared_product_asks_no_heuristic_and_loads_nothing) {
  Fixture fixture;
  const Layer layer(fixture, 1, 8, 16, 24);
  const Layer other(fixture, 1, 8, 16, 24);
  const GemmProblem problem = layer.All(2);
  const GemmWorkspace workspace = fixture.WorkspaceFor(problem);
  int64_t before = NumHeuristics();
  const int64_t num_matmuls = NumMatmuls();
  // Counts calls that may wait for other devices, on which kernels wait for this
  // thread.
  const auto num_waiting_calls = [&] {
    return fixture.machine().NumCalls("MemAlloc") +
           fixture.machine().NumCalls("MemFree");
  };
  const int64_t num_waiting = num_waiting_calls();
  const auto prepare = [&] { fixture.gemm().Prepare(problem, {}, workspace); };
  prepare();
  CHECK_EQ(NumHeuristics() - before, 1);
  // The first pair overwrites the sum and the second adds to it, with one matmul each.
  CHECK_EQ(NumMatmuls() - num_matmuls, 2);
  prepare();
  CHECK_EQ(NumMatmuls() - num_matmuls, 2);
  CHECK_EQ(fixture.machine().Live().streams, 1);
  CHECK_EQ(num_waiting_calls(), num_waiting);

  before = NumHeuristics();
  const int64_t num_allocations = fixture.machine().NumCalls("MemAllocAsync");
  const int64_t num_waits = fixture.machine().NumCalls("StreamSynchronize");
  {
    const EmulatedLaunchesOnly nothing_loads;
    fixture.gemm().Enqueue(problem, {}, workspace, fixture.stream());
    fixture.gemm().Enqueue(other.All(2), {}, workspace, fixture.stream());
  }
  CHECK_EQ(NumHeuristics() - before, 0);
  CHECK_EQ(fixture.machine().NumCalls("MemAllocAsync"), num_allocations);
  CHECK_EQ(fixture.machine().NumCalls("StreamSynchronize"), num_waits);
  fixture.Synchronize();

  // Operands with less alignment, and other options, need new plans.
  GemmProblem unaligned = problem;
  unaligned.a.segments[0].data += 2;
  unaligned.a.segments[1].data += 2;
  unaligned.m = unaligned.a.outer_bounds[1] = unaligned.c.row_bounds[1] = 7;
  fixture.gemm().Prepare(unaligned, {}, workspace);
  fixture.gemm().Prepare(problem, {.sm_target = 100}, workspace);
  CHECK_EQ(NumHeuristics() - before, 2);

  // If the memory of a plan cannot be allocated, preparing it throws, and the plan is
  // not ready.
  fixture.machine().Fail("MemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY);
  const auto prepare_another = [&] {
    fixture.gemm().Prepare(problem, {.algorithm = 1}, workspace);
  };
  CHECK_THROWS(prepare_another(), "cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY");
  prepare_another();
  const EmulatedLaunchesOnly nothing_loads;
  fixture.gemm().Enqueue(problem, {.algorithm = 1}, workspace, fixture.stream());
  fixture.Synchronize();
}

// XLA passes such slices to the calls of a loop.
TEST(slices_of_an_operand_have_one_plan) {
  Fixture fixture;
  const Layer layer(fixture, 1, 8, 16, 16);
  const GemmProblem first = layer.Rows(0, 4);
  const GemmWorkspace workspace = fixture.WorkspaceFor(first);
  fixture.gemm().Prepare(first, {}, workspace);
  const int64_t before = NumHeuristics();
  const EmulatedLaunchesOnly nothing_loads;
  fixture.gemm().Enqueue(layer.Rows(4, 4), {}, workspace, fixture.stream());
  CHECK_EQ(NumHeuristics() - before, 0);
  fixture.Synchronize();
}

TEST(a_captured_product_can_be_replayed) {
  Fixture fixture;
  const Driver& driver = EmulatedDriver();
  const Layer layer(fixture, 1, 6, 10, 12);
  const Tensor bias = Layer::Make(fixture, DType::kBF16, 1, 1, 12);
  GemmProblem fused = layer.All();
  fused.addends = {AddendOf(bias, layer.y, 0)};
  const GemmProblem pairs = layer.All(2);
  for (const GemmProblem& problem : {fused, pairs}) {
    const GemmWorkspace workspace = fixture.WorkspaceFor(problem);
    fixture.gemm().Prepare(problem, {}, workspace);
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    CHECK_EQ(driver.StreamBeginCapture(fixture.stream(),
                                       CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
             CUDA_SUCCESS);
    fixture.gemm().Enqueue(problem, {}, workspace, fixture.stream());
    CHECK_EQ(driver.StreamEndCapture(fixture.stream(), &graph), CUDA_SUCCESS);
    CHECK_EQ(driver.GraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
    for (uint64_t seed : {1, 2}) {
      Layer::Fill(layer.x, seed);
      CHECK_EQ(driver.GraphLaunch(exec, fixture.stream()), CUDA_SUCCESS);
      fixture.Synchronize();
      const float product = layer.Expected(0, 5, 7);
      CHECK_EQ(Layer::ReadAt(layer.y, 0, 5, 7),
               problem.addends.empty() ? 2 * product
                                       : product + Layer::ReadAt(bias, 0, 0, 7));
    }
    CHECK_EQ(driver.GraphExecDestroy(exec), CUDA_SUCCESS);
    CHECK_EQ(driver.GraphDestroy(graph), CUDA_SUCCESS);
  }
}

TEST(algorithms_are_chosen_by_index) {
  Fixture fixture;
  const Layer layer(fixture, 1, 6, 10, 12);
  const GemmProblem problem = layer.All();
  const int num_algorithms =
      fixture.gemm().NumAlgorithms(problem, {}, fixture.WorkspaceFor(problem));
  CHECK(num_algorithms > 1);
  for (int i = 0; i <= num_algorithms; ++i) {
    Layer::Fill(layer.y, 1);
    fixture.Run(problem, {.algorithm = i});
    CHECK_EQ(Layer::ReadAt(layer.y, 0, 5, 7), layer.Expected(0, 5, 7));
  }
  // Without a workspace for cuBLASLt there are fewer algorithms.
  const GemmWorkspace none = {fixture.WorkspaceFor(problem).data, 0};
  CHECK(fixture.gemm().NumAlgorithms(problem, {}, none) < num_algorithms);
}

TEST(threads_share_the_plans_of_a_device) {
  Fixture fixture;
  const Layer layer(fixture, 1, 4, 6, 8);
  std::vector<std::thread> threads;
  std::vector<Tensor> results, biases;
  for (int i = 0; i < 2; ++i) {
    results.push_back(Layer::Make(fixture, DType::kBF16, 1, 4, 8));
    biases.push_back(Layer::Make(fixture, DType::kBF16, 1, 1, 8));
    Layer::Fill(biases.back(), 7 + i);
  }
  std::vector<GemmProblem> problems;
  std::vector<GemmWorkspace> workspaces;
  for (int i = 0; i < 2; ++i) {
    Layer own = layer;
    own.y = results[i];
    problems.push_back(own.All());
    problems.back().addends = {AddendOf(biases[i], own.y, 0)};
    workspaces.push_back(fixture.WorkspaceFor(problems.back()));
  }
  CUcontext context = nullptr;
  EmulatedDriver().CtxGetCurrent(&context);
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      const ScopedContext current(EmulatedDriver(), context);
      const Stream stream(EmulatedDriver());
      fixture.gemm().Prepare(problems[i], {}, workspaces[i]);
      for (int call = 0; call < 20; ++call) {
        fixture.gemm().Enqueue(problems[i], {}, workspaces[i], stream.get());
      }
      Check(EmulatedDriver(), EmulatedDriver().StreamSynchronize(stream.get()),
            "cuStreamSynchronize");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 2; ++i) {
    for (int64_t n = 0; n < 8; ++n) {
      CHECK_EQ(Layer::ReadAt(results[i], 0, 3, n),
               layer.Expected(0, 3, n) + Layer::ReadAt(biases[i], 0, 0, n));
    }
  }
}

TEST(what_cublaslt_refuses_is_an_error_that_names_the_product) {
  Fixture fixture;
  const Layer layer(fixture, 2, 8, 16, 24);
  const Tensor bias = Layer::Make(fixture, DType::kBF16, 1, 1, 24);
  GemmProblem problem = layer.Rows(0, 4);
  problem.addends = {AddendOf(bias, layer.y, 0)};
  const GemmWorkspace workspace = fixture.WorkspaceFor(problem);
  RefuseEmulatedMatmuls(true);
  CHECK_THROWS(fixture.gemm().Prepare(problem, {}, workspace),
               "has no algorithm for bf16[4, 16] x bf16[16, 24] to bf16 with bias, 2 "
               "times, aligned to ");
  RefuseEmulatedMatmuls(false, lt::Status::kExecutionFailed);
  CHECK_THROWS(fixture.gemm().Enqueue(problem, {}, workspace, fixture.stream()),
               "cublasLtMatmul: CUBLAS_STATUS_EXECUTION_FAILED");
  RefuseEmulatedMatmuls(false);
  fixture.gemm().Enqueue(problem, {}, workspace, fixture.stream());
  fixture.Synchronize();
  CHECK_EQ(Layer::ReadAt(layer.y, 1, 3, 20),
           layer.Expected(1, 3, 20) + Layer::ReadAt(bias, 0, 0, 20));
}

TEST(calls_that_cannot_be_right_are_refused) {
  Fixture fixture;
  const Layer layer(fixture, 1, 8, 16, 24);
  GemmProblem problem = layer.All(2);
  GemmWorkspace workspace = fixture.WorkspaceFor(problem);
  const auto enqueue = [&] {
    fixture.gemm().Enqueue(problem, {}, workspace, fixture.stream());
  };
  workspace.size_bytes = 8 * 24 * 4 - 1;
  CHECK_THROWS(enqueue(), "the workspace has 767 bytes");
  workspace = {workspace.data + 16, int64_t{32} << 20};
  CHECK_THROWS(enqueue(), "expected 33555200 at a multiple of 256");
  workspace.data -= 16;
  problem.b.dtype = DType::kF16;
  CHECK_THROWS(enqueue(), "the operands have two dtypes");
  problem.b.dtype = DType::kBF16;
  problem.c.segments[0].row_stride = 23;
  problem.c.dtype = DType::kF32;
  CHECK_THROWS(enqueue(), "rows of the result [8, 24] overlap: their stride is 23");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
