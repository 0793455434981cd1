// Tests how ranks on GPUs of several processes share memory, on the emulated driver:
// each mode, fallbacks between modes, errors, and that no object is left.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/address_exchange.h"
#include "cuda/emulated_driver.h"
#include "cuda/exchange.h"
#include "platform/error.h"
#include "processes.h"
#include "transport/cuda/communicator.h"

namespace jax_ub {
namespace {

// Processes have one rank each, on different GPUs or on one GPU, or two ranks each.
TEST(RanksOfSeveralProcessesShareMemoryInEachMode) {
  for (const WayCase& one : Ways()) {
    for (const std::vector<int>& of_rank :
         std::vector<std::vector<int>>{{0, 1, 2}, {0, 0, 1, 1}, {1, 0, 1}}) {
      for (const bool is_shared : {false, true}) {
        if (is_shared && of_rank.size() != 3) continue;
        AddressExchange addresses;
        const int num_processes = *std::max_element(of_rank.begin(), of_rank.end()) + 1;
        Processes processes(num_processes, [&](int process) {
          EmulatedOptions options = one.options;
          options.num_devices = 2;
          options.first_device = is_shared ? 0 : 2 * process;
          options.seed = process + 1;
          options.max_delay_us = 100;
          EmulatedMachine machine(options);
          {
            const auto communicator = ConnectOn(process, addresses, {of_rank});
            CHECK_EQ(communicator->sharing_mode(), one.mode);
            RanksOnGpus ranks(communicator);
            CHECK_EQ(ranks.NumWrongOf(10), 0);
            CHECK(!communicator->failure());
          }
          CHECK_EQ(machine.Complaints(), "");
        });
        CheckAllWell(processes);
      }
    }
  }
}

TEST(AModeThatOneProcessLacksFallsBackInAll) {
  AddressExchange addresses;
  Processes processes(3, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_vmm = process != 1;
    EmulatedMachine machine(options);
    {
      const auto communicator = ConnectOn(process, addresses, {{0, 1, 2}});
      CHECK_EQ(communicator->sharing_mode(), "ipc");
      CHECK_EQ(Describe(communicator->fallbacks()),
               "vmm: process 1: GPU 0 has no virtual memory management\n"
               "fabric: process 0: GPU 0 has no memory handles for a fabric\n");
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(3), 0);
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(FabricHandlesThatAreNotPermittedDoNotHinderDescriptors) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_fabric = true;
    options.fabric_result = CUDA_ERROR_NOT_PERMITTED;
    EmulatedMachine machine(options);
    {
      const CudaEndpoint endpoint(EmulatedDriver(), {0}, 4096, "here");
      CHECK(Contains(endpoint.capabilities().at("no fabric"),
                     "cuMemCreate: CUDA_ERROR_NOT_PERMITTED"));
      CHECK_EQ(endpoint.capabilities().at("vmm"), "yes");
      CHECK_EQ(endpoint.capabilities().at("ipc"), "yes");
    }
    {
      const auto communicator = ConnectOn(process, addresses, {{0, 1}});
      CHECK_EQ(communicator->sharing_mode(), "vmm");
      CHECK(communicator->fallbacks().empty());
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

// Covers failures that appear only when memory is mapped.
TEST(AModeThatFailsInOneProcessFallsBackInAll) {
  for (const char* function : {"MemImportFromShareableHandle", "MemMap", "MemSetAccess",
                               "MemAddressReserve"}) {
    AddressExchange addresses;
    Processes processes(3, [&](int process) {
      EmulatedMachine machine({.first_device = process});
      // Except for imports, the first call is for the heap of this process.
      const bool is_import = std::string(function) == "MemImportFromShareableHandle";
      if (process == 2) machine.Fail(function, CUDA_ERROR_UNKNOWN, is_import ? 1 : 2);
      {
        const auto communicator = ConnectOn(process, addresses, {{0, 1, 2}});
        CHECK_EQ(communicator->sharing_mode(), "ipc");
        CHECK_EQ(communicator->fallbacks().size(), 2u);
        CHECK(communicator->fallbacks()[0].reason.starts_with(
            std::string("process 2: cu") + function + ": CUDA_ERROR_UNKNOWN"));
        RanksOnGpus ranks(communicator);
        CHECK_EQ(ranks.NumWrongOf(2), 0);
      }
      CHECK_EQ(machine.Complaints(), "");
    });
    CheckAllWell(processes);
  }
}

TEST(WithoutASharingModeAllProcessesFailAlike) {
  AddressExchange addresses;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    const auto num_files = [] {
      const std::filesystem::directory_iterator files("/proc/self/fd");
      return std::distance(begin(files), end(files));
    };
    const auto before = num_files();
    if (process == 0)
      machine.Fail("MemImportFromShareableHandle", CUDA_ERROR_UNKNOWN, 0);
    if (process == 1) machine.Fail("IpcOpenMemHandle", CUDA_ERROR_NOT_PERMITTED, 0);
    std::string text;
    try {
      ConnectOn(process, addresses, {{0, 1, 2}});
    } catch (const UnsupportedError& error) {
      text = error.what();
    }
    CHECK(text.starts_with(
        "jax_ub.tp: its processes have no way to share device memory: "));
    CHECK(Contains(text,
                   "; vmm: process 0: cuMemImportFromShareableHandle: CUDA_ERROR_"));
    CHECK(Contains(text,
                   "; ipc: process 1: cuIpcOpenMemHandle: CUDA_ERROR_NOT_PERMITTED"));
    CHECK_EQ(num_files(), before);
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(AProcessOutOfMemoryFailsAllAtOnce) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    // In mode ipc, the heap is allocated only after the mode has been selected.
    EmulatedMachine machine({.first_device = process});
    if (process == 0)
      machine.Fail("MemImportFromShareableHandle", CUDA_ERROR_UNKNOWN, 0);
    if (process == 1) machine.Fail("MemAlloc", CUDA_ERROR_OUT_OF_MEMORY, 2);
    AtOnce([&] {
      ConnectOn(process, addresses, {.process_of_rank = {0, 1}, .timeout_s = 60});
    });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(text.starts_with("CommunicatorError: "));
    CHECK(Contains(text, "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"));
  }
}

TEST(ProcessesWithDifferentHeapSizesNameBoth) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    AtOnce([&] {
      ConnectOn(process, addresses,
                {.process_of_rank = {0, 1},
                 .slots_bytes = 4096 * (process + 1),
                 .timeout_s = 60});
    });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(Contains(text, "slots of 4096 bytes on GPUs"));
    CHECK(Contains(text, "slots of 8192 bytes on GPUs"));
  }
}

// Processes on different hosts exchange data only during setup; there is no connection
// between them.
TEST(HostsShareByFabricHandles) {
  AddressExchange addresses;
  Processes processes(3, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_fabric = true;
    EmulatedMachine machine(options);
    {
      const auto communicator = ConnectOn(
          process, addresses,
          {.process_of_rank = {0, 1, 2}, .host = process == 2 ? "there" : "here"});
      CHECK_EQ(communicator->sharing_mode(), "fabric");
      CHECK_EQ(Describe(communicator->fallbacks()), "vmm: its ranks span 2 hosts\n");
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(5), 0);
      // The other host sends no notice when it closes.
      ++addresses.bulletin.word();
      addresses.bulletin.WaitForWord(3);
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(AProcessThatPassesInvalidDataIsNamed) {
  for (const auto& [nonsense, said] : std::vector<std::pair<std::string, std::string>>{
           {"x:00", "'x:00' as a heap, which is no size, colon and handle"},
           {"17", "'17' as a heap, which is no size, colon and handle"},
           {"17:00", "a heap of 17 bytes, not "},
           {"1000000000:zz", "'zz' as a handle, which is not that of 64 bytes"}}) {
    AddressExchange addresses;
    Processes processes(3, [&, &nonsense = nonsense](int process) {
      EmulatedOptions options;
      options.first_device = process;
      options.has_fabric = true;
      EmulatedMachine machine(options);
      ConnectOn(process, addresses,
                {.process_of_rank = {0, 1, 2},
                 .host = process == 2 ? "there" : "here",
                 .fabric = process == 2 ? nonsense : ""});
    });
    const std::vector<std::string> texts = processes.Join();
    for (const int p : {0, 1}) {
      CHECK(Contains(texts[p], "fabric: process 0: rank 2 (process 2) passed " + said));
    }
  }
}

TEST(NothingIsLeftAfterManyCyclesOfSeveralProcesses) {
  constexpr int kNumCycles = 100;
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    const auto count = [](const char* folder) {
      const std::filesystem::directory_iterator files(folder);
      return std::distance(begin(files), end(files));
    };
    ptrdiff_t num_files = 0;
    for (int round = 1; round <= kNumCycles; ++round) {
      {
        const auto communicator =
            ConnectOn(process, addresses, {.process_of_rank = {0, 1}, .round = round});
        if (round % 10 == 1) {
          RanksOnGpus ranks(communicator);
          CHECK_EQ(ranks.NumWrongOf(1), 0);
        }
        if (round % 4 == 0) communicator->Poison(std::make_exception_ptr(Error("x")));
        if (round % 2 == 0) communicator->Close();
      }
      if (round == 1) num_files = count("/proc/self/fd");
      CHECK_EQ(machine.Live().Describe(), "");
    }
    CHECK_EQ(count("/proc/self/fd"), num_files);
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
