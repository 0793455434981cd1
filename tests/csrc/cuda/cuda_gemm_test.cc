// Tests GEMMs in device memory: values, numbers of calls, and errors.
#include "gemm/cuda/cuda_gemm.h"

#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "cuda/device_layer.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/random_arena.h"
#include "engine/segments.h"
#include "platform/cuda/owners.h"
#include "platform/error.h"

namespace jax_ub {
namespace {

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
      fixture.gemm().Prepare(problem, {}, fixture.WorkspaceFor(problem));
  CHECK(num_algorithms > 1);
  for (int i = 0; i <= num_algorithms; ++i) {
    Layer::Fill(layer.y, 1);
    fixture.Run(problem, {.algorithm = i});
    CHECK_EQ(Layer::ReadAt(layer.y, 0, 5, 7), layer.Expected(0, 5, 7));
  }
  // Without a workspace for cuBLASLt there are fewer algorithms.
  const GemmWorkspace none = {fixture.WorkspaceFor(problem).data, 0};
  CHECK(fixture.gemm().Prepare(problem, {}, none) < num_algorithms);
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
               "has no algorithm for bf16[4, 16] x bf16[16, 24] to bf16, 2 times, "
               "aligned to ");
  // The answer is kept, so the next product has another shape.
  problem = layer.Rows(0, 5);
  problem.addends = {AddendOf(bias, layer.y, 0)};
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
