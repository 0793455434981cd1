// The part of a CudaCommunicator that a process creates before it knows its peers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "transport/cuda/capabilities.h"
#include "transport/cuda/heap.h"
#include "transport/cuda/sharing.h"
#include "transport/process/endpoint.h"

namespace jax_ub {

// Owns what a process creates before it connects to its peers: the heaps of its ranks,
// and the socket on which it accepts connections. Determines which sharing modes the
// process supports.
class CudaEndpoint {
 public:
  // `ordinals` has the device ordinal of each own rank, in ascending order of rank.
  // `slots_bytes` is the memory for the slots of a call on each rank. `host` identifies
  // the host; it is equal for all processes of one host. `nvls` requests multicast and
  // must be the same in all processes. Tests each sharing mode by exporting memory with
  // it. Throws CommunicatorError if a device is out of memory.
  CudaEndpoint(const Driver& driver,
               const std::vector<int>& ordinals,
               int64_t slots_bytes,
               const std::string& host,
               bool nvls = false);

  const PeerAddress& address() const { return endpoint_.address(); }
  const Capabilities& capabilities() const { return capabilities_; }

 private:
  friend class CudaCommunicator;

  void TryVirtual();
  void TryIpc();
  void OfferDevices(const std::string& host);

  const Endpoint endpoint_;
  const HeapLayout layout_;
  const bool nvls_;
  std::unique_ptr<LocalDevices> devices_;
  LocalHeaps heaps_;
  Capabilities capabilities_;
};

}  // namespace jax_ub
