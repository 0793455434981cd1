// The state of the emulated driver: devices, streams, events, memory and graphs,
// guarded by one mutex. Every driver function accesses it through a Call.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/emulated_driver.h"
#include "cuda/emulated_kernels.h"
#include "cuda/emulated_lane.h"
#include "cuda/emulated_memory.h"
#include "cuda/unseen.h"

namespace jax_ub::emulated {

// Maps handles to objects. A handle is never reused.
template <typename T>
class Registry {
 public:
  T* Add(T object) {
    static std::atomic<uintptr_t> last = 0x1000;
    const uintptr_t handle = last += 0x10;
    T* const added = objects_.emplace(handle, std::make_unique<T>(std::move(object)))
                         .first->second.get();
    added->handle = handle;
    return added;
  }
  // Returns the object, or nullptr if there is none or it was removed.
  template <typename Handle>
  T* Find(Handle handle) const {
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    return found == objects_.end() ? nullptr : found->second.get();
  }
  template <typename Handle>
  bool Remove(Handle handle) {
    return objects_.erase(reinterpret_cast<uintptr_t>(handle)) != 0;
  }
  int size() const { return static_cast<int>(objects_.size()); }
  auto begin() const { return objects_.begin(); }
  auto end() const { return objects_.end(); }

 private:
  std::map<uintptr_t, std::unique_ptr<T>> objects_;
};

// An operation of a stream, or of a node of a graph.
struct Operation {
  enum class Kind { kKernel, kCopy, kFill, kFree };

  const char* name = "";
  Kind kind = Kind::kKernel;
  int device = 0;
  int priority = 0;              // of the stream
  std::vector<int> owners = {};  // of a copy's or fill's operands: devices, or the host
  int num_processors = 0;  // the multiprocessors that it occupies, if they are free
  std::function<void()> run = {};
  std::vector<Touch> touches = {};
};

struct Node {
  Operation operation;
  std::vector<int> dependencies;  // of the same graph, all before it
};

// The operations that streams are given during one capture.
struct Capture {
  uintptr_t origin = 0;  // the stream that began
  uintptr_t into = 0;    // the graph that the nodes go into; 0: a new one
  std::thread::id thread;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  bool is_valid = true;
  bool is_over = false;
  std::vector<Node> nodes;
};
using SharedCapture = std::shared_ptr<Capture>;

struct Stream {
  uintptr_t handle = 0;
  int device = 0;
  int queue = 0;
  unsigned flags = 0;
  int priority = 0;
  std::shared_ptr<Lane> lane;
  // During a capture: the capture, and the nodes that the stream's next node depends
  // on.
  SharedCapture capture;
  std::set<int> tips;
};

struct Event {
  uintptr_t handle = 0;
  int device = 0;
  unsigned flags = 0;
  SharedMoment recorded;  // or, while a stream is captured:
  SharedCapture capture;
  std::set<int> tips;
};

// Consecutive nodes of a graph that were added together: a child graph, or a fill.
struct Child {
  uintptr_t handle = 0;
  size_t first = 0;
  size_t count = 0;
};

struct Graph {
  uintptr_t handle = 0;
  std::vector<Node> nodes;
  std::vector<Child> children;
};

// An instantiated graph. Its nodes are divided into chains: each node depends on the
// previous node of its chain.
struct GraphExec {
  uintptr_t handle = 0;
  std::shared_ptr<const std::vector<Node>> nodes;
  std::vector<std::vector<int>> chains;
  std::vector<std::shared_ptr<Lane>> lanes;  // [chain]
  uintptr_t graph = 0;                       // that it was made of
  std::vector<Child> children;
  bool has_priorities = false;  // of its nodes
  SharedMoment last_launch;
};

struct Library {
  uintptr_t handle = 0;
};
struct Kernel {
  uintptr_t handle = 0;
  uintptr_t library = 0;
  const EmulatedKernel* twin = nullptr;
};
// A kernel that belongs to the context of one device.
struct Function {
  uintptr_t handle = 0;
  uintptr_t kernel = 0;
  int device = 0;
  bool is_loaded = false;
};

inline constexpr int kNumProcessors = 132;  // multiprocessors of the default device

// The multiprocessors of a device. The caller must be hidden (Unseen).
class Processors {
 public:
  explicit Processors(int num) : num_free_(num) {}

  // Waits until one is free, and takes up to `wanted`. Returns how many it took.
  int Take(int wanted);
  void Give(int num);
  int64_t num_starved() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable freed_;
  int num_free_;
  int64_t num_starved_ = 0;
};

struct Context {
  int num_retained = 0;
  std::shared_ptr<Processors> processors;
  // When the newest work of each hardware queue starts; nullptr: there was none.
  std::vector<SharedMoment> starts = {};  // [queue]
  std::set<int> peers;                    // whose memory it may access
  std::optional<Stream> legacy;
  SharedMoment legacy_tail;
};

struct Machine {
  explicit Machine(EmulatedOptions chosen);

  const EmulatedOptions options;
  const pid_t pid;
  const uint64_t generation;
  std::mutex mutex;

  std::vector<Context> contexts;  // [device]
  Registry<Stream> streams;
  Registry<Event> events;
  Registry<Graph> graphs;
  Registry<GraphExec> execs;
  Registry<Library> libraries;
  Registry<Kernel> kernels;
  Registry<Function> functions;
  Memory memory;
  std::vector<SharedCapture> captures;  // going on
  std::mutex loading_mutex;             // locked before `mutex`
  std::mt19937_64 random;               // for the order of a graph's nodes
  int num_streams = 0;                  // created so far

  std::vector<std::shared_ptr<Lane>> lanes;
  std::vector<std::shared_ptr<Lane>> spare_lanes;  // some have work left

  std::map<std::string, int64_t> num_calls;
  struct Failure {
    int64_t call = 0;  // 0: all
    CUresult result;
  };
  std::map<std::string, Failure> failures;
  std::vector<std::string> violations;

  std::shared_ptr<Lane> TakeLane();
  bool CanAccessPeer(int device, int peer) const;
  EmulatedObjects Live() const;
};

// Returns the only machine, or nullptr.
Machine* TheMachine();
void SetTheMachine(Machine* machine);

// One call of a driver function. While it exists, the caller is hidden from
// ThreadSanitizer and the machine's mutex is locked.
class Call {
 public:
  explicit Call(Machine& machine) : machine(machine), lock_(machine.mutex) {}

  Machine& machine;

  // Returns the device of the current context; -1: there is none.
  int device() const;
  // Returns the stream, or the legacy stream of the current context for 0; nullptr:
  // there is none.
  Stream* FindStream(CUstream stream);

  // Makes the driver function wait for this moment before it returns.
  void AwaitAtEnd(SharedMoment moment) { moments_.push_back(std::move(moment)); }
  const std::vector<SharedMoment>& moments() const { return moments_; }
  // Waits for the device's work, without the mutex and hidden from ThreadSanitizer.
  // Used where CUDA may wait but does not promise it.
  void AwaitDevice(int device);

  // Invalidates the captures that concern this thread and returns an error if there are
  // any, for functions that are not allowed then. A capture in global mode concerns all
  // threads.
  CUresult RefuseInCapture();
  // Handles the lazy loading of `what`, which is a violation within an
  // EmulatedLaunchesOnly.
  void Load(const std::string& what);
  // Waits for the device's work with the lock of the process, if loading does so.
  void Drain();
  void Violate(std::string text) { machine.violations.push_back(std::move(text)); }

 private:
  std::unique_lock<std::mutex> lock_;
  std::vector<SharedMoment> moments_;
};

// Runs the body of a driver function. Counts the call, and returns an error that the
// test has requested instead.
template <typename Body>
CUresult Run(const char* name, const Body& body) {
  std::vector<SharedMoment> moments;
  CUresult result = CUDA_SUCCESS;
  {
    const Unseen unseen;
    Machine* const machine = TheMachine();
    if (machine == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
    Call call(*machine);
    const int64_t number = ++machine->num_calls[name];
    const auto failure = machine->failures.find(name);
    if (failure != machine->failures.end() &&
        (failure->second.call == 0 || failure->second.call == number)) {
      return failure->second.result;
    }
    result = body(call);
    moments = call.moments();
  }
  for (const SharedMoment& moment : moments) moment->Await();
  const Unseen unseen;
  moments.clear();
  return result;
}

// As Run, for a function that requires a current context.
template <typename Body>
CUresult RunInContext(const char* name, const Body& body) {
  return Run(name, [&](Call& call) {
    return call.device() < 0 ? CUDA_ERROR_INVALID_CONTEXT : body(call);
  });
}

// Await a moment, unless it is null, and set one, without an order that ThreadSanitizer
// sees. The caller must not be hidden.
void AwaitUnseen(const SharedMoment& moment);
void SetUnseen(Moment& moment);

// Enqueues an operation on a stream, or adds it to the graph that is being captured
// from it.
CUresult Enqueue(Call& call, CUstream stream, Operation operation);
// Returns the moment at which all work that is on the stream so far is done. Requires
// that the stream is not being captured.
SharedMoment MomentOf(Stream& stream);

// Returns the device that owns the memory at an address; -1 for host memory.
int OwnerOf(const Call& call, uint64_t address);

// Returns an operation that sets `count` elements at `to` to `value`. The address must
// be a multiple of the element size.
template <typename Value>
Operation FillOf(
    const Call& call, const char* name, uint64_t to, Value value, size_t count) {
  Operation operation;
  operation.name = name;
  operation.kind = Operation::Kind::kFill;
  operation.owners = {OwnerOf(call, to)};
  operation.touches = {{to, 1, static_cast<int64_t>(count * sizeof(Value)), 0}};
  operation.run = [=] { std::fill_n(reinterpret_cast<Value*>(to), count, value); };
  return operation;
}

// Adds nodes to the capture of a stream. The dependencies of each node are indices into
// `nodes`.
CUresult AddNodes(Stream& stream, const std::vector<Node>& nodes);

// Checks an operation's memory, and marks its regions as in use until EndUse.
CUresult BeginUse(Call& call,
                  const Operation& operation,
                  std::vector<SharedRegion>& uses);
void EndUse(Machine& machine, std::vector<SharedRegion>& uses);

// Returns the addresses, in this process, of the memory of each device that is bound at
// a multicast address.
std::vector<uint64_t> BehindMulticast(uint64_t address);

// Returns the number of free bytes of a device's memory.
int64_t FreeBytes(const Machine& machine, int device);

// Returns the device of a retained context; -1: there is none.
int DeviceOf(const Call& call, CUcontext context);
void SetCurrentDevice(int device);
int CurrentDevice(const Machine& machine);

// Returns the memory that a kernel with these parameters accesses.
std::vector<Touch> TouchedBy(std::string_view kernel, const void* params);

// Each function sets some members of the driver's function table.
void FillDevices(Driver& driver);
void FillStreams(Driver& driver);
void FillMemory(Driver& driver);
void FillCopies(Driver& driver);
void FillKernels(Driver& driver);
void FillGraphs(Driver& driver);
void FillVirtualMemory(Driver& driver);
void FillIpc(Driver& driver);
void FillMulticast(Driver& driver);

}  // namespace jax_ub::emulated
