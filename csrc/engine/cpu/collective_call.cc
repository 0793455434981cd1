#include "engine/cpu/collective_call.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <sstream>
#include <stdexcept>

#include "engine/cpu/call_sequencer.h"
#include "platform/error.h"
#include "platform/hash.h"
#include "platform/thread.h"

namespace jax_ub {

namespace {

// The number of launches that each call site remembers. XLA does not report the end of
// a launch, but it allows at most 32 launches in flight per device. After 128 newer
// launches, all ranks of a launch have arrived.
constexpr size_t kMaxLaunches = 128;
constexpr double kWatchdogPeriodS = 1;  // maximum time between checks of deadlines

std::string Join(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string TimeoutMessage(const CollectiveCall& collective) {
  std::vector<int> waiting;
  std::vector<int> missing;
  for (size_t i = 0; i < collective.completions.size(); ++i) {
    (collective.completions[i] ? waiting : missing).push_back(collective.RankOf(i));
  }
  const CallAttributes& at = *collective.attributes;
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << at.label << ": op " << OpName(at.op)
       << " of group " << collective.group << " waited "
       << collective.deadline.timeout_s() << " s for rank(s) " << Join(missing)
       << " of " << at.num_ranks << "; waiting: rank(s) " << Join(waiting) << " (run "
       << collective.run_id << ", execution " << collective.count
       << "). The missing devices, which are in this process, failed, hang, took "
          "another branch, or wait for one of XLA's threads: set NPROC, their number, "
          "to at least 4 per device before jax starts. "
       << collective.deadline_setting << " sets the seconds.";
  return text.str();
}

uint64_t NextId() {
  static std::atomic<uint64_t> next{0};
  return next.fetch_add(1);
}

// Returns the index of a rank among the group's ranks in this process. Throws
// CommunicatorError if the rank belongs to another process.
size_t LocalIndex(const CallAttributes& at,
                  const CallSequencer* sequencer,
                  int rank,
                  int64_t device) {
  if (sequencer == nullptr) return rank;
  const std::vector<int>& local = sequencer->local_ranks();
  const auto found = std::find(local.begin(), local.end(), rank);
  if (found == local.end()) {
    throw CommunicatorError("CommunicatorError: jax_ub." + at.label + ": device " +
                            std::to_string(device) + " is rank " +
                            std::to_string(rank) +
                            ", which its communicator has in another process");
  }
  return found - local.begin();
}

}  // namespace

int CollectiveCall::RankOf(size_t i) const {
  return sequencer ? sequencer->local_ranks()[i] : static_cast<int>(i);
}

void CheckEqualShapes(const CollectiveCall& collective) {
  for (size_t i = 1; i < collective.calls.size(); ++i) {
    const std::string difference =
        DescribeMismatch(collective.calls[0], collective.calls[i]);
    if (difference.empty()) continue;
    throw CommunicatorError("CommunicatorError: jax_ub." +
                            collective.attributes->label + ": ranks " +
                            std::to_string(collective.RankOf(0)) + " and " +
                            std::to_string(collective.RankOf(i)) +
                            " do not agree: " + difference + ", respectively");
  }
}

CallSite::CallSite(CallAttributes attributes, uint64_t ordinal)
    : attributes_(std::move(attributes)),
      id_(NextId()),
      key_(Mix(Mix(kHashBegin, attributes_.channel), ordinal)),
      flat_ranks_(FlatRankOfDevice(attributes_)) {
  for (size_t flat_rank = 0; flat_rank < attributes_.ranks.size(); ++flat_rank) {
    if (flat_rank % attributes_.num_ranks == 0) group_keys_.push_back(kHashBegin);
    group_keys_.back() = Mix(group_keys_.back(),
                             static_cast<uint64_t>(attributes_.ranks[flat_rank] + 1));
  }
  has_begun_.resize(group_keys_.size());
}

bool CallSite::IsGroup(int group, const std::vector<int64_t>& devices) const {
  const size_t size = attributes_.num_ranks;
  return devices.size() == size && std::equal(devices.begin(), devices.end(),
                                              attributes_.ranks.begin() + group * size);
}

CallSite::Launch& CallSite::FindLaunch(int64_t run_id) {
  for (auto launch = launches_.rbegin(); launch != launches_.rend(); ++launch) {
    if (launch->run_id == run_id) return *launch;
  }
  // The oldest launch is forgotten. Its incomplete collective calls still fail at their
  // deadline, because the watchdog has its own list of these calls.
  if (launches_.size() == kMaxLaunches) launches_.pop_front();
  launches_.push_back({run_id, std::vector<int64_t>(flat_ranks_.size(), 0), {}});
  return launches_.back();
}

std::shared_ptr<CollectiveCall> CallSite::FindCall(
    Launch& launch,
    int group,
    int64_t count,
    const std::shared_ptr<CallSequencer>& sequencer) {
  for (const auto& collective : launch.open) {
    if (collective->group == group && collective->count == count) return collective;
  }
  const size_t size =
      sequencer ? sequencer->local_ranks().size() : attributes_.num_ranks;
  auto collective = std::make_shared<CollectiveCall>();
  collective->attributes = &attributes_;
  collective->slot_plans = &slot_plans_;
  collective->run_id = launch.run_id;
  collective->group = group;
  collective->group_key = group_keys_[group];
  collective->count = count;
  collective->is_first = !has_begun_[group];
  has_begun_[group] = true;
  collective->calls.resize(size);
  collective->completions.resize(size);
  collective->sequencer = sequencer;
  collective->call_site_key = Mix(key_, collective->group_key);
  collective->call_site_id = id_;
  launch.open.push_back(collective);
  return collective;
}

Rendezvous::Rendezvous(std::function<void(std::shared_ptr<BlockingTask>)> start,
                       Timeouts timeouts)
    : start_(std::move(start)), timeouts_(timeouts) {}

std::shared_ptr<CollectiveCall> Rendezvous::Join(CallSite& site,
                                                 int64_t run_id,
                                                 int64_t device,
                                                 RankCall call,
                                                 Completion done,
                                                 int* last_rank) {
  const CallAttributes& at = site.attributes();
  const auto flat_rank = site.flat_ranks_.find(device);
  if (flat_rank == site.flat_ranks_.end()) {
    throw CommunicatorError("CommunicatorError: jax_ub." + at.label + ": device " +
                            std::to_string(device) +
                            " is not among the devices of the mesh axis");
  }
  const int group = static_cast<int>(flat_rank->second / at.num_ranks);
  const int rank = static_cast<int>(flat_rank->second % at.num_ranks);

  std::lock_guard lock(mutex_);
  const std::shared_ptr<CallSequencer> sequencer = SequencerOf(site, group);
  const size_t index = LocalIndex(at, sequencer.get(), rank, device);
  for (const FailedLaunch& failed : failed_launches_) {
    if (failed.run_id != run_id) continue;
    const auto reason = failed.reasons.find(site.group_keys_[group]);
    if (reason != failed.reasons.end()) std::rethrow_exception(reason->second);
  }
  CallSite::Launch& launch = site.FindLaunch(run_id);
  const int64_t count = launch.counts[flat_rank->second]++;
  const std::shared_ptr<CollectiveCall> collective =
      site.FindCall(launch, group, count, sequencer);
  if (collective->sequencer != sequencer) {
    throw CommunicatorError("CommunicatorError: jax_ub." + at.label +
                            ": its communicator was closed while ranks of it arrived");
  }
  if (!watchdog_started_ && collective->calls.size() > 1) {
    StartThread([this] { Watch(); });  // may throw; the call is not registered yet
    watchdog_started_ = true;
  }
  incomplete_.reserve(incomplete_.size() + 1);  // may throw, too
  collective->calls[index] = std::move(call);
  collective->completions[index] = std::move(done);
  if (static_cast<size_t>(++collective->num_arrived) == collective->calls.size()) {
    *last_rank = static_cast<int>(index);
    std::erase(launch.open, collective);
    std::erase_if(incomplete_,
                  [&](const auto& entry) { return entry.second == collective; });
    return collective;
  }
  if (collective->num_arrived == 1) {
    // The first call of a call site gets the longer timeout if any group spans
    // processes. A local rank may arrive late, because it waits in an earlier call for
    // a process that is still compiling the program.
    const bool is_first = collective->is_first && !sequencers_.empty();
    collective->deadline = StoppableDeadline::After(timeouts_.Of(is_first));
    collective->deadline_setting = timeouts_.SettingOf(is_first);
    incomplete_.emplace_back(&site, collective);
    if (!watchdog_armed_) wake_watchdog_.notify_one();
    watchdog_armed_ = true;
  }
  return nullptr;
}

void Rendezvous::Attach(const std::shared_ptr<CallSequencer>& sequencer) {
  std::lock_guard lock(mutex_);
  for (const auto& other : sequencers_) {
    if (other->devices() != sequencer->devices()) continue;
    throw CommunicatorError("CommunicatorError: jax_ub: the devices of communicator '" +
                            sequencer->communicator().name() +
                            "' are connected already, by '" +
                            other->communicator().name() + "': close that one first");
  }
  sequencers_.push_back(sequencer);
}

void Rendezvous::Detach(const CallSequencer& sequencer) {
  std::lock_guard lock(mutex_);
  std::erase_if(sequencers_, [&](const auto& one) { return one.get() == &sequencer; });
}

std::shared_ptr<CallSequencer> Rendezvous::FindSequencer(const CallSite& site,
                                                         int group) const {
  for (const auto& sequencer : sequencers_) {
    if (site.IsGroup(group, sequencer->devices())) return sequencer;
  }
  return nullptr;
}

std::shared_ptr<CallSequencer> Rendezvous::SequencerOf(const CallSite& site,
                                                       int group) const {
  if (site.attributes_.channel.empty()) return nullptr;
  std::shared_ptr<CallSequencer> sequencer = FindSequencer(site, group);
  if (!sequencer) {
    CheckIsLocal(site, group);
  } else if (!sequencer->AcceptsGeneration(site.attributes_)) {
    throw CommunicatorError(
        "CommunicatorError: jax_ub." + site.attributes_.label +
        ": the program was traced for an earlier communicator of its devices, which "
        "ub.destroy_ub has closed: call jax.clear_caches() after ub.initialize_ub, in "
        "every process, so that it is traced again");
  } else if (const auto failure = sequencer->failure()) {
    std::rethrow_exception(sequencer->WithLabel(site.attributes_.label, failure));
  }
  return sequencer;
}

// Throws CommunicatorError unless all ranks of the group are in this process. It throws
// if a program that was lowered for several processes runs after destroy_ub.
void Rendezvous::CheckIsLocal(const CallSite& site, int group) const {
  const CallAttributes& at = site.attributes();
  std::string devices;
  bool is_local = true;
  for (int rank = 0; rank < at.num_ranks; ++rank) {
    const int64_t device = at.ranks[static_cast<size_t>(group) * at.num_ranks + rank];
    devices += (rank == 0 ? "" : ", ") + std::to_string(device);
    is_local = is_local && (local_devices_.empty() || local_devices_.contains(device));
  }
  if (is_local) return;
  throw CommunicatorError(
      "CommunicatorError: jax_ub." + at.label + ": devices " + devices +
      " belong to several processes, and no communicator "
      "connects them: call ub.initialize_ub, in every process, before the "
      "program runs, and ub.destroy_ub after it");
}

void Rendezvous::set_local_devices(std::vector<int64_t> devices) {
  std::lock_guard lock(mutex_);
  local_devices_ = {devices.begin(), devices.end()};
}

uint64_t Rendezvous::NextOrdinal(const std::string& channel) {
  std::lock_guard lock(mutex_);
  return ordinals_[channel]++;
}

void Rendezvous::BeginProgram(const std::string& channel) {
  std::lock_guard lock(mutex_);
  ordinals_.erase(channel);
}

void Rendezvous::FailCallsOf(const CallSequencer& sequencer,
                             const std::exception_ptr& reason) noexcept {
  while (const std::shared_ptr<CollectiveCall> collective =
             TakeIncomplete([&](const CollectiveCall& one) {
               return one.sequencer.get() == &sequencer;
             })) {
    FailJoined(*collective, sequencer.WithLabel(collective->attributes->label, reason));
  }
}

// Fails the ranks that have already arrived at an incomplete collective call.
void Rendezvous::FailJoined(const CollectiveCall& collective,
                            const std::exception_ptr& reason) noexcept {
  for (const Completion& done : collective.completions) {
    if (done) start_(done.AsTask(reason));
  }
}

// Removes one incomplete collective call for which `is_meant` is true from the
// rendezvous table. Returns the call, or nullptr if there is none.
template <typename Predicate>
std::shared_ptr<CollectiveCall> Rendezvous::TakeIncomplete(const Predicate& is_meant) {
  std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(incomplete_.begin(), incomplete_.end(),
                   [&](const auto& entry) { return is_meant(*entry.second); });
  if (found == incomplete_.end()) return nullptr;
  const std::shared_ptr<CollectiveCall> collective = found->second;
  for (CallSite::Launch& launch : found->first->launches_)
    std::erase(launch.open, collective);
  incomplete_.erase(found);
  return collective;
}

// Stores the error of a group in one run of a program, so that ranks of this group that
// arrive later fail with this error.
void Rendezvous::Remember(int64_t run_id,
                          uint64_t group_key,
                          const std::exception_ptr& reason) {
  std::lock_guard lock(mutex_);
  auto failed = std::find_if(failed_launches_.begin(), failed_launches_.end(),
                             [&](const auto& one) { return one.run_id == run_id; });
  if (failed == failed_launches_.end()) {
    if (failed_launches_.size() == kMaxLaunches) failed_launches_.pop_front();
    failed = failed_launches_.insert(failed_launches_.end(), FailedLaunch{run_id, {}});
  }
  failed->reasons.try_emplace(group_key, reason);
}

void Rendezvous::Poison(int64_t run_id,
                        uint64_t group_key,
                        const std::exception_ptr& reason) noexcept {
  for (bool is_first : {true, false}) {
    try {
      Remember(run_id, group_key, reason);
      break;
    } catch (const std::bad_alloc&) {
      // There is no memory to store the failure. Frees the failures of older launches,
      // and tries again. If this also fails, ranks that arrive later do not learn of
      // the failure, and wait until their deadline.
      std::lock_guard lock(mutex_);
      if (is_first) failed_launches_.clear();
    }
  }
  while (const std::shared_ptr<CollectiveCall> collective =
             TakeIncomplete([&](const CollectiveCall& one) {
               return one.run_id == run_id && one.group_key == group_key;
             })) {
    FailJoined(*collective, reason);
  }
}

void Rendezvous::PoisonGroupOf(const CallSite& site,
                               int64_t run_id,
                               int64_t device,
                               const std::exception_ptr& reason) noexcept {
  const auto flat_rank = site.flat_ranks_.find(device);
  if (flat_rank == site.flat_ranks_.end()) return;
  const int group = static_cast<int>(flat_rank->second / site.attributes_.num_ranks);
  std::shared_ptr<CallSequencer> sequencer;
  if (!site.attributes_.channel.empty()) {
    std::lock_guard lock(mutex_);
    sequencer = FindSequencer(site, group);
  }
  if (sequencer) {
    // Does not fail the current communicator for a call that was lowered for an earlier
    // communicator of these devices. Every process rejects such a call, so no process
    // waits for it.
    if (sequencer->AcceptsGeneration(site.attributes_)) sequencer->Fail(reason);
    return;
  }
  Poison(run_id, site.group_keys_[group], reason);
}

void Rendezvous::set_timeout_s(double timeout_s) {
  std::lock_guard lock(mutex_);
  timeouts_.call_s = timeout_s;
  wake_watchdog_.notify_one();
}

void Rendezvous::set_first_call_timeout_s(double timeout_s) {
  std::lock_guard lock(mutex_);
  timeouts_.first_call_s = timeout_s;
}

Timeouts Rendezvous::timeouts() const {
  std::lock_guard lock(mutex_);
  return timeouts_;
}

// Fails collective calls whose deadline has expired. The watchdog thread wakes once per
// period instead of at each new call. It misses no deadline, because a call never
// expires within its first period.
void Rendezvous::Watch() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (incomplete_.empty()) watchdog_armed_ = false;
    wake_watchdog_.wait(lock, [this] { return watchdog_armed_; });
    auto next = Deadline::After(std::min(timeouts_.call_s, kWatchdogPeriodS)).time();
    for (const auto& [site, collective] : incomplete_) {
      next = std::min(next, collective->deadline.next_check());
    }
    wake_watchdog_.wait_until(lock, next);
    try {
      FailExpired(lock);
    } catch (const std::bad_alloc&) {
      // Memory was exhausted when an error was created. The watchdog tries again after
      // one period.
      if (!lock.owns_lock()) lock.lock();
      wake_watchdog_.wait_for(lock, std::chrono::duration<double>(kWatchdogPeriodS));
    }
  }
}

void Rendezvous::FailExpired(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    const auto expired = std::find_if(
        incomplete_.begin(), incomplete_.end(),
        [](const auto& entry) { return entry.second->deadline.Expired(); });
    if (expired == incomplete_.end()) return;
    const CollectiveCall& collective = *expired->second;
    const auto reason =
        std::make_exception_ptr(DeadlineError(TimeoutMessage(collective)));
    const int64_t run_id = collective.run_id;
    const uint64_t group_key = collective.group_key;
    const std::shared_ptr<CallSequencer> sequencer = collective.sequencer;
    lock.unlock();
    // Fail also removes the collective call from the table. If the sequencer has
    // already failed, Fail has no effect, and Poison removes the call.
    if (sequencer) sequencer->Fail(reason);
    Poison(run_id, group_key, reason);
    lock.lock();
  }
}

}  // namespace jax_ub
