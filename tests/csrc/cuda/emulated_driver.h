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

// Returns the emulated driver, which is initialized as SystemDriver() is.
const Driver& EmulatedDriver();

struct EmulatedOptions {
  int num_devices = 1;
  // The index, in the machine, of this process's device 0. It determines whether
  // processes see the same devices of one machine or different ones.
  int first_device = 0;
  int64_t device_memory_bytes = int64_t{8} << 30;
  int driver_version = 13000;
  // Replace attributes of the default device, which has compute capability 9.0 and 132
  // SMs.
  std::map<CUdevice_attribute, int> attributes = {};

  // The maximum random delay before each operation of a stream or graph.
  uint64_t seed = 1;
  int max_delay_us = 0;

  bool has_vmm = true;      // virtual memory management at all
  bool has_fd = true;       // memory handles as POSIX file descriptors,
  bool has_fabric = false;  // and as fabric handles
  // The result of cuMemCreate with fabric handles: CUDA_ERROR_NOT_PERMITTED emulates a
  // device with fabric handles and a process without an IMEX channel.
  CUresult fabric_result = CUDA_SUCCESS;
  bool has_ipc = true;
  bool has_multicast = true;
  bool has_peer_access = true;
  // Pairs of ordinals (device, peer) where `device` cannot access `peer`.
  std::set<std::pair<int, int>> without_peer_access = {};
  // Whether cuMemAlloc, cuMemFree and similar functions wait for all work of the
  // device, as the real ones may. Otherwise freeing memory that is in use is a
  // violation.
  bool memory_calls_synchronize = false;
  // Whether a thread that loads a kernel, launches one that is not loaded, or
  // instantiates a graph holds a lock of the process until the device has finished all
  // work, as the real driver may.
  bool loads_drain_device = false;
  // The number of hardware queues of a device, as CUDA_DEVICE_MAX_CONNECTIONS sets it.
  // Streams, and the branches of a graph, share them in turn. A queue starts its work
  // in order, so work that cannot start yet holds up all work behind it.
  int num_queues = 8;
};

// The numbers of driver objects that the process has not released. `handles` come from
// MemCreate and MemImport; `ipc` are opened IPC handles.
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
  // Returns a text such as "2 streams, 1 event"; "" if no object is left.
  std::string Describe() const;
};

// While an instance exists, it is a violation if its thread launches a kernel that is
// not loaded: loading may wait for the device, and so for a kernel that waits for a
// peer.
class EmulatedLaunchesOnly {
 public:
  EmulatedLaunchesOnly();
  ~EmulatedLaunchesOnly();
  EmulatedLaunchesOnly(const EmulatedLaunchesOnly&) = delete;
  EmulatedLaunchesOnly& operator=(const EmulatedLaunchesOnly&) = delete;
};

// The machine of EmulatedDriver(). Only one exists at a time, and objects of an earlier
// machine must not be used. A forked child makes a new one.
class EmulatedMachine {
 public:
  explicit EmulatedMachine(EmulatedOptions options = {});
  // Waits for all work. Ends the program with a description of the work that is not
  // done after 20 s.
  ~EmulatedMachine();
  EmulatedMachine(const EmulatedMachine&) = delete;
  EmulatedMachine& operator=(const EmulatedMachine&) = delete;

  // Makes the nth call from now on of Driver's member `function`, such as "MemCreate",
  // return `result` without effect; all calls if nth is 0.
  void Fail(const std::string& function, CUresult result, int nth = 1);
  // Returns the number of calls of a function, or of launches of a kernel.
  // Returns how often a kernel, or a copy within a device, could not start because
  // GEMMs occupied all multiprocessors.
  int64_t NumStarved() const;
  int64_t NumCalls(const std::string& function) const;

  EmulatedObjects Live() const;
  // Returns errors that the real driver reports by no error code: a device accesses
  // memory without having access, memory is freed while in use, a handle is destroyed
  // twice, a context is released before its streams.
  std::vector<std::string> Violations() const;
  // Waits for all streams; returns the violations and the objects that are left, or ""
  // if there are none.
  std::string Complaints();
};

}  // namespace jax_ub
