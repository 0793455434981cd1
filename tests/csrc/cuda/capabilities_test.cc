// Tests the selection of the mode in which processes share device memory: a pure
// function of their capabilities.
#include "transport/cuda/capabilities.h"

#include <map>
#include <string>
#include <vector>

#include "check.h"

namespace jax_ub {
namespace {

// Returns the capabilities of a process on host "a" with GPUs `gpus` that supports
// every mode.
Capabilities CapabilitiesOf(const std::string& gpus) {
  return {{kHostKey, "a"}, {kGpusKey, gpus},   {kUnreachableKey, ""},
          {"vmm", "yes"},  {"fabric", "1:00"}, {"ipc", "yes"}};
}

Capabilities Without(Capabilities capabilities,
                     SharingMode mode,
                     const std::string& reason) {
  capabilities.erase(SharingModeName(mode));
  capabilities[CannotKey(mode)] = reason;
  return capabilities;
}

TEST(TheBestSharingModeOfAllProcessesIsFirst) {
  std::map<int, Capabilities> capabilities_of = {{0, CapabilitiesOf("x")},
                                                 {1, CapabilitiesOf("y")}};
  const SharingDecision all = Agree({0, 1}, capabilities_of);
  CHECK(all.modes == std::vector<SharingMode>(
                         {SharingMode::kVmm, SharingMode::kFabric, SharingMode::kIpc}));
  CHECK(all.fallbacks.empty());
  CHECK_EQ(all.rejection, "");
  capabilities_of[1] = Without(capabilities_of[1], SharingMode::kVmm, "GPU 0 has none");
  const SharingDecision some = Agree({0, 1}, capabilities_of);
  CHECK(some.modes ==
        std::vector<SharingMode>({SharingMode::kFabric, SharingMode::kIpc}));
  CHECK(some.fallbacks ==
        std::vector<SharingFallback>({{"vmm", "process 1: GPU 0 has none"}}));
  CHECK_EQ(WhyNotConnected({0, 1}, capabilities_of), "");
}

TEST(OnlyFallbacksBeforeTheChosenModeCount) {
  std::map<int, Capabilities> capabilities_of = {{0, CapabilitiesOf("x")},
                                                 {1, CapabilitiesOf("y")}};
  capabilities_of[0] = Without(capabilities_of[0], SharingMode::kFabric, "no channel");
  capabilities_of[1] = Without(capabilities_of[1], SharingMode::kIpc, "refused");
  const SharingDecision decision = Agree({0, 1}, capabilities_of);
  CHECK(FallbacksTo(SharingMode::kVmm, decision, {}).empty());
  const std::vector<SharingFallback> failed = {{"vmm", "process 0: cuMemMap: ..."}};
  CHECK(FallbacksTo(SharingMode::kIpc, decision, failed) ==
        std::vector<SharingFallback>({failed[0], {"fabric", "process 0: no channel"}}));
}

TEST(WithoutASharingModeAllReasonsAreNamed) {
  std::map<int, Capabilities> capabilities_of = {{0, CapabilitiesOf("x")},
                                                 {3, CapabilitiesOf("y")}};
  capabilities_of[3] = Without(capabilities_of[3], SharingMode::kVmm, "no descriptors");
  capabilities_of[3] = Without(capabilities_of[3], SharingMode::kIpc, "not permitted");
  capabilities_of[0] = Without(capabilities_of[0], SharingMode::kFabric, "no channel");
  CHECK_EQ(WhyNotConnected({0, 3}, capabilities_of),
           "its processes have no way to share device memory: vmm: process 3: no "
           "descriptors; fabric: process 0: no channel; ipc: process 3: not permitted");
}

TEST(OnlyFabricHandlesReachOtherHosts) {
  std::map<int, Capabilities> capabilities_of = {{0, CapabilitiesOf("x")},
                                                 {1, CapabilitiesOf("y")}};
  capabilities_of[1][kHostKey] = std::string("there");
  const SharingDecision decision = Agree({0, 1}, capabilities_of);
  CHECK(decision.modes == std::vector<SharingMode>({SharingMode::kFabric}));
  CHECK(decision.spans_hosts);
  capabilities_of[1] = Without(capabilities_of[1], SharingMode::kFabric,
                               "GPU 0 has no memory handles for a fabric");
  CHECK_EQ(
      WhyNotConnected({0, 1}, capabilities_of),
      "its processes have no way to share device memory: vmm: its ranks span 2 "
      "hosts; fabric: process 1: GPU 0 has no memory handles for a fabric; ipc: its "
      "ranks span 2 hosts");
}

TEST(GpusThatCannotReachEachOtherAreNamedByTheirRanks) {
  std::map<int, Capabilities> capabilities_of = {{0, CapabilitiesOf("x,y")},
                                                 {2, CapabilitiesOf("z")}};
  CHECK_EQ(WhyNotConnected({0, 2, 0}, capabilities_of), "");
  // An unreachable process does not matter if it has no rank.
  capabilities_of[2][kUnreachableKey] = "z>w";
  CHECK_EQ(WhyNotConnected({0, 2, 0}, capabilities_of), "");
  capabilities_of[2][kUnreachableKey] = "z>w,z>y";
  CHECK_EQ(
      WhyNotConnected({0, 2, 0}, capabilities_of),
      "the GPU of rank 1 (process 2) cannot access that of rank 2 (process 0) "
      "(cuDeviceCanAccessPeer): there is no NVLink or PCIe peer-to-peer between them");
}

TEST(AProcessWithoutCapabilitiesIsNamed) {
  CHECK_EQ(WhyNotConnected({0, 1}, {{0, CapabilitiesOf("x")}}),
           "process 1 offers nothing");
}

TEST(BytesSurviveAsText) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes.push_back(static_cast<char>(i));
  std::string read(bytes.size(), '\0');
  CHECK(ReadHex(HexOf(bytes.data(), bytes.size()), read.data(), read.size()));
  CHECK_EQ(read, bytes);
  CHECK_EQ(HexOf("\x0f\xa0", 2), "0fa0");
}

TEST(TextThatIsNoBytesIsNotRead) {
  char read[2];
  for (const char* text :
       {"", "0fa", "0fa0b", "0fa000", "0fag", "0f-1", "0f 1", "0f+1"}) {
    CHECK(!ReadHex(text, read, sizeof(read)));
  }
  CHECK(ReadHex("0fa0", read, sizeof(read)));
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
