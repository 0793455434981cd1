// The heaps of all ranks of a group, mapped for the devices of one process.
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

// The heaps of all ranks of a group, mapped for the devices of this process. With
// `nvls`, the heaps are also bound to one multicast object. If that fails for any rank,
// no rank uses multicast, and fallbacks() has the reason.
class GroupHeaps {
 public:
  // Makes the heaps of a group whose ranks are all in this process. `ordinals` has the
  // device ordinal of each rank. Throws UnsupportedError if a device cannot access
  // another.
  static GroupHeaps InProcess(const Driver& driver,
                              const std::vector<int>& ordinals,
                              const HeapLayout& layout,
                              const ProcessGroup& group,
                              bool nvls);

  // Tries the sharing modes of `decision` in order, until all processes have mapped all
  // heaps with one of them. `capabilities_of` is keyed by process. Throws
  // UnsupportedError if all modes fail, and the errors of SetupExchange::Exchange.
  static GroupHeaps Shared(std::unique_ptr<LocalDevices> devices,
                           LocalHeaps own,
                           const ProcessGroup& group,
                           const HeapLayout& layout,
                           const SharingDecision& decision,
                           const std::map<int, Capabilities>& capabilities_of,
                           bool nvls,
                           SetupExchange& exchange,
                           const Deadline& deadline);

  const LocalDevices& devices() const { return *devices_; }
  // Returns the name of the sharing mode that is used, or "in_process".
  const std::string& how() const { return how_; }
  const std::vector<SharingFallback>& fallbacks() const { return fallbacks_; }
  // Returns the total size in bytes of the local ranks' heaps.
  int64_t size_bytes() const { return own_.size_bytes(); }
  // Returns the addresses of all ranks' heaps, indexed by rank, for the device of the
  // n-th own rank.
  std::span<const RankSlotAddress> addresses(int n) const { return addresses_[n]; }
  // Returns the multicast address of the start of all heaps, valid on all devices of
  // this process; 0: there is no multicast.
  CUdeviceptr multicast() const { return multicast_ ? multicast_->base() : 0; }

  // Unmaps the peers' heaps and frees the heaps of the local ranks.
  void Release();
  // Makes Release keep memory that a peer may still use until the process exits.
  void FreeAtExit();

 private:
  GroupHeaps() = default;

  // Maps all heaps with one sharing mode. Returns "", or the reason of the first
  // process that failed; then the mode has failed in all processes.
  std::string ShareBy(SharingMode mode,
                      const ProcessGroup& group,
                      const HeapLayout& layout,
                      const std::map<int, Capabilities>& capabilities_of,
                      SetupExchange& exchange,
                      const Deadline& deadline);
  void Import(SharingMode mode,
              const ProcessGroup& group,
              const HeapLayout& layout,
              const std::map<int, Capabilities>& capabilities_of,
              std::vector<SetupMessage>& exported);
  void FindAddresses(const ProcessGroup& group);

  // Binds all heaps to a multicast object: BindHere if all ranks are in this process,
  // and BindWithAll otherwise. Both return "", or why there is no multicast.
  std::string BindHere(const HeapLayout& layout, const ProcessGroup& group);
  std::string BindWithAll(SharingMode mode,
                          const ProcessGroup& group,
                          const HeapLayout& layout,
                          const std::map<int, Capabilities>& capabilities_of,
                          SetupExchange& exchange,
                          const Deadline& deadline);

  std::unique_ptr<LocalDevices> devices_;
  LocalHeaps own_;
  std::vector<PeerHeaps> others_;                        // indexed by process index
  std::unique_ptr<Multicast> multicast_;                 // nullptr: no multicast
  std::vector<std::vector<RankSlotAddress>> addresses_;  // [own rank][rank]
  std::string how_;
  std::vector<SharingFallback> fallbacks_;
};

}  // namespace jax_ub
