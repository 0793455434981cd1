// Tests all-reduces by multicast through the CUDA engine, on emulated GPUs: values,
// eager and replayed, failures, and calls that use the same slots for other
// collectives.
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/address_exchange.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"
#include "cuda/gpu_member.h"
#include "processes.h"

namespace jax_ub {
namespace {

using jax_ub_test::Sizes;

// Rows have 48 bytes in bf16, so pieces begin at a multiple of a vector.
constexpr Sizes kWhole = {2, 9, 5, 24};
// The size of a row is no multiple of a vector.
constexpr Sizes kOdd = {2, 5, 7, 3};

class NvlsGpus : public Gpus {
 public:
  explicit NvlsGpus(EmulatedOptions options, double timeout_s = kLongS)
      : Gpus(std::move(options), timeout_s) {
    engine().set_nvls(true);
  }
};

template <typename Function>
void ForEachReduction(int num_ranks, const Function& function) {
  for (const Op op : {Op::kMatmulAllReduce, Op::kAllReduce}) {
    for (const Method method :
         {Method::kRingExchange, Method::kPipeline, Method::kExternal}) {
      for (const CallAttributes& at : Variants(op, method, num_ranks)) function(at);
    }
  }
}

int64_t NumSums(Gpus& gpus) { return gpus.machine.NumCalls(kMulticastSumKernel); }

TEST(AllReducesByMulticastAreExact) {
  int seed = 0;
  for (int num_ranks = 2; num_ranks <= kMaxTestRanks; ++num_ranks) {
    NvlsGpus gpus({.num_devices = num_ranks, .seed = 3, .max_delay_us = 30});
    ForEachReduction(num_ranks, [&](const CallAttributes& at) {
      for (const Sizes& sizes : {kWhole, kOdd}) {
        const DType dtype = ++seed % 2 == 0 ? DType::kF32 : DType::kBF16;
        const int64_t before = NumSums(gpus);
        GpuCalls calls(gpus, at, sizes, dtype, seed);
        calls.RunAll();
        gpus.Synchronize();
        CheckRight(calls);
        // A one-shot exchange does not become a multicast.
        CHECK_EQ(NumSums(gpus) > before, at.variant != Variant::kOneShot);
      }
    });
  }
}

TEST(ARankAloneNeedsNoMulticast) {
  NvlsGpus gpus({.num_devices = 1});
  GpuCalls calls(gpus, MakeAttributes(Op::kMatmulAllReduce, Method::kPipeline, 1), {},
                 DType::kF32, 1);
  calls.RunAll();
  gpus.Synchronize();
  CheckRight(calls);
  CHECK_EQ(NumSums(gpus), 0);
}

TEST(CapturedAllReducesAreExactWheneverTheyAreReplayed) {
  for (const int num_ranks : {2, 3}) {
    NvlsGpus gpus({.num_devices = num_ranks, .seed = 5, .max_delay_us = 30});
    int seed = 0;
    ForEachReduction(num_ranks, [&](const CallAttributes& at) {
      const DType dtype = ++seed % 2 == 0 ? DType::kF32 : DType::kBF16;
      GpuCalls calls(gpus, at, seed % 3 == 0 ? kOdd : kWhole, dtype, seed);
      CheckReplays(gpus, calls, 100 * seed);
    });
  }
}

// Calls share slots with all-reduces in one piece and in several, and with other
// collectives: a flag belongs to one rank in one call and to another rank in the next.
TEST(SlotsAreSharedWithCallsOfAllKinds) {
  for (const int num_ranks : {2, 3, 4}) {
    NvlsGpus gpus({.num_devices = num_ranks, .seed = 7, .max_delay_us = 100});
    std::vector<std::unique_ptr<GpuCalls>> calls;
    std::mt19937 random(13);
    for (const Op op : {Op::kMatmulAllReduce, Op::kAllReduce, Op::kMatmulAllReduce,
                        Op::kAllGatherMatmul, Op::kMatmulReduceScatter}) {
      for (const Method method : {Method::kRingExchange, Method::kPipeline}) {
        calls.push_back(
            std::make_unique<GpuCalls>(gpus, MakeAttributes(op, method, num_ranks),
                                       kWhole, DType::kF32, random()));
      }
    }
    std::vector<size_t> order;
    for (int i = 0; i < 60; ++i) order.push_back(random() % calls.size());
    // Rank 0's initialization allocates the heap for all calls, so that they share it.
    for (const auto& one : calls) one->Initialize(0);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        for (const size_t which : order) {
          calls[which]->Initialize(rank);
          calls[which]->Execute(rank);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    gpus.Synchronize();
    for (const size_t which : order) CheckRight(*calls[which]);
  }
}

TEST(RanksOfSeveralProcessesReduceByMulticast) {
  for (const std::vector<int>& of_rank :
       std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {0, 1, 1, 0}}) {
    AddressExchange addresses;
    Processes processes = RunOnGpus(
        addresses, {.process_of_rank = of_rank, .nvls = true},
        {.seed = 1, .max_delay_us = 50}, [&](GpuMember& member) {
          int seed = 0;
          ForEachReduction(static_cast<int>(of_rank.size()), [&](CallAttributes at) {
            at.channel = "jit_f/" + std::to_string(++seed);
            GpuCalls calls(member.gpus(), at, kWhole, DType::kF32, seed,
                           member.placement());
            calls.RunAll();
            member.gpus().Synchronize();
            CheckRight(calls);
            CheckReplays(member.gpus(), calls, 100 * seed);
          });
          CHECK(NumSums(member.gpus()) > 0);
        });
    CheckAllWell(processes);
  }
}

TEST(WithoutMulticastTheScheduleRuns) {
  NvlsGpus gpus({.num_devices = 3, .has_multicast = false});
  GpuCalls calls(gpus, MakeAttributes(Op::kMatmulAllReduce, Method::kPipeline, 3), {},
                 DType::kF32, 1);
  calls.RunAll();
  gpus.Synchronize();
  CheckRight(calls);
  CHECK_EQ(NumSums(gpus), 0);
}

TEST(MulticastIsUsedOnlyIfItIsEnabled) {
  Gpus gpus({.num_devices = 2});
  GpuCalls calls(gpus, MakeAttributes(Op::kAllReduce, Method::kPipeline, 2), {},
                 DType::kF32, 1);
  calls.RunAll();
  gpus.Synchronize();
  CheckRight(calls);
  CHECK_EQ(NumSums(gpus), 0);
}

TEST(AnExportedProgramInAnotherOrderFailsByMulticastToo) {
  NvlsGpus gpus({.num_devices = 3, .seed = 5, .max_delay_us = 30});
  ForEachReduction(3, [&](const CallAttributes& at) {
    GpuCalls calls(gpus, at, kWhole, DType::kF32, 1, {{}, {}, {0, 1, 2}});
    calls.SetPartitions({0, 1, 2});
    CapturedCalls captured(gpus, calls);
    captured.LaunchAll();
    gpus.Synchronize();
    CheckRight(calls);
    calls.SetPartitions({0, 2, 1});
    LaunchMisplaced(gpus, captured, 3);
    for (int rank = 0; rank < 3; ++rank) CHECK_EQ(calls.NumNumbers(rank), 0);
    CHECK_THROWS(calls.Initialize(0), "rank 1 runs partition 2");
    gpus.engine().ReleaseInProcess();
  });
}

TEST(AMissingRankFillsAllResultsWithNan) {
  NvlsGpus gpus({.num_devices = 2}, 0.05);
  GpuCalls calls(gpus, MakeAttributes(Op::kMatmulAllReduce, Method::kPipeline, 2),
                 kWhole, DType::kF32, 1);
  for (int rank = 0; rank < 2; ++rank) calls.Initialize(rank);
  calls.Execute(0);
  gpus.Synchronize();
  CHECK_EQ(calls.NumNumbers(0), 0);
  CHECK_THROWS(calls.Execute(1), "rank 0 waited ");
  CHECK_EQ(gpus.engine().Failures().size(), 1u);
  CHECK(SecondsWaited(check::TextOf(gpus.engine().Failures().begin()->second)) >= 0.05);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
