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
// `nvls`, the heaps are also bound to a multicast object. If binding fails for any
// rank, no rank uses multicast, and fallbacks() has the reason.
class GroupHeaps {
 public:
  // Makes a group whose ranks are all in this process. Rank r uses the device with
  // ordinal `ordinals[r]`. Throws UnsupportedError if devices cannot access each other.
  static GroupHeaps InProcess(const Driver& driver,
                              const std::vector<int>& ordinals,
                              const HeapLayout& layout,
                              const ProcessGroup& group,
                              bool nvls);

  // Tries the sharing modes in `decision` in order, until all processes have mapped all
  // heaps with one of them. `capabilities_of` is keyed by process. Throws
  // UnsupportedError if no mode works, and the errors of SetupExchange::Exchange.
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
  // Returns how the ranks access each other's memory: the name of the sharing mode, or
  // "in_process".
  const std::string& sharing_mode() const { return sharing_mode_; }
  const std::vector<SharingFallback>& fallbacks() const { return fallbacks_; }
  // Returns the size of all heaps of local ranks, in bytes.
  int64_t size_bytes() const { return own_.size_bytes(); }
  // Returns the addresses of all ranks' heaps, indexed by rank. They are valid on the
  // device of this process's n-th rank.
  std::span<const RankSlotAddress> addresses(int n) const { return addresses_[n]; }
  // Returns the multicast address of the heaps, which is valid on all devices of this
  // process. 0: there is no multicast.
  CUdeviceptr multicast() const { return multicast_ ? multicast_->base() : 0; }

  // Frees the heaps of the local ranks, and unmaps the heaps of the peers.
  void Release();
  // Makes Release keep memory that a peer may still use. It is freed when the process
  // exits.
  void FreeAtExit();

 private:
  GroupHeaps() = default;

  // Maps all heaps with one sharing mode. If a process fails, returns the reason in all
  // processes. Otherwise returns "".
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

  // Bind the heaps of all ranks to a multicast object. BindHere is for a group within
  // this process, BindWithAll for a group of several processes. Both return "", or the
  // reason why there is no multicast.
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
  std::string sharing_mode_;
  std::vector<SharingFallback> fallbacks_;
};

}  // namespace jax_ub
