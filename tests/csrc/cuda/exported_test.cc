// Tests calls of programs that were lowered for export, on emulated GPUs: they are
// right on the devices that they were lowered for, and fail on all ranks if the same
// devices are in another order.
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"

namespace jax_ub {
namespace {

// Ranks of a mesh [tp, dp], on which partitions are in another order than ranks.
TEST(AnExportedProgramRunsOnTheDevicesThatItWasLoweredFor) {
  Gpus gpus({.num_devices = 4, .seed = 9, .max_delay_us = 30});
  int seed = 0;
  for (const CallAttributes& at : CallsOfPeers(2)) {
    GpuCalls calls(gpus, at, {}, DType::kF32, ++seed,
                   {{1, 3}, {0, 2, 1, 3}, {0, 1, 2, 3}});
    calls.SetPartitions({1, 3});
    for (int run = 0; run < 2; ++run) calls.RunAll();
    gpus.Synchronize();
    CheckRight(calls);
  }
  CHECK_EQ(gpus.machine.NumCalls(kCheckPartitionKernel), 4 * seed);
  GpuCalls others(gpus, CallsOfPeers(2)[0], {}, DType::kF32, 1);
  others.RunAll();
  gpus.Synchronize();
  CheckRight(others);
  CHECK_EQ(gpus.machine.NumCalls(kCheckPartitionKernel), 4 * seed);
}

// Runs the calls, and checks that each rank reports the error, or that all its results
// are NaN. A rank that is queried early may report only that a peer has failed. Rank 0
// is launched last, because it may be in its place.
void CheckThatAllFail(Gpus& gpus, GpuCalls& calls) {
  std::vector<std::string> said(calls.num_ranks());
  std::vector<std::thread> threads;
  for (int n = 1; n <= calls.num_ranks(); ++n) {
    const int rank = n % calls.num_ranks();
    threads.emplace_back([&, rank] {
      try {
        calls.Initialize(rank);
        calls.Execute(rank);
      } catch (const CommunicatorError& error) {
        said[rank] = error.what();
      }
    });
    if (kFailsOneByOne) {
      threads.back().join();
      gpus.Synchronize(calls.ordinal(rank));
    }
  }
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
  gpus.Synchronize();
  for (int rank = 0; rank < calls.num_ranks(); ++rank) {
    const bool is_said = said[rank].find(" runs partition ") != std::string::npos ||
                         said[rank].find(" failed and notified ") != std::string::npos;
    if (is_said || (said[rank].empty() && calls.NumNumbers(rank) == 0)) continue;
    check::Fail(__FILE__, __LINE__, NameOf(calls.site.attributes()), ": rank ", rank,
                " said '", said[rank], "' and has ", calls.NumNumbers(rank),
                " numbers");
  }
}

// Rank 0 is on the device that it was lowered for, its peers are not.
TEST(AnExportedProgramInAnotherOrderFailsOnAllRanks) {
  const std::string text =
      ": the program was lowered for export for the devices [0, 1, 2] in that order, "
      "and is called on them in another";
  Gpus gpus({.num_devices = 3, .seed = 13, .max_delay_us = 30});
  int seed = 0;
  for (const CallAttributes& at : CallsOfPeers(3)) {
    GpuCalls calls(gpus, at, {}, DType::kBF16, ++seed, {{}, {}, {0, 1, 2}});
    calls.SetPartitions({0, 2, 1});
    CheckThatAllFail(gpus, calls);
    for (int rank = 0; rank < 3; ++rank) CHECK_THROWS(calls.Initialize(rank), text);
    CHECK_EQ(gpus.engine().Failures().size(), 1u);
    // Without captured calls, the group can recover.
    gpus.engine().ReleaseInProcess();
    calls.SetPartitions({0, 1, 2});
    calls.RunAll();
    gpus.Synchronize();
    CheckRight(calls);
  }
}

TEST(AnExportedProgramIsCheckedWheneverItIsReplayed) {
  Gpus gpus({.num_devices = 3, .seed = 17, .max_delay_us = 30});
  int seed = 0;
  for (const CallAttributes& at : CallsOfPeers(3)) {
    GpuCalls calls(gpus, at, {}, DType::kF32, ++seed, {{}, {}, {0, 1, 2}});
    calls.SetPartitions({0, 1, 2});
    CapturedCalls captured(gpus, calls);
    CheckReplays(gpus, calls, captured, seed);
    calls.SetPartitions({0, 2, 1});
    for (int replay = 0; replay < 2; ++replay) {
      calls.Refill(seed);
      LaunchMisplaced(gpus, captured, 3);
      for (int rank = 0; rank < 3; ++rank) CHECK_EQ(calls.NumNumbers(rank), 0);
    }
    for (int rank = 0; rank < 3; ++rank) {
      CHECK_THROWS(
          calls.Initialize(rank),
          "rank 1 runs partition 2, which is that of device 2: the program was "
          "lowered for export for the devices [0, 1, 2] in that order");
    }
    gpus.engine().ReleaseInProcess();
  }
}

TEST(AnExportedProgramThatSwapsTheRanksOfOneGroupFailsThere) {
  Gpus gpus({.num_devices = 4, .seed = 1, .max_delay_us = 30});
  const CallAttributes at =
      MakeAttributes(Op::kMatmulReduceScatter, Method::kRingExchange, 2);
  const std::vector<int64_t> ranks = {0, 1, 2, 3};
  GpuCalls right(gpus, at, {}, DType::kF32, 1, {{0, 1}, ranks, ranks});
  GpuCalls swapped(gpus, at, {}, DType::kF32, 2, {{2, 3}, ranks, ranks});
  right.SetPartitions({0, 1});
  swapped.SetPartitions({3, 2});
  right.RunAll();
  CheckThatAllFail(gpus, swapped);
  CheckRight(right);
  CHECK_THROWS(swapped.Initialize(1), " runs partition ");
  CHECK_EQ(gpus.engine().Failures().size(), 1u);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
