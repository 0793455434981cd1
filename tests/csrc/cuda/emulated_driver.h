// A CUDA driver without a GPU: the functions of `Driver`, by the rules of the driver API,
// on threads and host memory. Streams are threads, so work that the code under test does
// not order runs in any order, and kernels of different streams always run at once.
//
//   EmulatedMachine machine({.num_devices = 4, .seed = 7, .max_delay_us = 200});
//   ... EmulatedDriver() ...
//   CHECK_EQ(machine.Complaints(), "");
//
// ThreadSanitizer sees the memory that operations touch, and of all synchronization only
// what CUDA promises: the order of a stream, events, joins, host waits. A wait that is
// missing is a race, however the threads happened to run.
//
// Kernels are the host functions of emulated_kernels.h. Device pointers are addresses of
// this process; memory that was never written is 0xFF (NaN).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "platform/cuda/driver.h"

namespace jax_ub {

// Initialized, as SystemDriver() is.
const Driver& EmulatedDriver();

struct EmulatedOptions {
  int num_devices = 1;
  // The number in the machine of this process's device 0: processes that see the same
  // device, or others, of one machine.
  int first_device = 0;
  int64_t device_memory_bytes = int64_t{8} << 30;
  int driver_version = 13000;
  // Instead of those of a device of compute capability 9.0 with 132 SMs.
  std::map<CUdevice_attribute, int> attributes = {};

  // Up to this long before any operation of a stream or graph, at random.
  uint64_t seed = 1;
  int max_delay_us = 0;

  bool has_vmm = true;      // virtual memory management at all
  bool has_fd = true;       // memory handles as POSIX file descriptors,
  bool has_fabric = false;  // and as fabric handles
  // What cuMemCreate says when fabric handles are asked for: CUDA_ERROR_NOT_PERMITTED
  // where the device has them and the process no IMEX channel.
  CUresult fabric_result = CUDA_SUCCESS;
  bool has_ipc = true;
  bool has_multicast = true;
  bool has_peer_access = true;
  // Pairs of ordinals (device, peer) where `device` cannot access `peer`.
  std::set<std::pair<int, int>> without_peer_access = {};
  // cuMemAlloc, cuMemFree and the like wait for all work of the device, as the real ones
  // may. Otherwise freeing memory that is in use is a violation.
  bool memory_calls_synchronize = false;
};

// What the process holds of the driver. Handles: of MemCreate and MemImport; ipc: opened.
struct EmulatedObjects {
  int contexts = 0;
  int streams = 0;
  int events = 0;
  int allocations = 0;
  int host_allocations = 0;
  int handles = 0;
  int reservations = 0;
  int mappings = 0;
  int bindings = 0;  // of memory to multicast objects
  int ipc = 0;
  int libraries = 0;
  int graphs = 0;
  int graph_execs = 0;

  bool operator==(const EmulatedObjects&) const = default;
  // "2 streams, 1 event"; "" when there is nothing.
  std::string Describe() const;
};

// While one lives, what its thread launches has to be loaded: what is not is a violation.
// Loading may wait for the device, and so for a kernel that waits for a peer.
class EmulatedLaunchesOnly {
 public:
  EmulatedLaunchesOnly();
  ~EmulatedLaunchesOnly();
  EmulatedLaunchesOnly(const EmulatedLaunchesOnly&) = delete;
  EmulatedLaunchesOnly& operator=(const EmulatedLaunchesOnly&) = delete;
};

// The machine that EmulatedDriver() drives, one at a time. All is new: nothing of an
// earlier machine may be used. A child of fork makes its own.
class EmulatedMachine {
 public:
  explicit EmulatedMachine(EmulatedOptions options = {});
  // Waits for all work. What still is not done after 20 s is named, and the program ends.
  ~EmulatedMachine();
  EmulatedMachine(const EmulatedMachine&) = delete;
  EmulatedMachine& operator=(const EmulatedMachine&) = delete;

  // The nth call from now on of Driver's member `function` ("MemCreate") does nothing and
  // returns `result`; every call if nth is 0.
  void Fail(const std::string& function, CUresult result, int nth = 1);
  // Of a function, or launches of a kernel.
  int64_t NumCalls(const std::string& function) const;

  EmulatedObjects Live() const;
  // What no error code said: memory accessed by a device that has no access to it, freed
  // while it is in use, handles destroyed twice, contexts released before their streams.
  std::vector<std::string> Violations() const;
  // Violations, and what is still there; "" when all is well. Waits for all streams.
  std::string Complaints();
};

}  // namespace jax_ub
