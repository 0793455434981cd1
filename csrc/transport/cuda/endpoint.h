// What a process that has ranks on GPUs brings to a group: made before the processes know
// of each other.
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

// The heaps of a process's own ranks, and a socket under which it is found.
class CudaEndpoint {
 public:
  // `ordinals`: of the own ranks, in the order of the ranks. `slots_bytes`: for the slots
  // of a call, on each rank. `host`: equal where processes share one. `nvls`: multicast is
  // wanted, by all processes. Tries out what it offers. Throws CommunicatorError when the
  // devices have no room.
  CudaEndpoint(const Driver& driver,
               const std::vector<int>& ordinals,
               int64_t slots_bytes,
               const std::string& host,
               bool nvls = false);

  const PeerAddress& address() const { return endpoint_.address(); }
  const Capabilities& capabilities() const { return capabilities_; }

 private:
  friend class CudaCommunicator;

  void OfferVirtual();
  void OfferIpc();
  void OfferDevices(const std::string& host);

  const Endpoint endpoint_;
  const HeapLayout layout_;
  const bool nvls_;
  std::unique_ptr<LocalDevices> devices_;
  LocalHeaps heaps_;
  Capabilities capabilities_;
};

}  // namespace jax_ub
