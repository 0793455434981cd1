// Tests calls of all ranks of a process through the CUDA engine, on emulated GPUs: the
// resources that they need and share, and their errors.
#include "engine/cuda/cuda_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"
#include "gemm/cuda/gemm_blocks.h"

namespace jax_ub {
namespace {

using jax_ub_test::Sizes;

// An initialized call creates no memory, stream, event or module of the driver.
TEST(AnInitializedCallAllocatesNothing) {
  Gpus gpus({.num_devices = 3});
  const auto num_made = [&] {
    int64_t num = 0;
    for (const char* function :
         {"EventCreate", "LibraryLoadData", "MemAlloc", "MemAllocAsync", "MemCreate",
          "MemHostAlloc", "StreamCreateWithPriority"}) {
      num += gpus.machine.NumCalls(function);
    }
    return num;
  };
  ForEachVariant(3, [&](const CallAttributes& at) {
    GpuCalls calls(gpus, at, {}, DType::kF32, 1);
    for (const int rank : calls.local_ranks()) calls.Initialize(rank);
    for (const int rank : calls.local_ranks()) calls.Workspace(rank);
    const int64_t before = num_made();
    for (const int rank : calls.local_ranks()) calls.Execute(rank);
    CHECK_EQ(num_made(), before);
    gpus.Synchronize();
  });
}

// Launches cost more than the communication of few tokens. The GEMMs are aligned, so that each
// is one kernel.
TEST(CallsOfEightRanksTakeFewLaunches) {
  constexpr int kRanks = 8;
  struct Case {
    Op op;
    Method method;
    Variant variant;
    int64_t num_launches;
  };
  const Case cases[] = {
      {Op::kAllGatherMatmul, Method::kPipeline, Variant::kPlain, 24},
      {Op::kAllGatherMatmul, Method::kRingExchange, Variant::kPlain, 24},
      {Op::kMatmulReduceScatter, Method::kRingExchange, Variant::kPlain, 19},
      {Op::kMatmulAllReduce, Method::kRingExchange, Variant::kPlain, 36},
      {Op::kMatmulAllReduce, Method::kRingExchange, Variant::kOneShot, 3},
      {Op::kAllReduce, Method::kRingExchange, Variant::kOneShot, 2}};
  Gpus gpus({.num_devices = kRanks});
  const auto num_launches = [&] {
    return gpus.machine.NumCalls("LaunchKernelEx") +
           gpus.machine.NumCalls("MemcpyAsync") + ReadEmulatedCublasLt().num_matmuls;
  };
  for (const Case& one : cases) {
    CallAttributes at = MakeAttributes(one.op, one.method, kRanks);
    at.num_splits = 1;
    at.variant = one.variant;
    GpuCalls calls(gpus, at, {1, 8, 8, 8}, DType::kF32, 1);
    for (int rank = 0; rank < kRanks; ++rank) calls.Initialize(rank);
    const int64_t before = num_launches();
    for (int rank = 0; rank < kRanks; ++rank) calls.Execute(rank);
    CHECK_EQ(num_launches() - before, kRanks * one.num_launches);
    gpus.Synchronize();
    CheckRight(calls);
    CapturedCalls captured(gpus, calls);
    CHECK_EQ(captured.NumNodes(0), one.num_launches);
    CheckReplays(gpus, calls, captured, 1);
  }
}

TEST(TuningChangesNoResult) {
  Gpus gpus({.num_devices = 3, .seed = 9, .max_delay_us = 30});
  for (const KernelOptions& kernel_options :
       {KernelOptions{.use_ce = false, .num_sm = 2, .cga_size = 2},
        KernelOptions{.sm_margin = 8, .num_lanes = 1},
        KernelOptions{.num_lanes = 3, .allow_tf32 = true},
        KernelOptions{.comm_priority = -100, .gemm_priority = -1}}) {
    for (const Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter,
                        Op::kMatmulAllReduce, Op::kBulkReduceScatter}) {
      CallAttributes at = Variants(op, Method::kPipeline, 3)[1];
      if (op == Op::kBulkReduceScatter) at.method = Method::kBulk;
      at.kernel_options = kernel_options;
      GpuCalls calls(gpus, at, {}, DType::kBF16, 1);
      calls.RunAll();
      gpus.Synchronize();
      CheckRight(calls);
    }
  }
}

// With one lane and the default margin of "auto", a wait can run next to every GEMM.
TEST(GemmsLeaveMultiprocessorsToTheKernelsThatCommunicate) {
  Gpus gpus({.num_devices = 3});
  for (CallAttributes at : CallsOfPeers(3)) {
    at.kernel_options = {.sm_margin = 4, .num_lanes = 1};
    GpuCalls calls(gpus, at, {1, 9, 40, 40}, DType::kF32, 1);
    for (int i = 0; i < 3; ++i) calls.RunAll();
    gpus.Synchronize();
  }
  CHECK_EQ(gpus.machine.NumStarved(), 0);
}

// All streams of a device share one hardware queue, as with
// CUDA_DEVICE_MAX_CONNECTIONS=1.
TEST(CallsRunOnOneHardwareQueue) {
  Gpus gpus({.num_devices = 3, .seed = 5, .max_delay_us = 30, .num_queues = 1});
  int seed = 0;
  for (const CallAttributes& at : CallsOfPeers(3)) {
    GpuCalls calls(gpus, at, {}, DType::kF32, ++seed);
    calls.RunAll();
    gpus.Synchronize();
    CheckRight(calls);
    CheckReplays(gpus, calls, ++seed);
  }
}

TEST(ChunksOfAPairAreOneProductWhereTheyAdjoinAndABatchElsewhere) {
  CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 4);
  at.variant = Variant::kAggregate;
  // Returns the number of products of a pair of chunks, and the batch and rows of the
  // first one.
  const auto pair_of = [&](const Sizes& sizes) {
    jax_ub_test::Arrays arrays(1);
    const std::vector<RankCall> calls = jax_ub_test::MakeCalls(at, sizes, arrays);
    std::vector<std::vector<GemmBlock>> products;
    PlanCall(at, calls[0], 0, [&](Lane, const GemmProblem& problem) {
      products.push_back(CutIntoBlocks(problem));
    });
    CHECK_EQ(products.size(), 3u);
    const std::vector<GemmBlock>& pair = products.back();
    return std::array<int64_t, 3>{static_cast<int64_t>(pair.size()), pair[0].batch,
                                  pair[0].m};
  };
  // Chunks of 256 bytes are adjacent.
  CHECK(pair_of({1, 8, 8, 3}) == (std::array<int64_t, 3>{1, 1, 16}));
  CHECK(pair_of({1, 8, 7, 3}) == (std::array<int64_t, 3>{1, 2, 8}));
  CHECK(pair_of({2, 8, 8, 3}) == (std::array<int64_t, 3>{2, 2, 8}));
}

TEST(GroupsOfACallSiteDoNotMix) {
  Gpus gpus({.num_devices = 4, .seed = 1, .max_delay_us = 30});
  const CallAttributes at =
      MakeAttributes(Op::kMatmulReduceScatter, Method::kRingExchange, 2);
  // Both groups use the same call site, at the same time.
  const std::vector<int64_t> ranks = {2, 3, 1, 0};
  GpuCalls first(gpus, at, {}, DType::kF32, 1, {{2, 3}, ranks});
  GpuCalls second(gpus, at, {}, DType::kF32, 2, {{1, 0}, ranks});
  for (GpuCalls* calls : {&first, &second}) {
    for (int rank = 0; rank < 2; ++rank) {
      const int ordinal = calls->ordinal(rank);
      gpus.engine().Initialize(first.site, ordinal, calls->on_device(rank));
      gpus.engine().Execute(first.site, ordinal, gpus.stream(ordinal),
                            calls->on_device(rank), calls->Workspace(rank));
    }
  }
  gpus.Synchronize();
  CheckRight(first);
  CheckRight(second);
}

TEST(AResidualGradientIsAddedToInPlace) {
  Gpus gpus({.num_devices = 1});
  CallAttributes at = MakeAttributes(Op::kMatmul, Method::kDirect, 1);
  at.has_residual = at.rhs_transposed = true;
  GpuCalls calls(gpus, at, {}, DType::kBF16, 1);
  RankCall& call = calls.on_device(0);
  std::memcpy(call.results[0].data, call.operands[2].data,
              call.results[0].size_bytes());
  const Tensor residual = std::exchange(call.operands[2], call.results[0]);
  calls.RunAll();
  gpus.Synchronize();
  call.operands[2] = residual;
  CheckRight(calls);
  // The call runs on XLA's stream, because nothing runs concurrently.
  CHECK_EQ(gpus.machine.NumCalls("EventRecord"), 0);
}

// The option also applies to GEMMs that do not run concurrently with communication.
TEST(ALocalProductUsesTheGivenAlgorithm) {
  Gpus gpus({.num_devices = 1});
  for (const Op op : {Op::kMatmul, Op::kWgrad}) {
    for (const int algorithm : {0, 1, 2, 7}) {
      CallAttributes at = MakeAttributes(op, Method::kDirect, 1);
      at.kernel_options.gemm_algorithm = algorithm;
      GpuCalls calls(gpus, at, {}, DType::kBF16, 1);
      calls.RunAll();
      gpus.Synchronize();
      CheckRight(calls);
      CHECK_EQ(ReadEmulatedCublasLt().last_algorithm, std::min(algorithm, 2));
    }
  }
}

// XLA's dynamic slice fusion can make both the same slice of an array.
TEST(AResultInTheMemoryOfAnOperandIsRejected) {
  Gpus gpus({.num_devices = 1});
  CallAttributes at = MakeAttributes(Op::kMatmul, Method::kDirect, 1);
  at.has_residual = true;
  GpuCalls calls(gpus, at, {}, DType::kBF16, 1);
  RankCall& call = calls.on_device(0);
  calls.Initialize(0);
  const Tensor result = call.results[0];
  call.results[0].data = call.operands[0].data;
  CHECK_THROWS(calls.Execute(0),
               "result 0 overlaps operand 0: XLA updates a slice of an array in "
               "place with a result that is computed from it. "
               "XLA_FLAGS=--xla_gpu_enable_dynamic_slice_fusion=false gives");
  call.results[0].data = call.operands[2].data + 2;
  CHECK_THROWS(calls.Execute(0), "result 0 overlaps operand 2");
  call.results[0] = result;
  calls.Execute(0);
  gpus.Synchronize();
  CheckRight(calls);
}

TEST(ABiggerNeedMakesAnotherHeapAndSitesKeepTheirs) {
  Gpus gpus({.num_devices = 2});
  const CallAttributes at = MakeAttributes(Op::kAllGather, Method::kRingExchange, 2);
  GpuCalls small(gpus, at, {}, DType::kF32, 1);
  small.RunAll();
  const int64_t heap_bytes = gpus.engine().counters().heap_bytes;
  CHECK(heap_bytes > 0);
  {
    GpuCalls same(gpus, at, {}, DType::kF32, 2);
    same.RunAll();
    CHECK_EQ(gpus.engine().counters().heap_bytes, heap_bytes);
    GpuCalls large(gpus, at, {1, 3000, 1000, 1}, DType::kF32, 3);
    large.RunAll();
    CHECK(gpus.engine().counters().heap_bytes >= heap_bytes + 2 * 12'000'000);
    small.RunAll();
    gpus.Synchronize();
    CheckRight(small);
    CheckRight(same);
    CheckRight(large);
  }
  gpus.engine().ReleaseInProcess();
  CHECK_EQ(gpus.engine().counters().heap_bytes, heap_bytes);
  CHECK_EQ(gpus.engine().counters().calls[static_cast<int>(Op::kAllGather)], 8);
  CHECK_EQ(gpus.engine().counters().failed_calls, 0);
}

// Freeing the heap waits for device 1, which waits for a call of device 2.
TEST(OtherCallsAreEnqueuedWhileAnOutgrownHeapIsFreed) {
  Gpus gpus({.num_devices = 3}, 20);
  const CallAttributes at = MakeAttributes(Op::kAllGather, Method::kRingExchange, 2);
  {
    GpuCalls small(gpus, at, {}, DType::kF32, 1);
    small.RunAll();
    gpus.Synchronize();
  }
  GpuCalls large(gpus, at, {1, 3000, 1000, 1}, DType::kF32, 2);
  GpuCalls others(gpus, at, {}, DType::kF32, 3, {{1, 2}, {}});
  for (int rank = 0; rank < 2; ++rank) {
    others.Initialize(rank);
    others.Workspace(rank);
  }
  const int64_t heap_bytes = gpus.engine().counters().heap_bytes;
  others.Execute(0);
  const auto growing = std::async(std::launch::async, [&] { large.Initialize(0); });
  while (gpus.engine().counters().heap_bytes == heap_bytes) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  others.Execute(1);
  growing.wait();
  gpus.Synchronize();
  CheckRight(others);
}

// Allocating the heap waits for device 0, which waits for a call of device 1.
TEST(OtherCallsAreEnqueuedWhileAHeapIsMade) {
  Gpus gpus({.num_devices = 2, .memory_calls_synchronize = true}, 20);
  const CallAttributes at = MakeAttributes(Op::kAllGather, Method::kRingExchange, 2);
  GpuCalls small(gpus, at, {}, DType::kF32, 1);
  GpuCalls large(gpus, at, {1, 3000, 1000, 1}, DType::kF32, 2);
  for (int rank = 0; rank < 2; ++rank) small.Workspace(rank);
  small.Initialize(0);
  small.Execute(0);
  const int64_t num_records = gpus.machine.NumCalls("MemHostAlloc");
  const auto growing = std::async(std::launch::async, [&] { large.Initialize(0); });
  while (gpus.machine.NumCalls("MemHostAlloc") == num_records) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  small.Initialize(1);
  small.Execute(1);
  growing.wait();
  gpus.Synchronize();
  CheckRight(small);
}

// Rank 1 arrives only after rank 0 has reached its deadline.
TEST(AMissingRankIsNamedAndFillsTheResultsWithNan) {
  Gpus gpus({.num_devices = 2}, 0.05);
  const CallAttributes at =
      MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 2);
  GpuCalls calls(gpus, at, {}, DType::kF32, 1);
  CapturedCalls never(gpus, calls);
  GpuCalls eager(gpus, at, {}, DType::kF32, 2);
  for (int rank = 0; rank < 2; ++rank) eager.Initialize(rank);
  eager.Execute(0);
  gpus.Synchronize();
  CHECK_EQ(eager.NumNumbers(0), 0);
  const std::string text = "all_gather_matmul (ub_name 'test')";
  CHECK_THROWS(eager.Initialize(0), text);
  CHECK_THROWS(eager.Execute(0), "rank 1");
  CHECK_THROWS(eager.Initialize(1), text);
  CHECK_EQ(gpus.engine().Failures().size(), 1u);
  CHECK(gpus.engine().counters().failed_calls > 0);
  // A new communicator replaces a released one if no graph refers to it.
  gpus.engine().ReleaseInProcess();
  gpus.engine().set_timeout_s(kLongS);
  eager.RunAll();
  gpus.Synchronize();
  CheckRight(eager);
  CHECK_THROWS(calls.Initialize(0), text);
}

TEST(AFailureOfTheDriverOnOneRankFailsTheOthers) {
  const CallAttributes at =
      MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 2);
  for (const char* function : {"StreamIsCapturing", "EventRecord", "StreamWaitEvent",
                               "MemcpyAsync", "LaunchKernelEx"}) {
    bool is_refused = true;
    for (int nth = 1; is_refused; ++nth) {  // until there are no more of them
      Gpus gpus({.num_devices = 2});
      GpuCalls calls(gpus, at, {}, DType::kF32, 1);
      for (int rank = 0; rank < 2; ++rank) {
        calls.Initialize(rank);
        calls.Workspace(rank);
      }
      gpus.machine.Fail(function, CUDA_ERROR_UNKNOWN, nth);
      try {
        calls.Execute(0);
        is_refused = false;
        CHECK(nth > 1);
      } catch (const SystemError& error) {
        CHECK_THROWS(calls.Execute(1), error.what());
      }
      // The launch that was to fail is that of rank 1.
      if (!is_refused) CHECK_THROWS(calls.Execute(1), "CUDA_ERROR_UNKNOWN");
      gpus.Synchronize();
    }
  }
}

TEST(AJoinedCommunicatorIsTheGroupsUntilItLeaves) {
  Gpus gpus({.num_devices = 2});
  gpus.engine().set_local_devices({{0, 40}, {1, 41}});
  const auto communicator =
      CudaCommunicator::Make(gpus.driver, {1, 0}, 64 << 10, "test");
  gpus.engine().Join(communicator, {41, 40});
  CHECK_THROWS(gpus.engine().Join(communicator, {41, 40}), "its devices are those of");
  const CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kRingExchange, 2);
  const Placement placement = {{1, 0}, {41, 40}};
  GpuCalls calls(gpus, at, {}, DType::kF32, 1, placement);
  calls.RunAll();
  gpus.Synchronize();
  CheckRight(calls);
  CHECK_EQ(gpus.engine().counters().heap_bytes, communicator->size_bytes());
  GpuCalls large(gpus, at, {1, 3000, 1000, 1}, DType::kF32, 3, placement);
  CHECK_THROWS(large.Initialize(0), "slot");
  const Placement partly_elsewhere = {{1, 0}, {41, 42}};
  GpuCalls elsewhere(gpus, at, {}, DType::kF32, 1, partly_elsewhere);
  CHECK_THROWS(elsewhere.Initialize(0), "device 42 is another process's");
  gpus.engine().Leave(communicator);
  CHECK_THROWS(calls.Execute(0), "test");
  // Nothing was captured, so the group gets a new communicator within the process.
  calls.Refill(2);
  calls.RunAll();
  gpus.Synchronize();
  CheckRight(calls);
}

// Rank 1 is missing, so closing waits for rank 0 until rank 0 is asked to end.
TEST(OtherCallsAreEnqueuedWhileACommunicatorCloses) {
  Gpus gpus({.num_devices = 2});
  const auto communicator =
      CudaCommunicator::Make(gpus.driver, {0, 1}, 64 << 10, "test");
  gpus.engine().Join(communicator, {0, 1});
  GpuCalls joined(gpus, MakeAttributes(Op::kAllReduce, Method::kRingExchange, 2), {},
                  DType::kF32, 1);
  GpuCalls local(gpus, MakeAttributes(Op::kMatmul, Method::kDirect, 1), {}, DType::kF32,
                 1);
  for (int rank = 0; rank < 2; ++rank) joined.Initialize(rank);
  local.Initialize(0);
  local.Workspace(0);
  joined.Execute(0);
  std::atomic<bool> has_closed = false;
  std::thread leaving([&] {
    gpus.engine().Leave(communicator);
    has_closed = true;
  });
  while (true) {
    try {
      communicator->ThrowIfFailed();
    } catch (const CommunicatorError& error) {
      CHECK_EQ(std::string(error.what()),
               "CommunicatorError: jax_ub.test: it closed its communicator");
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  local.Execute(0);
  CHECK_THROWS(joined.Execute(1), "it closed its communicator");
  CHECK(!has_closed);
  communicator->Poison(std::make_exception_ptr(Error("rank 1 does not come")));
  leaving.join();
  gpus.Synchronize();
}

TEST(WhatDoesNotRunIsRefused) {
  Gpus gpus({.num_devices = 2});
  CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, Method::kDirect, 2);
  CHECK_THROWS(CudaCallSite{at}, "use ring_exchange, pipeline, bulk or external");
  at.method = Method::kRingExchange;
  CHECK_THROWS(CudaCallSite{MakeAttributes(Op::kAllReduce, Method::kBulk, 17)},
               "num_ranks is 17, on GPUs at most 16");
  at.num_kernels = 0;
  CHECK_THROWS(CudaCallSite{at}, "num_kernels is 0");
  at.num_kernels = 1;
  GpuCalls calls(gpus, at, {}, DType::kF32, 1);
  const RankCall& call = calls.on_device(0);
  CudaEngine& engine = gpus.engine();
  CHECK_THROWS(engine.Execute(calls.site, 0, gpus.stream(0), call, {}),
               "was not initialized on device 0");
  RankCall wrong = call;
  wrong.operands[1].rows = 3;
  CHECK_THROWS(engine.Initialize(calls.site, 0, wrong), "w is f32[3, 3]");
  engine.set_local_devices({{0, 7}, {1, 1}});
  CHECK_THROWS(engine.Initialize(calls.site, 0, call),
               "device 7 is not among the devices of the mesh axis");
  engine.set_local_devices({{1, 1}});
  CHECK_THROWS(engine.Initialize(calls.site, 0, call),
               "GPU 0 is none of this process's devices");
  engine.set_local_devices({});
  calls.Initialize(0);
  CHECK_THROWS(engine.Execute(calls.site, 0, gpus.stream(0), call, {}),
               "the workspace has 0 bytes, expected");
  at.method = Method::kBulk;
  at.ranks = {0, 1};
  CudaCallSite bulk(at);
  CHECK_THROWS(engine.Initialize(bulk, 0, call),
               "has no method bulk: use ring_exchange, pipeline or external");
}

TEST(WorkspacesAreKnownWithoutADevice) {
  Gpus gpus({.num_devices = 2});
  CallAttributes at =
      MakeAttributes(Op::kMatmulReduceScatter, Method::kRingExchange, 2);
  GpuCalls calls(gpus, at, {}, DType::kBF16, 1);
  RankCall shapes = calls.on_device(0);
  for (Tensor& tensor : shapes.operands) tensor.data = nullptr;
  for (Tensor& tensor : shapes.results) tensor.data = nullptr;
  // The partial sum is bf16, like x; with several pairs it is f32.
  const int64_t bytes = CudaEngine::WorkspaceBytes(at, shapes);
  const int64_t partial_bytes =
      WorkspacePlan::Align(shapes.operands[0].batch * 10 * 3 * 2);
  CHECK_EQ(PlanCall(at, shapes, 0).workspace.tensor_bytes, partial_bytes);
  CHECK(bytes > partial_bytes + 2 * kLibraryWorkspaceBytes);
  CHECK_EQ(PlanCall(at, shapes, 0).slots.slot_bytes, 2 * 5 * 3 * 2);
  CHECK_EQ(CudaEngine::WorkspaceBytes(
               MakeAttributes(Op::kAllReduce, Method::kBulk, 2),
               {{Tensor{DType::kF32, 1, 1, 8}}, {Tensor{DType::kF32, 1, 1, 8}}}),
           0);
  // Chunks 2 and 4 have one row each: rank 0 multiplies both on one lane, rank 3 on
  // two.
  const CallAttributes few =
      MakeAttributes(Op::kMatmulAllReduce, Method::kRingExchange, 5);
  const RankCall rows = {{Tensor{DType::kF32, 1, 2, 8}, Tensor{DType::kF32, 1, 8, 3}},
                         {Tensor{DType::kF32, 1, 2, 3}}};
  const int64_t most_bytes = PlanCall(few, rows, 3).workspace.size_bytes();
  CHECK(PlanCall(few, rows, 0).workspace.size_bytes() < most_bytes);
  CHECK_EQ(CudaEngine::WorkspaceBytes(few, rows), most_bytes);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
