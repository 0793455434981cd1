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
#include "transport/process/handshake.h"

namespace jax_ub {

// What a process creates before it connects to its peers: the heaps of its ranks, the
// socket on which it accepts connections, and the list of sharing modes that it
// supports.
class CudaEndpoint {
 public:
  // `ordinals` has the device ordinals of this process's ranks, ascending by rank. Each
  // rank gets `slots_bytes` for the slots of a call. `host` is a text that identifies
  // the host. `nvls` requests multicast; it must be the same in all processes. Tests
  // each sharing mode by exporting memory. Throws CommunicatorError if a device is out
  // of memory.
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
  void DescribeDevices(const std::string& host);

  const Endpoint endpoint_;
  const HeapLayout layout_;
  const bool nvls_;
  std::unique_ptr<LocalDevices> devices_;
  LocalHeaps heaps_;
  Capabilities capabilities_;
};

}  // namespace jax_ub
