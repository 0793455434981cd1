// Tests communicators of ranks on GPUs of one process, on the emulated driver.
#include "transport/cuda/communicator.h"

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/exchange.h"
#include "platform/error.h"
#include "transport/cuda/signature_table.h"

namespace jax_ub {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The maximum time of events that do not wait for the deadline, also on a busy machine.
constexpr double kAtOnceS = 20;

std::vector<int> Ordinals(int num_ranks) {
  std::vector<int> ordinals(num_ranks);
  for (int r = 0; r < num_ranks; ++r) ordinals[r] = r;
  return ordinals;
}

std::shared_ptr<CudaCommunicator> MakeOn(const std::vector<int>& ordinals) {
  return CudaCommunicator::Make(EmulatedDriver(), ordinals, RankOnGpu::kSlotsBytes,
                                "tp");
}

bool IsDeadline(const std::exception_ptr& reason) {
  try {
    if (reason) std::rethrow_exception(reason);
  } catch (const DeadlineError&) {
    return true;
  } catch (const std::exception&) {
    return false;
  }
  return false;
}

TEST(RanksOfOneProcessReachEachOther) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    EmulatedMachine machine({.num_devices = num_ranks, .seed = 3, .max_delay_us = 100});
    {
      const auto communicator = MakeOn(Ordinals(num_ranks));
      CHECK_EQ(communicator->sharing_mode(), "in_process");
      CHECK(communicator->fallbacks().empty());
      CHECK_EQ(communicator->num_ranks(), num_ranks);
      CHECK_EQ(communicator->slots_bytes(), RankOnGpu::kSlotsBytes);
      CHECK_EQ(communicator->size_bytes() % num_ranks, 0);
      CHECK(communicator->size_bytes() >= num_ranks * RankOnGpu::kSlotsBytes);
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(10), 0);
      CHECK(!communicator->failure());
    }
    CHECK_EQ(machine.Complaints(), "");
  }
}

TEST(SeveralRanksMayHaveOneDevice) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const auto communicator = MakeOn({0, 0, 1});
    RanksOnGpus ranks(communicator);
    CHECK_EQ(ranks.NumWrongOf(5), 0);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(CallsMayBeEnqueuedAheadOfEachOther) {
  EmulatedMachine machine({.num_devices = 3, .seed = 5, .max_delay_us = 200});
  {
    const auto communicator = MakeOn(Ordinals(3));
    RanksOnGpus ranks(communicator);
    // All exchanges have the same words, so only their times differ.
    for (int i = 0; i < 20; ++i) ranks.Enqueue(7);
    CHECK_EQ(ranks.NumWrong(7), 0);
    CHECK(!communicator->failure());
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(WithoutVirtualMemoryDevicesReachWhatOthersAllocated) {
  EmulatedMachine machine({.num_devices = 3, .has_vmm = false});
  {
    const auto communicator = MakeOn(Ordinals(3));
    CHECK_EQ(communicator->sharing_mode(), "in_process");
    CHECK_EQ(communicator->fallbacks().size(), 1u);
    CHECK_EQ(communicator->fallbacks()[0].mode, "vmm");
    CHECK(communicator->fallbacks()[0].reason.find("CUDA_ERROR_NOT_SUPPORTED") !=
          std::string::npos);
    RanksOnGpus ranks(communicator);
    CHECK_EQ(ranks.NumWrongOf(5), 0);
    // This communicator finds peer access enabled already.
    RanksOnGpus others(MakeOn(Ordinals(3)));
    CHECK_EQ(others.NumWrongOf(2), 0);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(DevicesThatCannotAccessEachOtherAreNamed) {
  EmulatedMachine machine({.num_devices = 3, .without_peer_access = {{1, 2}}});
  CHECK_THROWS(
      MakeOn(Ordinals(3)),
      "jax_ub.tp: GPU 1 cannot access GPU 2 (cuDeviceCanAccessPeer): there is no "
      "NVLink or PCIe peer-to-peer between them");
  CHECK_EQ(MakeOn({0, 1})->num_ranks(), 2);
  CHECK_EQ(machine.Complaints(), "");
}

TEST(MoreThanADeviceHasIsRefused) {
  EmulatedMachine machine({.num_devices = 2, .device_memory_bytes = int64_t{16} << 20});
  try {
    CudaCommunicator::Make(EmulatedDriver(), {0, 1}, int64_t{32} << 20, "tp");
    CHECK(false);
  } catch (const CommunicatorError& error) {
    const std::string text = error.what();
    CHECK(text.starts_with("CommunicatorError: jax_ub: a heap of "));
    CHECK(text.find("a lower XLA_CLIENT_MEM_FRACTION leaves") != std::string::npos);
    CHECK(text.find(" bytes: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY") !=
          std::string::npos);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(EachCallOfTheDriverMayFailAndNothingIsLeft) {
  EmulatedMachine machine({.num_devices = 2});
  for (const char* function :
       {"DevicePrimaryCtxRetain", "DeviceCanAccessPeer", "MemGetAllocationGranularity",
        "MemCreate", "MemAddressReserve", "MemMap", "MemSetAccess", "MemsetD8Async",
        "StreamCreateWithPriority", "MemHostAlloc"}) {
    for (const int nth : {1, 2}) {
      machine.Fail(function, CUDA_ERROR_UNKNOWN, nth);
      try {
        RanksOnGpus ranks(MakeOn({0, 1}));
        CHECK_EQ(ranks.NumWrongOf(1), 0);
      } catch (const Error& error) {
        CHECK(std::string(error.what()).find("CUDA_ERROR_UNKNOWN") !=
              std::string::npos);
      }
      CHECK_EQ(machine.Live().Describe(), "");
    }
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(AWaitThatReachesItsDeadlineIsDescribed) {
  EmulatedMachine machine({.num_devices = 3});
  {
    const auto communicator = MakeOn(Ordinals(3));
    RanksOnGpus ranks(communicator);
    CHECK_EQ(ranks.NumWrongOf(1), 0);
    ranks[0].Enqueue(2, 0.05);
    CHECK(ranks[0].IsFilledWithNan());
    const std::exception_ptr failure = communicator->failure();
    CHECK(IsDeadline(failure));
    const std::string text = check::TextOf(failure);
    CHECK(
        text.starts_with("CommunicatorError: jax_ub.exchange (ub_name 'qkv'): rank 0 "
                         "waited "));
    CHECK(SecondsWaited(text) >= 0.05);
    CHECK(text.ends_with(
        " s for chunk 1 of rank 1 in slot 1. JAX_UB_TIMEOUT_S sets the seconds."));
    CHECK_THROWS(communicator->ThrowIfFailed(), text);
    // The other ranks end at once, with complete chunks or none. They run one by one,
    // because a rank that no longer waits may read a slot while it is written, and then
    // fills its result with NaN.
    const auto begin = Clock::now();
    for (const int rank : {1, 2}) {
      ranks[rank].Enqueue(2);
      CHECK(ranks[rank].NumWrong(2) == 0 || ranks[rank].IsFilledWithNan());
    }
    CHECK(SecondsSince(begin) < kAtOnceS);
    CHECK_EQ(check::TextOf(communicator->failure()), text);
  }
  CHECK_EQ(machine.Complaints(), "");
}

// Runs `cause` while failure() waits, and returns the text of the failure.
std::string FailureDespiteLate(CudaCommunicator& communicator,
                               const std::function<void()>& cause) {
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    cause();
  });
  const std::string text = check::TextOf(communicator.failure());
  late.join();
  return text;
}

TEST(AFailureIsReportedWithACauseThatIsKnownLater) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const auto communicator = MakeOn(Ordinals(2));
    Notify(*communicator, 1, 0);
    CHECK_EQ(FailureDespiteLate(
                 *communicator,
                 [&] { communicator->Poison(std::make_exception_ptr(Error("boom"))); }),
             "boom");
  }
  {
    const auto communicator = MakeOn(Ordinals(2));
    Notify(*communicator, 1, 0);
    ErrorRecord cause = {};
    cause.code = ErrorRecord::kDeadline;
    cause.peer = 1;
    cause.waited_ns = 3000000000;
    const std::string text =
        FailureDespiteLate(*communicator, [&] { FillRecord(*communicator, 0, cause); });
    CHECK(text.find(": rank 0 waited 3 s for ") != std::string::npos);
    CHECK(IsDeadline(communicator->failure()));
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(CallsThatDifferAreReportedWithDescriptionsThatArriveLater) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const auto communicator = MakeOn(Ordinals(2));
    const GpuCallSignature own = {.rank = 1, .site = "jit_f/0", .call = "A"};
    const GpuCallSignature other = {.rank = 0, .site = "jit_f/1", .call = "B"};
    communicator->Declare(own);
    ErrorRecord record = {};
    record.code = ErrorRecord::kOtherCall;
    record.rank = 1;
    record.tag = own.tag();
    record.other_tag = other.tag();
    FillRecord(*communicator, 1, record);
    const std::string text =
        FailureDespiteLate(*communicator, [&] { communicator->Declare(other); });
    CHECK(text.find("rank 1 and rank 0 make different calls: A (call site jit_f/0); "
                    "and B (call site jit_f/1), respectively") != std::string::npos);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(APeerThatDoesNotEndItsPreviousCallIsNamed) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const auto communicator = MakeOn(Ordinals(2));
    RanksOnGpus ranks(communicator);
    ranks.Enqueue(1);
    CHECK_EQ(ranks.NumWrong(1), 0);
    // The rank is two calls ahead: the second call finds that its peer has not ended
    // the first.
    ErrorRecord record = {};
    record.code = ErrorRecord::kDeadline;
    record.rank = 1;
    record.peer = 0;
    record.slot = ErrorRecord::kNoSlot;
    record.chunk = -1;
    record.waited_ns = 3000000000;
    FillRecord(*communicator, 1, record);
    CHECK_EQ(
        check::TextOf(communicator->failure()),
        "CommunicatorError: jax_ub.exchange (ub_name 'qkv'): rank 1 waited 3 s for "
        "rank 0 to end its previous call. JAX_UB_TIMEOUT_S sets the seconds.");
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(ARankThatRunsAnotherPartitionIsNamed) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const auto communicator = MakeOn(Ordinals(2));
    Notify(*communicator, 0, 1);
    ErrorRecord record = {};
    record.code = ErrorRecord::kMisplaced;
    record.rank = 1;
    record.call = communicator->NumberOf({"all_reduce", {40, 41}});
    FillRecord(*communicator, 1, record);
    CHECK_EQ(
        check::TextOf(communicator->failure()),
        "CommunicatorError: jax_ub.all_reduce: rank 1 runs partition 0, which is "
        "that of device 40: the program was lowered for export for the devices "
        "[40, 41] in that order, and is called on them in another. On GPUs call it "
        "on a mesh of these devices in that order, or export it for the mesh that "
        "it is called on");
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(PoisonEndsTheWaitsOfAllRanks) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const auto communicator = MakeOn(Ordinals(2));
    RanksOnGpus ranks(communicator);
    const auto begin = Clock::now();
    ranks[1].Enqueue(1);
    communicator->Poison(std::make_exception_ptr(Error("rank 0 failed: boom")));
    communicator->Poison(std::make_exception_ptr(Error("too late")));
    CHECK(ranks[1].IsFilledWithNan());
    CHECK(SecondsSince(begin) < kAtOnceS);
    CHECK_EQ(check::TextOf(communicator->failure()), "rank 0 failed: boom");
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(ClosedCommunicatorsRefuseAndHoldNothing) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const auto communicator = MakeOn(Ordinals(2));
    {
      RanksOnGpus ranks(communicator);
      // The work that was enqueued before Close is completed.
      ranks.Enqueue(1);
      communicator->Close();
      CHECK_EQ(ranks.NumWrong(1), 0);
    }
    communicator->Close();
    CHECK_EQ(machine.Live().handles, 0);
    CHECK_EQ(machine.Live().mappings, 0);
    CHECK_THROWS(communicator->ThrowIfFailed(),
                 "CommunicatorError: jax_ub.tp: it closed its communicator");
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(NothingIsLeftAfterManyCycles) {
  EmulatedMachine machine({.num_devices = 2});
  const auto count_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return std::distance(begin(files), end(files));
  };
  {
    RanksOnGpus(MakeOn({0, 1})).NumWrongOf(1);
  }
  const auto num_files = count_files();
  for (int round = 0; round < 100; ++round) {
    const auto communicator = MakeOn({0, 1});
    if (round % 10 == 0) {
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(1), 0);
    }
    if (round % 2 == 0) communicator->Close();
  }
  CHECK_EQ(count_files(), num_files);
  CHECK_EQ(machine.Complaints(), "");
}

TEST(SlotsThatDoNotFitAreRefused) {
  EmulatedMachine machine;
  {
    const auto communicator = MakeOn({0});
    CHECK_EQ(communicator->AddressSlots(2, 1000).num_slots, 2);
    CHECK_THROWS(
        communicator->AddressSlots(3, 32 * 1024),
        "jax_ub.tp: 3 slots of 32768 bytes do not fit into a heap of 65536 bytes "
        "with 4096 flags: give initialize_ub a larger shape");
    CHECK_THROWS(communicator->AddressSlots(4097, 1),
                 "4097 slots of 1 bytes do not fit");
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(TheSameNameHasTheSameNumber) {
  EmulatedMachine machine;
  {
    const auto communicator = MakeOn({0});
    const uint32_t first = communicator->NumberOf({"a", {}});
    CHECK(communicator->NumberOf({"b", {}}) != first);
    CHECK(communicator->NumberOf({"a", {0}}) != first);
    CHECK_EQ(communicator->NumberOf({"a", {}}), first);
  }
  CHECK_EQ(machine.Complaints(), "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
