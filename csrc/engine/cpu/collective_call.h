// Matches the calls of the ranks of one process into collective calls. If a group spans
// processes, its call sequencer matches the collective calls of the processes.
//
// A call site is one custom call of one compiled program. Its executions on the devices
// of a launch share a run id. A device that executes it several times (a loop) does so
// in the same order as its peers. Calls therefore match by (call site, run id, group,
// number of earlier executions on this device in this run). The attributes are not
// sufficient: two different calls with equal attributes would be combined and silently
// produce wrong results.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/call.h"
#include "engine/cpu/completion.h"
#include "engine/slot_plans.h"
#include "engine/trace.h"
#include "platform/deadline.h"

namespace jax_ub {

class CallSequencer;

// The time in seconds for which a rank waits for the other ranks of its call.
struct Timeouts {
  double call_s = 0;
  // Lower bound of the timeout of a call site's first execution, during which other
  // processes may still be compiling the program.
  double first_call_s = 0;

  double Of(bool is_first_call) const {
    return is_first_call ? std::max(call_s, first_call_s) : call_s;
  }
  // Returns the name of the environment variable that sets the timeout of a call.
  std::string_view SettingOf(bool is_first_call) const {
    return is_first_call && first_call_s > call_s ? "JAX_UB_FIRST_CALL_TIMEOUT_S"
                                                  : "JAX_UB_TIMEOUT_S";
  }
};

// One execution of a collective op. Contains the calls of all ranks of a group or, if
// the group spans processes, of the group's ranks in this process.
struct CollectiveCall {
  // The attributes of the call site. The pointer stays valid, because a call site
  // outlives its pending calls.
  const CallAttributes* attributes = nullptr;
  SlotPlans* slot_plans = nullptr;  // same lifetime as `attributes`
  int64_t run_id = 0;
  int group = 0;
  uint64_t group_key = 0;  // identifies the set of devices in every call site
  int64_t count = 0;       // index of the execution within the run
  bool is_first = false;   // whether this is the call site's first call in this group
  std::vector<RankCall> calls;          // [rank]; with a call sequencer [local rank]
  std::vector<Completion> completions;  // indexed like calls; empty: not arrived
  int num_arrived = 0;
  TraceContext trace;
  StoppableDeadline deadline = StoppableDeadline::After(0);
  std::string_view deadline_setting;

  // The next three members are set only if the group spans processes.
  std::shared_ptr<CallSequencer> sequencer;
  uint64_t call_site_key = 0;  // identifies call site and group in every process
  uint64_t call_site_id = 0;   // identifies the call site within this process

  // Returns the rank within the group that made calls[i].
  int RankOf(size_t i) const;
};

// Throws CommunicatorError if operands, results or scales differ in number, shape or
// dtype between the ranks.
void CheckEqualShapes(const CollectiveCall& collective);

// One custom call of a compiled program. Holds the collective calls at this call site
// that some ranks have not joined yet.
class CallSite {
 public:
  // `ordinal` is the number of earlier call sites in the program with the same channel.
  // Throws std::invalid_argument if no op accepts the attributes.
  explicit CallSite(CallAttributes attributes, uint64_t ordinal = 0);

  const CallAttributes& attributes() const { return attributes_; }
  bool is_local() const { return attributes_.ranks.empty(); }

 private:
  friend class Rendezvous;

  struct Launch {
    int64_t run_id = 0;
    std::vector<int64_t> counts;  // [group * P + rank]: executions so far
    std::vector<std::shared_ptr<CollectiveCall>> open;
  };

  Launch& FindLaunch(int64_t run_id);
  // Returns the collective call of a group in this launch, after `count` earlier
  // executions of the call site by the group. Creates the collective call when the
  // first rank arrives.
  std::shared_ptr<CollectiveCall> FindCall(
      Launch& launch,
      int group,
      int64_t count,
      const std::shared_ptr<CallSequencer>& sequencer);
  bool IsGroup(int group, const std::vector<int64_t>& devices) const;

  const CallAttributes attributes_;
  const uint64_t id_;   // unique within this process, never reused
  const uint64_t key_;  // hash of channel and ordinal
  // Maps a device id to group * num_ranks + rank.
  const std::unordered_map<int64_t, size_t> flat_ranks_;
  std::vector<uint64_t> group_keys_;
  std::vector<bool> has_begun_;  // [group]; guarded by Rendezvous::mutex_
  SlotPlans slot_plans_;
  std::deque<Launch> launches_;  // guarded by Rendezvous::mutex_; newest last
};

// Collects the calls of ranks until all ranks of their group have arrived. A watchdog
// fails incomplete collective calls at their deadline. If the call of one rank fails,
// all calls of the group in the same run fail, because the rank's peers would wait for
// it.
class Rendezvous {
 public:
  // `start` must run a task on another thread, and must not throw.
  Rendezvous(std::function<void(std::shared_ptr<BlockingTask>)> start,
             Timeouts timeouts);
  ~Rendezvous() = delete;  // its watchdog thread never exits

  // Adds the call of a rank. For the last rank of a group, returns the complete
  // collective call and sets `*last_rank` to the rank's index in this call. For all
  // other ranks, returns nullptr. Throws CommunicatorError if the group has already
  // failed in this run.
  std::shared_ptr<CollectiveCall> Join(CallSite& site,
                                       int64_t run_id,
                                       int64_t device,
                                       RankCall call,
                                       Completion done,
                                       int* last_rank);

  // Makes `sequencer` run all later calls of the group that consists of its devices,
  // until Detach. Throws CommunicatorError if the group already has a sequencer.
  void Attach(const std::shared_ptr<CallSequencer>& sequencer);
  void Detach(const CallSequencer& sequencer);
  // Fails the collective calls of the sequencer's group that still wait for local
  // ranks.
  void FailCallsOf(const CallSequencer& sequencer,
                   const std::exception_ptr& reason) noexcept;

  // Sets the ids of the devices that belong to this process. If it is not called, all
  // devices are assumed to belong to this process.
  void set_local_devices(std::vector<int64_t> devices);

  // Returns the number of earlier call sites with this channel in the program that is
  // being compiled.
  uint64_t NextOrdinal(const std::string& channel);
  // Resets the number that NextOrdinal returns. Called when a program is lowered.
  void BeginProgram(const std::string& channel);

  // Fails all pending and later calls of a group in one run of a program.
  void Poison(int64_t run_id,
              uint64_t group_key,
              const std::exception_ptr& reason) noexcept;
  // Fails the calls of a rank's group in this run, because the other ranks would wait
  // for this rank. Used if CheckCall or Join has rejected the rank's call.
  void PoisonGroupOf(const CallSite& site,
                     int64_t run_id,
                     int64_t device,
                     const std::exception_ptr& reason) noexcept;

  void set_timeout_s(double timeout_s);
  void set_first_call_timeout_s(double timeout_s);
  double timeout_s() const { return timeouts().call_s; }
  Timeouts timeouts() const;

 private:
  struct FailedLaunch {
    int64_t run_id = 0;
    // The first failure of each group in the run, keyed by CollectiveCall::group_key.
    std::unordered_map<uint64_t, std::exception_ptr> reasons;
  };

  void Watch();
  void FailExpired(std::unique_lock<std::mutex>& lock);
  template <typename Predicate>
  std::shared_ptr<CollectiveCall> TakeIncomplete(const Predicate& is_meant);
  void FailJoined(const CollectiveCall& collective,
                  const std::exception_ptr& reason) noexcept;
  void Remember(int64_t run_id, uint64_t group_key, const std::exception_ptr& reason);
  std::shared_ptr<CallSequencer> FindSequencer(const CallSite& site, int group) const;
  // Returns the sequencer that orders the calls of a group in all its processes.
  // Returns nullptr if all ranks of the group are in this process. Throws
  // CommunicatorError if the group spans processes and is not connected, if its
  // connection has failed, or if the program was lowered for an earlier connection.
  std::shared_ptr<CallSequencer> SequencerOf(const CallSite& site, int group) const;
  void CheckIsLocal(const CallSite& site, int group) const;

  const std::function<void(std::shared_ptr<BlockingTask>)> start_;

  // Guards the members below, and the members of CallSite whose comments name this
  // mutex.
  mutable std::mutex mutex_;
  Timeouts timeouts_;
  std::vector<std::pair<CallSite*, std::shared_ptr<CollectiveCall>>> incomplete_;
  std::deque<FailedLaunch> failed_launches_;  // the kMaxLaunches newest
  std::condition_variable wake_watchdog_;
  std::vector<std::shared_ptr<CallSequencer>> sequencers_;
  std::unordered_set<int64_t> local_devices_;
  // Number of call sites per channel in the program that is being compiled.
  std::unordered_map<std::string, uint64_t> ordinals_;
  bool watchdog_started_ = false;
  bool watchdog_armed_ = false;
};

}  // namespace jax_ub
