#include "cuda/emulated_machine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <utility>

namespace jax_ub::emulated {

namespace {

std::atomic<Machine*> the_machine = nullptr;
std::atomic<uint64_t> last_generation = 0;

// The current context of a thread.
struct Current {
  uint64_t generation = 0;
  int device = -1;
};
thread_local Current current;

thread_local int num_launches_only = 0;  // that live

// Returns a text such as "memory of device 1 at 0x7f.. + 12".
std::string DescribeAddress(const Region* region, uint64_t address) {
  char number[32];
  std::snprintf(number, sizeof(number), "0x%lx", address);
  if (region == nullptr) return std::string(number) + ", where there is no memory";
  return std::string(number) + ", memory of device " + std::to_string(region->device);
}

bool CanAccess(const Machine& machine, int device, const Region& region) {
  switch (region.kind) {
    case Region::Kind::kHost:
      return true;
    case Region::Kind::kVirtual:
      return region.accessible.contains(device);
    case Region::Kind::kDevice:
    case Region::Kind::kIpc:
      break;
  }
  return device == region.device ||
         machine.contexts[device].peers.contains(region.device);
}

}  // namespace

Machine* TheMachine() {
  Machine* const machine = the_machine;
  return machine != nullptr && machine->pid == getpid() ? machine : nullptr;
}

void SetTheMachine(Machine* machine) { the_machine = machine; }

Machine::Machine(EmulatedOptions chosen)
    : options(std::move(chosen)),
      pid(getpid()),
      generation(++last_generation),
      contexts(options.num_devices),
      random(options.seed) {
  const auto count = options.attributes.find(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  for (Context& context : contexts) {
    context.processors = std::make_shared<Processors>(
        count != options.attributes.end() ? count->second : kNumProcessors);
    context.starts.resize(options.num_queues);
  }
}

int Processors::Take(int wanted) {
  std::unique_lock lock(mutex_);
  num_starved_ += num_free_ == 0;
  freed_.wait(lock, [&] { return num_free_ > 0; });
  const int taken = std::min(wanted, num_free_);
  num_free_ -= taken;
  return taken;
}

void Processors::Give(int num) {
  const std::lock_guard lock(mutex_);
  num_free_ += num;
  freed_.notify_all();
}

int64_t Processors::num_starved() const {
  const std::lock_guard lock(mutex_);
  return num_starved_;
}

void AwaitUnseen(const SharedMoment& moment) {
  const Unseen unseen;
  if (moment != nullptr) moment->Await();
}

void SetUnseen(Moment& moment) {
  const Unseen unseen;
  moment.Set();
}

std::shared_ptr<Lane> Machine::TakeLane() {
  for (auto spare = spare_lanes.begin(); spare != spare_lanes.end(); ++spare) {
    if (!(*spare)->is_idle()) continue;
    auto lane = *spare;
    spare_lanes.erase(spare);
    return lane;
  }
  const uint64_t seed = options.seed * 1000 + lanes.size();
  lanes.push_back([&] {
    const Seen seen;  // that it starts a thread
    return std::make_shared<Lane>(seed, options.max_delay_us);
  }());
  return lanes.back();
}

bool Machine::CanAccessPeer(int device, int peer) const {
  return device != peer && options.has_peer_access &&
         !options.without_peer_access.contains({device, peer});
}

EmulatedObjects Machine::Live() const {
  EmulatedObjects live;
  for (const Context& context : contexts) live.contexts += context.num_retained > 0;
  live.streams = streams.size();
  live.events = events.size();
  live.libraries = libraries.size();
  live.graphs = graphs.size();
  live.graph_execs = execs.size();
  live.handles = static_cast<int>(memory.handles.size());
  live.bindings = memory.num_bindings;
  live.reservations = static_cast<int>(memory.reservations.size());
  for (const auto& [address, region] : memory.regions()) {
    live.allocations += region->kind == Region::Kind::kDevice;
    live.host_allocations += region->kind == Region::Kind::kHost;
    live.mappings += region->kind == Region::Kind::kVirtual;
    live.ipc += region->kind == Region::Kind::kIpc;
  }
  return live;
}

int64_t FreeBytes(const Machine& machine, int device) {
  return machine.options.device_memory_bytes -
         machine.memory.AllocatedBytes(machine.options.first_device + device);
}

void SetCurrentDevice(int device) { current = {TheMachine()->generation, device}; }

int CurrentDevice(const Machine& machine) {
  return current.generation == machine.generation ? current.device : -1;
}

int Call::device() const {
  const int device = CurrentDevice(machine);
  // A released context is no longer current.
  return device >= 0 && machine.contexts[device].num_retained > 0 ? device : -1;
}

Stream* Call::FindStream(CUstream stream) {
  if (stream != nullptr && stream != CU_STREAM_LEGACY)
    return machine.streams.Find(stream);
  if (device() < 0) return nullptr;
  Context& context = machine.contexts[device()];
  if (!context.legacy) {
    context.legacy.emplace();
    context.legacy->device = device();
    context.legacy->lane = machine.TakeLane();
  }
  return &*context.legacy;
}

void Call::AwaitDevice(int device) {
  std::vector<SharedMoment> moments;
  for (const auto& [handle, stream] : machine.streams) {
    if (stream->device == device) moments.push_back(MomentOf(*stream));
  }
  lock_.unlock();
  for (const SharedMoment& moment : moments) moment->Await();
  lock_.lock();
}

void Call::Load(const std::string& what) {
  if (num_launches_only > 0) Violate(what + " loads lazily while a peer may spin");
  Drain();
}

void Call::Drain() {
  if (!machine.options.loads_drain_device || device() < 0) return;
  lock_.unlock();
  const std::lock_guard loading(machine.loading_mutex);
  lock_.lock();
  AwaitDevice(device());
}

CUresult Call::RefuseInCapture() {
  bool is_refused = false;
  for (const SharedCapture& capture : machine.captures) {
    const bool concerns = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
                          (capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL &&
                           capture->thread == std::this_thread::get_id());
    if (!concerns) continue;
    capture->is_valid = false;
    is_refused = true;
  }
  return is_refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

// Marks the memory that is bound at a multicast address as in use, too. The memory of
// all devices must be bound.
void BeginUseBehind(Call& call, const Region& region, std::vector<SharedRegion>& uses) {
  const auto bound = region.team->Locked([](const Team::Shared& shared) {
    return std::vector(shared.bound, shared.bound + shared.num_bound);
  });
  const bool is_whole = region.team->Locked([&](const Team::Shared& shared) {
    return shared.num_bound == shared.num_devices;
  });
  if (!is_whole) call.Violate("a multicast address is used before all memory is bound");
  for (const Team::Bound& one : bound) {
    const SharedRegion behind = call.machine.memory.Of(one.file);
    if (behind == nullptr) {
      call.Violate("memory behind a multicast address is not mapped here");
      continue;
    }
    ++behind->num_uses;
    uses.push_back(behind);
  }
}

CUresult BeginUse(Call& call,
                  const Operation& operation,
                  std::vector<SharedRegion>& uses) {
  for (const Touch& touch : operation.touches) {
    const uint64_t end = touch.address + touch.span_bytes();
    for (uint64_t address = touch.address; address < end;) {
      const SharedRegion region = call.machine.memory.Around(address);
      if (region == nullptr || !CanAccess(call.machine, operation.device, *region)) {
        call.Violate(std::string(operation.name) + " on device " +
                     std::to_string(operation.device) + " has no access to " +
                     DescribeAddress(region.get(), address));
        EndUse(call.machine, uses);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
      }
      if (touch.by_multicast != (region->team != nullptr)) {
        call.Violate(std::string(operation.name) + " takes " +
                     DescribeAddress(region.get(), address) +
                     (touch.by_multicast ? " for" : " not for") +
                     " a multicast address");
        EndUse(call.machine, uses);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
      }
      if (touch.by_multicast) BeginUseBehind(call, *region, uses);
      ++region->num_uses;
      uses.push_back(region);
      address = region->address + region->size_bytes;
    }
  }
  return CUDA_SUCCESS;
}

std::vector<uint64_t> BehindMulticast(uint64_t address) {
  // The result can be cached, because addresses are never reused.
  struct Found {
    uint64_t generation = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    std::vector<uint64_t> bases;
  };
  static thread_local Found found;
  const Unseen unseen;
  Machine& machine = *TheMachine();
  if (found.generation != machine.generation || address < found.begin ||
      address >= found.end) {
    const std::lock_guard lock(machine.mutex);
    const SharedRegion region = machine.memory.Around(address);
    if (region == nullptr || region->team == nullptr) {
      throw std::logic_error("no multicast address");
    }
    found = {machine.generation,
             region->address,
             region->address + static_cast<uint64_t>(region->size_bytes),
             {}};
    region->team->Locked([&](const Team::Shared& shared) {
      for (int i = 0; i < shared.num_bound; ++i) {
        const SharedRegion behind = machine.memory.Of(shared.bound[i].file);
        if (behind != nullptr) found.bases.push_back(behind->address);
      }
      return true;
    });
  }
  std::vector<uint64_t> addresses;
  for (const uint64_t base : found.bases) {
    addresses.push_back(base + address - found.begin);
  }
  return addresses;
}

void EndUse(Machine& machine, std::vector<SharedRegion>& uses) {
  for (const SharedRegion& region : uses) --region->num_uses;
  uses.clear();
}

}  // namespace jax_ub::emulated

namespace jax_ub {

namespace {

using emulated::Lane;
using emulated::Machine;
using emulated::Unseen;

constexpr std::chrono::seconds kPatience{20};

// Waits for all lanes; after kPatience, returns the names of the work that is not done.
std::string AwaitLanes(Machine& machine) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    std::string busy;
    {
      const Unseen unseen;
      const std::lock_guard lock(machine.mutex);
      for (const auto& lane : machine.lanes) {
        const std::string what = lane->busy_with();
        if (!what.empty()) busy += (busy.empty() ? "" : ", ") + what;
      }
    }
    if (busy.empty() || std::chrono::steady_clock::now() > end) return busy;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Machine& Locked() {
  Machine* const machine = emulated::TheMachine();
  if (machine == nullptr) throw std::logic_error("no EmulatedMachine in this process");
  return *machine;
}

}  // namespace

EmulatedMachine::EmulatedMachine(EmulatedOptions options) {
  if (emulated::TheMachine() != nullptr) {
    throw std::logic_error("there is an EmulatedMachine already");
  }
  emulated::SetTheMachine(new Machine(std::move(options)));
}

EmulatedMachine::~EmulatedMachine() {
  Machine* const machine = &Locked();
  if (const std::string busy = AwaitLanes(*machine); !busy.empty()) {
    std::cerr << "the emulated driver's streams never end: " << busy << std::endl;
    std::abort();
  }
  for (const auto& lane : machine->lanes) lane->Stop();
  emulated::SetTheMachine(nullptr);
  delete machine;
}

void EmulatedMachine::Fail(const std::string& function, CUresult result, int nth) {
  const Unseen unseen;
  Machine& machine = Locked();
  const std::lock_guard lock(machine.mutex);
  machine.failures[function] = {nth == 0 ? 0 : machine.num_calls[function] + nth,
                                result};
}

int64_t EmulatedMachine::NumCalls(const std::string& function) const {
  const Unseen unseen;
  Machine& machine = Locked();
  const std::lock_guard lock(machine.mutex);
  const auto found = machine.num_calls.find(function);
  return found == machine.num_calls.end() ? 0 : found->second;
}

int64_t EmulatedMachine::NumStarved() const {
  const Unseen unseen;
  int64_t num = 0;
  for (const auto& context : Locked().contexts) {
    num += context.processors->num_starved();
  }
  return num;
}

EmulatedLaunchesOnly::EmulatedLaunchesOnly() { ++emulated::num_launches_only; }
EmulatedLaunchesOnly::~EmulatedLaunchesOnly() { --emulated::num_launches_only; }

EmulatedObjects EmulatedMachine::Live() const {
  const Unseen unseen;
  Machine& machine = Locked();
  const std::lock_guard lock(machine.mutex);
  return machine.Live();
}

std::vector<std::string> EmulatedMachine::Violations() const {
  const Unseen unseen;
  Machine& machine = Locked();
  const std::lock_guard lock(machine.mutex);
  return machine.violations;
}

std::string EmulatedMachine::Complaints() {
  std::string text;
  if (const std::string busy = AwaitLanes(Locked()); !busy.empty()) {
    text += "still at work: " + busy + "\n";
  }
  for (const std::string& violation : Violations()) text += violation + "\n";
  if (const std::string left = Live().Describe(); !left.empty()) {
    text += "never given back: " + left + "\n";
  }
  return text;
}

std::string EmulatedObjects::Describe() const {
  std::string text;
  const auto add = [&](int count, const std::string& what) {
    if (count == 0) return;
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + what +
            (count == 1 ? "" : "s");
  };
  add(contexts, "context");
  add(streams, "stream");
  add(events, "event");
  add(allocations, "allocation");
  add(host_allocations, "host allocation");
  add(handles, "memory handle");
  add(reservations, "reservation");
  add(mappings, "mapping");
  add(bindings, "multicast binding");
  add(ipc, "opened IPC handle");
  add(libraries, "loaded module");
  add(graphs, "graph");
  add(graph_execs, "instantiated graph");
  return text;
}

}  // namespace jax_ub
