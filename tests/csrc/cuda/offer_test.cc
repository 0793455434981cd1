// Which way processes take to share device memory: a pure function of what they offer.
#include "transport/cuda/offer.h"

#include <map>
#include <string>
#include <vector>

#include "check.h"

namespace jax_ub {
namespace {

// Of a process on host "a" whose own GPUs are `gpus`, that can do all.
Offer OfferOf(const std::string& gpus) {
  return {{kHostKey, "a"}, {kGpusKey, gpus},   {kApartKey, ""},
          {"vmm", "yes"},  {"fabric", "1:00"}, {"ipc", "yes"}};
}

Offer Without(Offer offer, Way way, const std::string& reason) {
  offer.erase(WayName(way));
  offer[CannotKey(way)] = reason;
  return offer;
}

TEST(TheBestWayThatAllOfferComesFirst) {
  std::map<int, Offer> offers = {{0, OfferOf("x")}, {1, OfferOf("y")}};
  const Agreement all = Agree({0, 1}, offers);
  CHECK(all.ways == std::vector<Way>({Way::kVmm, Way::kFabric, Way::kIpc}));
  CHECK(all.step_downs.empty());
  CHECK_EQ(all.refusal, "");
  offers[1] = Without(offers[1], Way::kVmm, "GPU 0 has none");
  const Agreement some = Agree({0, 1}, offers);
  CHECK(some.ways == std::vector<Way>({Way::kFabric, Way::kIpc}));
  CHECK(some.step_downs ==
        std::vector<StepDown>({{"vmm", "process 1: GPU 0 has none"}}));
  CHECK_EQ(WhyNotConnected({0, 1}, offers), "");
}

TEST(OnlyStepsBeforeTheWayThatWasTakenCount) {
  std::map<int, Offer> offers = {{0, OfferOf("x")}, {1, OfferOf("y")}};
  offers[0] = Without(offers[0], Way::kFabric, "no channel");
  offers[1] = Without(offers[1], Way::kIpc, "refused");
  const Agreement agreement = Agree({0, 1}, offers);
  CHECK(StepDownsTo(Way::kVmm, agreement, {}).empty());
  const std::vector<StepDown> failed = {{"vmm", "process 0: cuMemMap: ..."}};
  CHECK(StepDownsTo(Way::kIpc, agreement, failed) ==
        std::vector<StepDown>({failed[0], {"fabric", "process 0: no channel"}}));
}

TEST(WithoutAWayAllReasonsAreNamed) {
  std::map<int, Offer> offers = {{0, OfferOf("x")}, {3, OfferOf("y")}};
  offers[3] = Without(offers[3], Way::kVmm, "no descriptors");
  offers[3] = Without(offers[3], Way::kIpc, "not permitted");
  offers[0] = Without(offers[0], Way::kFabric, "no channel");
  CHECK_EQ(WhyNotConnected({0, 3}, offers),
           "its processes have no way to share device memory: vmm: process 3: no "
           "descriptors; fabric: process 0: no channel; ipc: process 3: not permitted");
}

TEST(OnlyFabricHandlesReachOtherHosts) {
  std::map<int, Offer> offers = {{0, OfferOf("x")}, {1, OfferOf("y")}};
  offers[1][kHostKey] = std::string("there");
  const Agreement agreement = Agree({0, 1}, offers);
  CHECK(agreement.ways == std::vector<Way>({Way::kFabric}));
  CHECK(agreement.spans_hosts);
  offers[1] =
      Without(offers[1], Way::kFabric, "GPU 0 has no memory handles for a fabric");
  CHECK_EQ(
      WhyNotConnected({0, 1}, offers),
      "its processes have no way to share device memory: vmm: its ranks span 2 "
      "hosts; fabric: process 1: GPU 0 has no memory handles for a fabric; ipc: its "
      "ranks span 2 hosts");
}

TEST(GpusThatCannotReachEachOtherAreNamedByTheirRanks) {
  std::map<int, Offer> offers = {{0, OfferOf("x,y")}, {2, OfferOf("z")}};
  CHECK_EQ(WhyNotConnected({0, 2, 0}, offers), "");
  // One that is seen and has no rank does not matter.
  offers[2][kApartKey] = "z>w";
  CHECK_EQ(WhyNotConnected({0, 2, 0}, offers), "");
  offers[2][kApartKey] = "z>w,z>y";
  CHECK_EQ(
      WhyNotConnected({0, 2, 0}, offers),
      "the GPU of rank 1 (process 2) cannot access that of rank 2 (process 0) "
      "(cuDeviceCanAccessPeer): there is no NVLink or PCIe peer-to-peer between them");
}

TEST(AProcessThatOffersNothingIsNamed) {
  CHECK_EQ(WhyNotConnected({0, 1}, {{0, OfferOf("x")}}), "process 1 offers nothing");
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
