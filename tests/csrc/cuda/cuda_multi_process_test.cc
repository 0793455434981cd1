// Tests the results of calls of groups that span several processes, with a CUDA engine
// in each process, on emulated GPUs, eager and replayed.
#include <string>
#include <vector>

#include "check.h"
#include "cuda/address_exchange.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"
#include "cuda/gpu_member.h"
#include "processes.h"

namespace jax_ub {
namespace {

// Runs every `stride`-th variant of the calls between ranks, beginning with `first`, to
// save time: stride 2 still covers each method and each variant of each op, stride 5
// each op.
void EveryOp(const std::vector<int>& process_of_rank,
             int stride = 1,
             size_t first = 0,
             EmulatedOptions options = {}) {
  if (process_of_rank.size() > kMaxTestRanks) return;
  options.seed = 3;
  options.max_delay_us = 30;
  AddressExchange addresses;
  Processes processes =
      RunOnGpus(addresses, {process_of_rank}, options, [&](GpuMember& member) {
        const int num_ranks = static_cast<int>(process_of_rank.size());
        const std::vector<CallAttributes> sites = CallsOfPeers(num_ranks);
        for (size_t n = first; n < sites.size(); n += stride) {
          CallAttributes at = sites[n];
          at.channel = "jit_f/" + std::to_string(n);
          const int seed = static_cast<int>(n);
          const DType dtype = n / stride % 2 == 0 ? DType::kF32 : DType::kBF16;
          GpuCalls calls(member.gpus(), at, {}, dtype, seed, member.placement());
          calls.RunAll();
          member.gpus().Synchronize();
          CheckRight(calls);
          CheckReplays(member.gpus(), calls, 1000 + 100 * seed);
        }
      });
  CheckAllWell(processes);
}

// Process 1 has no memory left for the kernels.
TEST(AProcessWhoseDeviceCannotBeUsedFailsTheOthersAtOnce) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    Gpus gpus({.num_devices = 1, .first_device = process});
    gpus.engine().set_local_devices({{0, process}});
    auto communicator =
        ConnectOn(process, addresses, {.process_of_rank = {0, 1}, .timeout_s = 60});
    if (process == 1) {
      gpus.machine.Fail("LibraryLoadData", CUDA_ERROR_OUT_OF_MEMORY);
      CHECK_THROWS(gpus.engine().Join(communicator, {0, 1}), "cuLibraryLoadData");
      AtOnce([&] { communicator.reset(); });
      ++addresses.bulletin.word();
      return;
    }
    gpus.engine().Join(communicator, {0, 1});
    addresses.bulletin.WaitForWord(1);
    CHECK_THROWS(communicator->ThrowIfFailed(), "cuLibraryLoadData");
    gpus.engine().Leave(communicator);
  });
  CheckAllWell(processes);
}

TEST(EveryOpByEveryMethodIsExactInTwoProcesses) { EveryOp({0, 1}); }
TEST(EveryOpByEveryMethodIsExactInThreeProcesses) { EveryOp({2, 0, 1}); }
TEST(EveryOpByEveryMethodIsExactInFourProcesses) { EveryOp({0, 1, 2, 3}); }
// Each of the three tests runs a third of the calls.
TEST(EveryOpByEveryMethodIsExactInFiveToSevenProcesses) {
  EveryOp({4, 0, 1, 2, 3}, 3, 0);
  EveryOp({0, 1, 2, 3, 4, 5}, 3, 1);
  EveryOp({0, 6, 5, 4, 3, 2, 1}, 3, 2);
}
TEST(EveryOpByEveryMethodIsExactInEightProcesses) {
  EveryOp({0, 1, 2, 3, 4, 5, 6, 7}, 2);
}
TEST(EveryOpByEveryMethodIsExactWithSeveralRanksAProcess) {
  EveryOp({0, 1, 0, 1});
  EveryOp({0, 0, 0, 0, 1, 1, 1, 1}, 5);
}
TEST(EveryOpByEveryMethodIsExactInEachSharingMode) {
  for (const WayCase& one : Ways()) EveryOp({1, 0, 1}, 2, 0, one.options);
}

void InAnyOrder(const std::vector<int>& process_of_rank) {
  if (process_of_rank.size() > kMaxTestRanks) return;
  AddressExchange addresses;
  Processes processes = RunOnGpus(
      addresses, {process_of_rank}, {.seed = 7, .max_delay_us = 100},
      [&](GpuMember& member) {
        CheckInAnyOrder(member.gpus(), static_cast<int>(process_of_rank.size()),
                        member.placement(), 11);
      });
  CheckAllWell(processes);
}

TEST(ManyCallsInAnyOrderAreExact) {
  InAnyOrder({0, 1});
  InAnyOrder({2, 0, 1});
  InAnyOrder({0, 1, 2, 3});
  InAnyOrder({0, 1, 2, 3, 4});
  InAnyOrder({0, 1, 2, 3, 4, 5});
  InAnyOrder({0, 1, 2, 3, 4, 5, 6});
  InAnyOrder({0, 1, 2, 3, 4, 5, 6, 7});
}

// ThreadSanitizer cannot observe other processes. For example, rank 1 reads a slot that
// rank 0 has written, and then notifies rank 2: it does not see that this orders the
// writes of both. cuda_ops_test.cc runs the same calls with all ranks in one process.
#ifndef __SANITIZE_THREAD__
TEST(ManyCallsInAnyOrderAreExactWithSeveralRanksAProcess) {
  InAnyOrder({1, 0, 1});
  InAnyOrder({0, 1, 0, 1});
}
#endif

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
