// Tests how ranks create a multicast address of all heaps, in one process and in
// several: if a driver call fails on one rank, all ranks do without multicast, and no
// object is left.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/address_exchange.h"
#include "cuda/emulated_driver.h"
#include "cuda/exchange.h"
#include "platform/error.h"
#include "processes.h"
#include "random_gemm.h"
#include "transport/cuda/communicator.h"
#include "transport/cuda/multicast_kernels.h"

namespace jax_ub {
namespace {

constexpr const char* kSteps[] = {"MulticastGetGranularity", "MulticastCreate",
                                  "MulticastAddDevice", "MulticastBindMem"};

std::shared_ptr<CudaCommunicator> MakeOn(std::vector<int> ordinals,
                                         const Driver& driver = EmulatedDriver()) {
  return CudaCommunicator::Make(driver, ordinals, RankOnGpu::kSlotsBytes, "tp", true);
}

// Returns the number of wrong elements in sums over the ranks of slots that each rank
// fills with its rank + 1.
int NumWrongSums(const std::shared_ptr<CudaCommunicator>& communicator,
                 DType dtype = DType::kF32) {
  constexpr int64_t kNumElements = 1001;
  const Driver& driver = EmulatedDriver();
  const std::string label = "sum";
  struct Rank {
    Context context;
    std::unique_ptr<FlagKernels> flags;
    std::unique_ptr<MulticastKernels> multicast;
    std::unique_ptr<Stream> stream;
    std::unique_ptr<HostMemory> memory;
  };
  const int num_ranks = communicator->num_ranks();
  std::vector<Rank> ranks;
  for (const int rank : communicator->local_ranks()) {
    Rank& own = ranks.emplace_back();
    own.context = Context(driver, communicator->ordinal(rank));
    const ScopedContext scoped(driver, own.context.get());
    own.flags = std::make_unique<FlagKernels>(driver);
    own.multicast = std::make_unique<MulticastKernels>(driver);
    own.stream = std::make_unique<Stream>(driver);
    own.memory = std::make_unique<HostMemory>(driver, kNumElements * SizeOf(dtype));
    auto* const bytes = static_cast<std::byte*>(own.memory->get());
    for (int64_t i = 0; i < kNumElements; ++i) {
      Write(bytes + i * SizeOf(dtype), dtype, static_cast<float>(rank + 1));
    }
  }
  for (size_t n = 0; n < ranks.size(); ++n) {
    const int rank = communicator->local_ranks()[n];
    const Rank& own = ranks[n];
    const ScopedContext scoped(driver, own.context.get());
    CudaSlots slots(rank, communicator->addresses(rank), communicator->error(rank),
                    {communicator->NumberOf({label, {}})},
                    communicator->AddressSlots(1, 8192),
                    {.driver = &driver,
                     .flags = own.flags.get(),
                     .stream = own.stream->get(),
                     .copies = {},
                     .multicast = own.multicast.get()});
    const auto at = reinterpret_cast<CUdeviceptr>(slots.slot(0));
    const auto barrier = [&](int stage) {
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer != rank) slots.Signal(peer, stage * num_ranks + rank);
      }
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer != rank) slots.Wait(peer, stage * num_ranks + peer, {label, peer, 60});
      }
    };
    Check(driver,
          driver.MemcpyAsync(at, own.memory->device(), kNumElements * SizeOf(dtype),
                             own.stream->get()),
          "cuMemcpyAsync");
    barrier(0);
    slots.SumByMulticast({0, kNumElements, dtype, {}});
    barrier(1);
    Check(driver,
          driver.MemcpyAsync(own.memory->device(), at, kNumElements * SizeOf(dtype),
                             own.stream->get()),
          "cuMemcpyAsync");
    slots.EndCall();
    slots.Finish({});
  }
  int num_wrong = 0;
  for (const Rank& own : ranks) {
    const ScopedContext scoped(driver, own.context.get());
    Check(driver, driver.StreamSynchronize(own.stream->get()), "cuStreamSynchronize");
    const auto* const bytes = static_cast<const std::byte*>(own.memory->get());
    const auto sum = static_cast<float>(num_ranks * (num_ranks + 1) / 2);
    for (int64_t i = 0; i < kNumElements; ++i) {
      num_wrong += Read(bytes + i * SizeOf(dtype), dtype) != sum;
    }
  }
  return num_wrong;
}

TEST(RanksOfOneProcessSumByMulticast) {
  for (int num_ranks = 1; num_ranks <= 8; ++num_ranks) {
    EmulatedMachine machine({.num_devices = num_ranks, .max_delay_us = 50});
    {
      std::vector<int> ordinals;
      for (int n = 0; n < num_ranks; ++n) ordinals.push_back(n);
      const auto communicator = MakeOn(ordinals);
      CHECK(communicator->has_multicast());
      CHECK(communicator->fallbacks().empty());
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        CHECK_EQ(NumWrongSums(communicator, dtype), 0);
      }
      // Puts still work as before.
      RanksOnGpus exchange(communicator);
      CHECK_EQ(exchange.NumWrongOf(2), 0);
    }
    CHECK_EQ(machine.Complaints(), "");
  }
}

TEST(AMissingCapabilityOfOneProcessIsNamed) {
  const auto why_not = [](EmulatedOptions options, std::vector<int> ordinals,
                          const Driver& driver) {
    EmulatedMachine machine(std::move(options));
    std::string reason;
    {
      const auto communicator = MakeOn(std::move(ordinals), driver);
      CHECK(!communicator->has_multicast());
      CHECK_EQ(communicator->fallbacks().back().mode, "nvls");
      reason = communicator->fallbacks().back().reason;
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(1), 0);
    }
    CHECK_EQ(machine.Complaints(), "");
    return reason;
  };
  const Driver& driver = EmulatedDriver();
  CHECK_EQ(why_not({.num_devices = 2, .has_multicast = false}, {0, 1}, driver),
           "GPU 0 has no multicast");
  CHECK_EQ(why_not({.num_devices = 2}, {0, 0, 1}, driver),
           "several of its ranks have one GPU");
  CHECK_EQ(why_not({.num_devices = 2, .has_vmm = false}, {0, 1}, driver),
           "the heaps are not virtual memory");
  Driver older = driver;
  older.MulticastCreate = nullptr;
  CHECK_EQ(why_not({.num_devices = 2}, {0, 1}, older),
           "the NVIDIA driver has no cuMulticastCreate of CUDA 12.1");
}

TEST(EachStepMayFailInOneProcessAndNothingIsLeft) {
  for (const char* step : kSteps) {
    for (const int nth : {1, 2}) {
      const bool is_once =
          std::string_view(step) == kSteps[0] || std::string_view(step) == kSteps[1];
      if (is_once && nth == 2) continue;
      EmulatedMachine machine({.num_devices = 2});
      machine.Fail(step, CUDA_ERROR_SYSTEM_NOT_READY, nth);
      {
        const auto communicator = MakeOn({0, 1});
        CHECK(!communicator->has_multicast());
        CHECK_EQ(Describe(communicator->fallbacks()),
                 std::string("nvls: cu") + step +
                     ": CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized\n");
        CHECK_EQ(machine.Live().bindings, 0);
        CHECK_EQ(machine.Live().handles, 2);
        CHECK_EQ(machine.Live().reservations, 2);
        RanksOnGpus ranks(communicator);
        CHECK_EQ(ranks.NumWrongOf(1), 0);
      }
      CHECK_EQ(machine.Complaints(), "");
    }
  }
}

EmulatedOptions FabricOnly() {
  EmulatedOptions options;
  options.has_fd = false;
  options.has_fabric = true;
  return options;
}

TEST(RanksOfSeveralProcessesSumByMulticast) {
  for (const EmulatedOptions& mode : {EmulatedOptions(), FabricOnly()}) {
    for (const std::vector<int>& of_rank :
         std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {1, 0, 0, 1}}) {
      AddressExchange addresses;
      const int num_processes = *std::max_element(of_rank.begin(), of_rank.end()) + 1;
      Processes processes(num_processes, [&](int process) {
        EmulatedOptions options = mode;
        options.num_devices = 2;
        options.first_device = 2 * process;
        options.max_delay_us = 100;
        EmulatedMachine machine(options);
        {
          const auto communicator =
              ConnectOn(process, addresses, {.process_of_rank = of_rank, .nvls = true});
          CHECK(communicator->has_multicast());
          CHECK(mode.has_fd ? communicator->fallbacks().empty()
                            : communicator->fallbacks().size() == 1);
          for (int i = 0; i < 3; ++i) CHECK_EQ(NumWrongSums(communicator), 0);
        }
        CHECK_EQ(machine.Complaints(), "");
      });
      CheckAllWell(processes);
    }
  }
}

// The failing process is the one that creates the object, or one that imports it.
TEST(AStepThatFailsInOneProcessIsAFallbackOfAll) {
  const auto run = [](const std::string& function, int failing, int nth) {
    AddressExchange addresses;
    Processes processes(3, [&](int process) {
      EmulatedMachine machine({.first_device = process});
      if (process == failing) {
        machine.Fail(function, CUDA_ERROR_ILLEGAL_STATE, nth);
      }
      {
        const auto communicator =
            ConnectOn(process, addresses, {.process_of_rank = {0, 1, 2}, .nvls = true});
        CHECK_EQ(communicator->sharing_mode(), "vmm");
        CHECK(!communicator->has_multicast());
        CHECK_EQ(communicator->fallbacks().size(), 1u);
        CHECK_EQ(communicator->fallbacks()[0].mode, "nvls");
        CHECK(communicator->fallbacks()[0].reason.starts_with(
            "process " + std::to_string(failing) + ": cu" + function +
            ": CUDA_ERROR_ILLEGAL_STATE"));
        CHECK_EQ(machine.Live().bindings, 0);
        CHECK_EQ(machine.Live().handles, 3);
        CHECK_EQ(machine.Live().mappings, 3);
        CHECK_EQ(machine.Live().reservations, 3);
        RanksOnGpus ranks(communicator);
        CHECK_EQ(ranks.NumWrongOf(2), 0);
      }
      CHECK_EQ(machine.Complaints(), "");
    });
    CheckAllWell(processes);
  };
  run("MulticastCreate", 0, 1);
  // The earlier calls map the heaps: one for this rank, and two for its peers.
  run("MemExportToShareableHandle", 0, 3);
  run("MemImportFromShareableHandle", 2, 3);
  for (const int process : {0, 2}) {
    run("MulticastGetGranularity", process, 1);
    run("MulticastAddDevice", process, 1);
    run("MulticastBindMem", process, 1);
    run("MemAddressReserve", process, 4);
    run("MemMap", process, 4);
    run("MemSetAccess", process, 4);
  }
}

TEST(AProcessThatCannotIsNamedBeforeAnythingIsTried) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_multicast = process != 1;
    EmulatedMachine machine(options);
    {
      const auto communicator =
          ConnectOn(process, addresses, {.process_of_rank = {0, 1}, .nvls = true});
      CHECK_EQ(Describe(communicator->fallbacks()),
               "nvls: process 1: GPU 0 has no multicast\n");
      CHECK_EQ(machine.NumCalls("MulticastCreate"), 0);
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(RanksThatShareAGpuOrHeapsOfIpcHaveNone) {
  for (const bool has_vmm : {true, false}) {
    AddressExchange addresses;
    Processes processes(2, [&](int process) {
      EmulatedOptions options;
      options.first_device = has_vmm ? 0 : process;
      options.has_vmm = has_vmm;
      EmulatedMachine machine(options);
      {
        const auto communicator =
            ConnectOn(process, addresses, {.process_of_rank = {0, 1}, .nvls = true});
        CHECK_EQ(communicator->fallbacks().back().reason,
                 has_vmm ? "several of its ranks have one GPU"
                         : "the heaps are shared by ipc");
      }
      CHECK_EQ(machine.Complaints(), "");
    });
    CheckAllWell(processes);
  }
}

// The ranks could not report a failed step to the other host.
TEST(RanksOfSeveralHostsHaveNone) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_fabric = true;
    EmulatedMachine machine(options);
    {
      const auto communicator = ConnectOn(process, addresses,
                                          {.process_of_rank = {0, 1},
                                           .host = process == 1 ? "there" : "here",
                                           .nvls = true});
      CHECK_EQ(Describe(communicator->fallbacks()),
               "vmm: its ranks span 2 hosts\nnvls: its ranks span 2 hosts\n");
      ++addresses.bulletin.word();
      addresses.bulletin.WaitForWord(2);
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(ProcessesWithDifferentSettingsOfNvlsNameBoth) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    ConnectOn(process, addresses, {.process_of_rank = {0, 1}, .nvls = process == 0});
  });
  for (const std::string& text : processes.Join()) {
    CHECK(Contains(text, "bytes on GPUs, NVLS, protocol"));
    CHECK(Contains(text, "bytes on GPUs, protocol"));
  }
}

TEST(NothingIsLeftAfterManyCyclesWithMulticast) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    const auto num_files = [] {
      const std::filesystem::directory_iterator files("/proc/self/fd");
      return std::distance(begin(files), end(files));
    };
    ptrdiff_t before = 0;
    for (int round = 1; round <= 40; ++round) {
      {
        const auto communicator =
            ConnectOn(process, addresses,
                      {.process_of_rank = {0, 1}, .round = round, .nvls = true});
        if (round % 10 == 1) CHECK_EQ(NumWrongSums(communicator), 0);
        if (round % 2 == 0) communicator->Close();
      }
      if (round == 1) before = num_files();
      CHECK_EQ(machine.Live().Describe(), "");
    }
    CHECK_EQ(num_files(), before);
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
