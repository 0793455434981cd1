// The heaps of all ranks of a group, as one process reaches them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "platform/deadline.h"
#include "transport/cuda/capabilities.h"
#include "transport/cuda/heap.h"
#include "transport/cuda/multicast.h"
#include "transport/cuda/sharing.h"
#include "transport/process/process_group.h"
#include "transport/process/setup_exchange.h"

namespace jax_ub {

// With `nvls` a multicast object of all heaps comes on top, if that stands for all ranks;
// if not, for none, and that is one more step down.
class GroupHeaps {
 public:
  // `ordinals` [rank]. Throws UnsupportedError when a device cannot access another one.
  static GroupHeaps InProcess(const Driver& driver,
                              const std::vector<int>& ordinals,
                              const HeapLayout& layout,
                              const ProcessGroup& group,
                              bool nvls);

  // Comes to the ways of `agreement`, one after the other, until all processes have
  // mapped all heaps by one. Throws UnsupportedError when none is left, and what Notes
  // throws. `offers` by process.
  static GroupHeaps Shared(std::unique_ptr<LocalDevices> devices,
                           LocalHeaps own,
                           const ProcessGroup& group,
                           const HeapLayout& layout,
                           const SharingDecision& decision,
                           const std::map<int, Capabilities>& capabilities_of,
                           bool nvls,
                           SetupExchange& notes,
                           const Deadline& deadline);

  const LocalDevices& devices() const { return *devices_; }
  const std::string& how() const { return how_; }
  const std::vector<SharingFallback>& fallbacks() const { return step_downs_; }
  int64_t size_bytes() const { return own_.size_bytes(); }
  // Of all ranks, for the device of the n-th own one.
  std::span<const RankSlotAddress> places(int n) const { return places_[n]; }
  // What stands for the base of every heap, for all own devices; 0: nothing does.
  CUdeviceptr multicast() const { return multicast_ ? multicast_->base() : 0; }

  void GiveBack();
  // GiveBack will leave to the end of the process what a peer that still uses it could be
  // harmed without.
  void FreeAtExit();

 private:
  GroupHeaps() = default;

  // Why this way is none, as the first process that cannot says; or "".
  std::string ShareBy(SharingMode mode,
                      const ProcessGroup& group,
                      const HeapLayout& layout,
                      const std::map<int, Capabilities>& capabilities_of,
                      SetupExchange& notes,
                      const Deadline& deadline);
  void Import(SharingMode mode,
              const ProcessGroup& group,
              const HeapLayout& layout,
              const std::map<int, Capabilities>& capabilities_of,
              std::vector<SetupMessage>& exported);
  void FindPlaces(const ProcessGroup& group);

  // Why there is no multicast, or "".
  std::string BindHere(const HeapLayout& layout, const ProcessGroup& group);
  std::string BindWithAll(SharingMode mode,
                          const ProcessGroup& group,
                          const HeapLayout& layout,
                          const std::map<int, Capabilities>& capabilities_of,
                          SetupExchange& notes,
                          const Deadline& deadline);

  std::unique_ptr<LocalDevices> devices_;
  LocalHeaps own_;
  std::vector<PeerHeaps> others_;                     // [place]
  std::unique_ptr<Multicast> multicast_;              // of all heaps
  std::vector<std::vector<RankSlotAddress>> places_;  // [own rank][rank]
  std::string how_;
  std::vector<SharingFallback> step_downs_;
};

}  // namespace jax_ub
