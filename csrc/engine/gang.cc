#include "engine/gang.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <sstream>
#include <stdexcept>

#include "engine/conductor.h"
#include "engine/hash.h"
#include "platform/error.h"
#include "platform/thread.h"

namespace jax_ub {

namespace {

// Launches that may be in flight: XLA admits 32 per device. Nobody says when one is over;
// of one that so many others followed no rank is still to come.
constexpr size_t kMaxRuns = 128;
constexpr double kWatchdogPeriodS = 1;

std::string Join(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string OverdueText(const Gang& gang) {
  std::vector<int> waiting;
  std::vector<int> missing;
  for (size_t i = 0; i < gang.completions.size(); ++i) {
    (gang.completions[i] ? waiting : missing).push_back(gang.RankOf(i));
  }
  const Attributes& at = *gang.attributes;
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << at.label << ": op " << OpName(at.op)
       << " of group " << gang.group << " waited " << gang.deadline.timeout_s()
       << " s for rank(s) " << Join(missing) << " of " << at.num_ranks
       << "; waiting: rank(s) " << Join(waiting) << " (run " << gang.run_id
       << ", execution " << gang.count
       << "). The missing devices died, hang or took another branch. "
       << gang.deadline_setting << " sets the seconds.";
  return text.str();
}

uint64_t NextId() {
  static std::atomic<uint64_t> next{0};
  return next.fetch_add(1);
}

// Where a rank's call lies in a gang: among those of this process, if it has a conductor.
size_t IndexOf(const Attributes& at,
               const Conductor* conductor,
               int rank,
               int64_t device) {
  if (conductor == nullptr) return rank;
  const std::vector<int>& local = conductor->local_ranks();
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

int Gang::RankOf(size_t i) const {
  return conductor ? conductor->local_ranks()[i] : static_cast<int>(i);
}

void CheckAgreement(const Gang& gang) {
  for (size_t i = 1; i < gang.calls.size(); ++i) {
    const std::string difference = Difference(gang.calls[0], gang.calls[i]);
    if (difference.empty()) continue;
    throw CommunicatorError("CommunicatorError: jax_ub." + gang.attributes->label +
                            ": ranks " + std::to_string(gang.RankOf(0)) + " and " +
                            std::to_string(gang.RankOf(i)) +
                            " do not agree: " + difference + ", respectively");
  }
}

CallSite::CallSite(Attributes attributes, uint64_t ordinal)
    : attributes_(std::move(attributes)),
      id_(NextId()),
      key_(Mix(Mix(kHashBegin, attributes_.channel), ordinal)),
      places_(PlacesOf(attributes_)) {
  for (size_t place = 0; place < attributes_.ranks.size(); ++place) {
    if (place % attributes_.num_ranks == 0) group_keys_.push_back(kHashBegin);
    group_keys_.back() =
        Mix(group_keys_.back(), static_cast<uint64_t>(attributes_.ranks[place] + 1));
  }
  has_begun_.resize(group_keys_.size());
}

bool CallSite::IsGroup(int group, const std::vector<int64_t>& devices) const {
  const size_t size = attributes_.num_ranks;
  return devices.size() == size && std::equal(devices.begin(), devices.end(),
                                              attributes_.ranks.begin() + group * size);
}

CallSite::Run& CallSite::FindRun(int64_t run_id) {
  for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
    if (run->run_id == run_id) return *run;
  }
  // A gang that is still open in the oldest run stays with the watchdog.
  if (runs_.size() == kMaxRuns) runs_.pop_front();
  runs_.push_back({run_id, std::vector<int64_t>(places_.size(), 0), {}});
  return runs_.back();
}

std::shared_ptr<Gang> CallSite::FindGang(Run& run,
                                         int group,
                                         int64_t count,
                                         const std::shared_ptr<Conductor>& conductor) {
  for (const auto& gang : run.open) {
    if (gang->group == group && gang->count == count) return gang;
  }
  const size_t size =
      conductor ? conductor->local_ranks().size() : attributes_.num_ranks;
  auto gang = std::make_shared<Gang>();
  gang->attributes = &attributes_;
  gang->slot_plans = &slot_plans_;
  gang->run_id = run.run_id;
  gang->group = group;
  gang->group_key = group_keys_[group];
  gang->count = count;
  gang->is_first = !has_begun_[group];
  has_begun_[group] = true;
  gang->calls.resize(size);
  gang->completions.resize(size);
  gang->conductor = conductor;
  gang->call_site_key = Mix(key_, gang->group_key);
  gang->call_site_id = id_;
  run.open.push_back(gang);
  return gang;
}

Board::Board(std::function<void(std::shared_ptr<Run>)> start, Timeouts timeouts)
    : start_(std::move(start)), timeouts_(timeouts) {}

std::shared_ptr<Gang> Board::Arrive(CallSite& site,
                                    int64_t run_id,
                                    int64_t device,
                                    RankCall call,
                                    Completion done,
                                    int* last_rank) {
  const Attributes& at = site.attributes();
  const auto place = site.places_.find(device);
  if (place == site.places_.end()) {
    throw CommunicatorError("CommunicatorError: jax_ub." + at.label + ": device " +
                            std::to_string(device) +
                            " is not among the devices of the mesh axis");
  }
  const int group = static_cast<int>(place->second / at.num_ranks);
  const int rank = static_cast<int>(place->second % at.num_ranks);

  std::lock_guard lock(mutex_);
  const std::shared_ptr<Conductor> conductor = ConductorOf(site, group);
  const size_t index = IndexOf(at, conductor.get(), rank, device);
  for (const FailedRun& failed : failed_runs_) {
    if (failed.run_id != run_id) continue;
    const auto reason = failed.reasons.find(site.group_keys_[group]);
    if (reason != failed.reasons.end()) std::rethrow_exception(reason->second);
  }
  CallSite::Run& run = site.FindRun(run_id);
  const int64_t count = run.counts[place->second]++;
  const std::shared_ptr<Gang> gang = site.FindGang(run, group, count, conductor);
  if (gang->conductor != conductor) {
    throw CommunicatorError("CommunicatorError: jax_ub." + at.label +
                            ": its communicator was closed while ranks of it arrived");
  }
  if (!watchdog_started_ && gang->calls.size() > 1) {
    StartThread([this] { Watch(); });  // or throws, before the call is there
    watchdog_started_ = true;
  }
  incomplete_.reserve(incomplete_.size() + 1);  // or throws, before the call is there
  gang->calls[index] = std::move(call);
  gang->completions[index] = std::move(done);
  if (static_cast<size_t>(++gang->num_arrived) == gang->calls.size()) {
    *last_rank = static_cast<int>(index);
    std::erase(run.open, gang);
    std::erase_if(incomplete_, [&](const auto& entry) { return entry.second == gang; });
    return gang;
  }
  if (gang->num_arrived == 1) {
    // All ranks of a process run one executable: only other processes compile longer, and
    // hold up the devices that they share a group with.
    const bool is_first = gang->is_first && !conductors_.empty();
    gang->deadline = Deadline::After(timeouts_.Of(is_first));
    gang->deadline_setting = timeouts_.SettingOf(is_first);
    incomplete_.emplace_back(&site, gang);
    if (!watchdog_armed_) wake_watchdog_.notify_one();
    watchdog_armed_ = true;
  }
  return nullptr;
}

void Board::Join(const std::shared_ptr<Conductor>& conductor) {
  std::lock_guard lock(mutex_);
  for (const auto& other : conductors_) {
    if (other->devices() != conductor->devices()) continue;
    throw CommunicatorError("CommunicatorError: jax_ub: the devices of communicator '" +
                            conductor->communicator().name() +
                            "' are connected already, by '" +
                            other->communicator().name() + "': close that one first");
  }
  conductors_.push_back(conductor);
}

void Board::Leave(const Conductor& conductor) {
  std::lock_guard lock(mutex_);
  std::erase_if(conductors_, [&](const auto& one) { return one.get() == &conductor; });
}

std::shared_ptr<Conductor> Board::FindConductor(const CallSite& site, int group) const {
  for (const auto& conductor : conductors_) {
    if (site.IsGroup(group, conductor->devices())) return conductor;
  }
  return nullptr;
}

std::shared_ptr<Conductor> Board::ConductorOf(const CallSite& site, int group) const {
  if (site.attributes_.channel.empty()) return nullptr;
  std::shared_ptr<Conductor> conductor = FindConductor(site, group);
  if (!conductor) {
    CheckIsLocal(site, group);
  } else if (!conductor->Serves(site.attributes_)) {
    throw CommunicatorError(
        "CommunicatorError: jax_ub." + site.attributes_.label +
        ": the program was traced for an earlier communicator of its devices, which "
        "ub.destroy_ub has closed: call jax.clear_caches() after ub.initialize_ub, in "
        "every process, so that it is traced again");
  } else if (const auto failure = conductor->failure()) {
    std::rethrow_exception(conductor->FailureOf(site.attributes_.label, failure));
  }
  return conductor;
}

// Whoever called initialize_ub and then destroy_ub still has the compiled program.
void Board::CheckIsLocal(const CallSite& site, int group) const {
  const Attributes& at = site.attributes();
  std::string devices;
  bool is_local = true;
  for (int rank = 0; rank < at.num_ranks; ++rank) {
    const int64_t device = at.ranks[static_cast<size_t>(group) * at.num_ranks + rank];
    devices += (rank == 0 ? "" : ", ") + std::to_string(device);
    is_local = is_local && (local_devices_.empty() || local_devices_.contains(device));
  }
  if (is_local) return;
  throw CommunicatorError("CommunicatorError: jax_ub." + at.label + ": devices " +
                          devices +
                          " lie in several processes, and no communicator connects "
                          "them: call ub.initialize_ub, in every process, before the "
                          "program runs, and ub.destroy_ub after it");
}

void Board::set_local_devices(std::vector<int64_t> devices) {
  std::lock_guard lock(mutex_);
  local_devices_ = {devices.begin(), devices.end()};
}

uint64_t Board::NextOrdinal(const std::string& channel) {
  std::lock_guard lock(mutex_);
  return ordinals_[channel]++;
}

void Board::BeginProgram(const std::string& channel) {
  std::lock_guard lock(mutex_);
  ordinals_.erase(channel);
}

void Board::FailAllOf(const Conductor& conductor,
                      const std::exception_ptr& reason) noexcept {
  while (const std::shared_ptr<Gang> gang = TakeIncomplete(
             [&](const Gang& one) { return one.conductor.get() == &conductor; })) {
    FailArrived(*gang, conductor.FailureOf(gang->attributes->label, reason));
  }
}

// The ranks of an incomplete gang that are there.
void Board::FailArrived(const Gang& gang, const std::exception_ptr& reason) noexcept {
  for (const Completion& done : gang.completions) {
    if (done) start_(done.AsRun(reason));
  }
}

// Takes an open gang that is meant off the board, or returns nullptr.
template <typename Predicate>
std::shared_ptr<Gang> Board::TakeIncomplete(const Predicate& is_meant) {
  std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(incomplete_.begin(), incomplete_.end(),
                   [&](const auto& entry) { return is_meant(*entry.second); });
  if (found == incomplete_.end()) return nullptr;
  const std::shared_ptr<Gang> gang = found->second;
  for (CallSite::Run& run : found->first->runs_) std::erase(run.open, gang);
  incomplete_.erase(found);
  return gang;
}

// For ranks that are still to come.
void Board::Remember(int64_t run_id,
                     uint64_t group_key,
                     const std::exception_ptr& reason) {
  std::lock_guard lock(mutex_);
  auto failed = std::find_if(failed_runs_.begin(), failed_runs_.end(),
                             [&](const auto& one) { return one.run_id == run_id; });
  if (failed == failed_runs_.end()) {
    if (failed_runs_.size() == kMaxRuns) failed_runs_.pop_front();
    failed = failed_runs_.insert(failed_runs_.end(), FailedRun{run_id, {}});
  }
  failed->reasons.try_emplace(group_key, reason);
}

void Board::Poison(int64_t run_id,
                   uint64_t group_key,
                   const std::exception_ptr& reason) noexcept {
  for (bool is_first : {true, false}) {
    try {
      Remember(run_id, group_key, reason);
      break;
    } catch (const std::bad_alloc&) {
      // Older runs make room. Otherwise ranks that are still to come wait until their
      // deadline.
      std::lock_guard lock(mutex_);
      if (is_first) failed_runs_.clear();
    }
  }
  while (const std::shared_ptr<Gang> gang = TakeIncomplete([&](const Gang& one) {
           return one.run_id == run_id && one.group_key == group_key;
         })) {
    FailArrived(*gang, reason);
  }
}

void Board::PoisonGroupOf(const CallSite& site,
                          int64_t run_id,
                          int64_t device,
                          const std::exception_ptr& reason) noexcept {
  const auto place = site.places_.find(device);
  if (place == site.places_.end()) return;
  const int group = static_cast<int>(place->second / site.attributes_.num_ranks);
  std::shared_ptr<Conductor> conductor;
  if (!site.attributes_.channel.empty()) {
    std::lock_guard lock(mutex_);
    conductor = FindConductor(site, group);
  }
  if (conductor) {
    // What it does not serve all processes refuse alike: nobody waits for it.
    if (conductor->Serves(site.attributes_)) conductor->Fail(reason);
    return;
  }
  Poison(run_id, site.group_keys_[group], reason);
}

void Board::set_timeout_s(double timeout_s) {
  std::lock_guard lock(mutex_);
  timeouts_.call_s = timeout_s;
  wake_watchdog_.notify_one();
}

void Board::set_first_call_timeout_s(double timeout_s) {
  std::lock_guard lock(mutex_);
  timeouts_.first_call_s = timeout_s;
}

Timeouts Board::timeouts() const {
  std::lock_guard lock(mutex_);
  return timeouts_;
}

// While calls come and go it looks once a period, so that a call need not wake it: a
// gang that is younger than its last look cannot be due before the next one.
void Board::Watch() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (incomplete_.empty()) watchdog_armed_ = false;
    wake_watchdog_.wait(lock, [this] { return watchdog_armed_; });
    auto next = Deadline::After(std::min(timeouts_.call_s, kWatchdogPeriodS)).time();
    for (const auto& [site, gang] : incomplete_) {
      next = std::min(next, gang->deadline.time());
    }
    wake_watchdog_.wait_until(lock, next);
    try {
      FailOverdue(lock);
    } catch (const std::bad_alloc&) {
      // It looks again a period later.
      if (!lock.owns_lock()) lock.lock();
      wake_watchdog_.wait_for(lock, std::chrono::duration<double>(kWatchdogPeriodS));
    }
  }
}

void Board::FailOverdue(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    const auto overdue = std::find_if(
        incomplete_.begin(), incomplete_.end(),
        [](const auto& entry) { return entry.second->deadline.Expired(); });
    if (overdue == incomplete_.end()) return;
    const Gang& gang = *overdue->second;
    const auto reason = std::make_exception_ptr(DeadlineError(OverdueText(gang)));
    const int64_t run_id = gang.run_id;
    const uint64_t group_key = gang.group_key;
    const std::shared_ptr<Conductor> conductor = gang.conductor;
    lock.unlock();
    // The conductor's failure takes the gang off the board; one that failed before, and
    // left this gang, would not.
    if (conductor) conductor->Fail(reason);
    Poison(run_id, group_key, reason);
    lock.lock();
  }
}

}  // namespace jax_ub
