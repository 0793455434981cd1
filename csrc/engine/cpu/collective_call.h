// Matching the calls of one process: which ranks' calls belong together. Where a group
// spans processes, its call sequencer matches the collective calls of the processes.
//
// A call site is one custom call of one compiled program. Its executions on the devices
// of a launch share a run id, and a device that is there several times (a loop) comes
// in the same order as its peers. So calls match by (call site, run id, group, how
// often this device was here in this run). The attributes alone would not do: two calls
// may have the same ones, and then ran together silently with wrong numbers.
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

// How long a call waits for its peers.
struct Timeouts {
  double call_s = 0;
  // The first call of a call site waits at least this long for other processes, which
  // may still compile the program.
  double first_call_s = 0;

  double Of(bool is_first_call) const {
    return is_first_call ? std::max(call_s, first_call_s) : call_s;
  }
  // The environment variable that sets it.
  std::string_view SettingOf(bool is_first_call) const {
    return is_first_call && first_call_s > call_s ? "JAX_UB_FIRST_CALL_TIMEOUT_S"
                                                  : "JAX_UB_TIMEOUT_S";
  }
};

// The calls of all ranks of a group that belong together; where the group spans
// processes, of the ranks in this one.
struct CollectiveCall {
  const CallAttributes* attributes = nullptr;  // lives while a call of it is pending
  SlotPlans* slot_plans = nullptr;             // the same
  int64_t run_id = 0;
  int group = 0;
  uint64_t group_key = 0;       // the same for this set of devices in every call site
  int64_t count = 0;            // which execution of the call site within the run
  bool is_first = false;        // the first call of the call site in this group
  std::vector<RankCall> calls;  // [rank], of a call sequencer [local rank]
  std::vector<Completion> completions;  // the same; empty: has not arrived
  int num_arrived = 0;
  TraceContext trace;
  Deadline deadline = Deadline::After(0);
  std::string_view deadline_setting;

  // Where the group spans processes:
  std::shared_ptr<CallSequencer> sequencer;
  uint64_t call_site_key = 0;  // of call site and group, the same in every process
  uint64_t call_site_id = 0;   // of this process

  // The rank of the group that calls[i] is of.
  int RankOf(size_t i) const;
};

// Throws CommunicatorError when the ranks brought different shapes or dtypes.
void CheckEqualShapes(const CollectiveCall& collective);

// Executions of one call site.
class CallSite {
 public:
  // `ordinal`: how many sites of the same program have the same channel. Throws
  // std::invalid_argument for attributes that no op has.
  explicit CallSite(CallAttributes attributes, uint64_t ordinal = 0);

  const CallAttributes& attributes() const { return attributes_; }
  bool is_local() const { return attributes_.ranks.empty(); }

 private:
  friend class Rendezvous;

  struct Launch {
    int64_t run_id = 0;
    std::vector<int64_t> counts;  // [group * P + rank]
    std::vector<std::shared_ptr<CollectiveCall>> open;
  };

  Launch& FindLaunch(int64_t run_id);
  // The collective call of the count-th execution; made where its first rank asks for it.
  std::shared_ptr<CollectiveCall> FindCall(
      Launch& launch,
      int group,
      int64_t count,
      const std::shared_ptr<CallSequencer>& sequencer);
  bool IsGroup(int group, const std::vector<int64_t>& devices) const;

  const CallAttributes attributes_;
  const uint64_t id_;   // no other site of this process had it
  const uint64_t key_;  // channel and ordinal
  const std::unordered_map<int64_t, size_t>
      flat_ranks_;  // FlatRankOfDevice the attributes
  std::vector<uint64_t> group_keys_;
  std::vector<bool> has_begun_;  // [group], guarded by rendezvous table::mutex_
  SlotPlans slot_plans_;
  std::deque<Launch> launches_;  // guarded by rendezvous table::mutex_; newest last
};

// Where calls meet. A watchdog fails collective calls that stay incomplete until their deadline,
// and a failure of one rank fails its group for the rest of that run: the others would
// only wait for it.
class Rendezvous {
 public:
  // `start` runs a completion on a thread of its own, and does not throw.
  Rendezvous(std::function<void(std::shared_ptr<BlockingTask>)> start,
             Timeouts timeouts);
  ~Rendezvous() = delete;  // its watchdog never ends

  // Adds a rank's call. Returns the collective call to the last of its ranks, whose index in it is
  // `*last_rank`, nullptr to the others. Throws CommunicatorError when the group failed
  // in this run.
  std::shared_ptr<CollectiveCall> Arrive(CallSite& site,
                                         int64_t run_id,
                                         int64_t device,
                                         RankCall call,
                                         Completion done,
                                         int* last_rank);

  // Groups of these devices are the call sequencer's from now on, until it leaves. Throws
  // CommunicatorError when they are another one's.
  void Join(const std::shared_ptr<CallSequencer>& sequencer);
  void Leave(const CallSequencer& sequencer);
  // Fails what such groups have incomplete.
  void FailCallsOf(const CallSequencer& sequencer,
                   const std::exception_ptr& reason) noexcept;

  // The devices of this process; until they are set, all count as its own.
  void set_local_devices(std::vector<int64_t> devices);

  // How many sites of the program that is being compiled had this channel; it begins
  // with a program's lowering.
  uint64_t NextOrdinal(const std::string& channel);
  void BeginProgram(const std::string& channel);

  // Fails what the group has pending in this run, and what it still calls in it.
  void Poison(int64_t run_id,
              uint64_t group_key,
              const std::exception_ptr& reason) noexcept;
  // The same for a rank whose call was refused before it arrived.
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
    std::unordered_map<uint64_t, std::exception_ptr> reasons;  // the first, by group
  };

  void Watch();
  void FailExpired(std::unique_lock<std::mutex>& lock);
  template <typename Predicate>
  std::shared_ptr<CollectiveCall> TakeIncomplete(const Predicate& is_meant);
  void FailArrived(const CollectiveCall& collective,
                   const std::exception_ptr& reason) noexcept;
  void Remember(int64_t run_id, uint64_t group_key, const std::exception_ptr& reason);
  std::shared_ptr<CallSequencer> FindSequencer(const CallSite& site, int group) const;
  // Throws CommunicatorError where the group's call sequencer failed, is missing, or is not
  // the one that the call was lowered for; nullptr where all its ranks are in this
  // process.
  std::shared_ptr<CallSequencer> SequencerOf(const CallSite& site, int group) const;
  void CheckIsLocal(const CallSite& site, int group) const;

  const std::function<void(std::shared_ptr<BlockingTask>)> start_;

  mutable std::mutex mutex_;  // guards all below, and CallSite::runs_
  Timeouts timeouts_;
  std::vector<std::pair<CallSite*, std::shared_ptr<CollectiveCall>>> incomplete_;
  std::deque<FailedLaunch> failed_launches_;  // the newest kMaxLaunches
  std::condition_variable wake_watchdog_;
  std::vector<std::shared_ptr<CallSequencer>> sequencers_;
  std::unordered_set<int64_t> local_devices_;
  std::unordered_map<std::string, uint64_t> ordinals_;  // by channel
  bool watchdog_started_ = false;
  bool watchdog_armed_ = false;
};

}  // namespace jax_ub
