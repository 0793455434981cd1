#include "transport/cpu/group_control.h"

#include <algorithm>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

// Returns the generation of a barrier: a number that identifies the barrier and
// increases from each barrier to the next.
//
// Generations begin at 1. ProcessControlBlock::barrier_generation has the generation of
// the last barrier that a process has reached, or 0 before the first barrier.
uint64_t BarrierGeneration(int64_t call, int phase) {
  return static_cast<uint64_t>(call + 1) * GroupControl::kNumPhases +
         static_cast<uint64_t>(phase) + 1;
}

// Returns how many calls a process has begun, given the generation of the last barrier
// that it has reached. The process does not read the call log entries of these calls
// again, so they may be overwritten.
uint64_t NumCallsStarted(uint64_t generation) {
  return generation == 0 ? 0 : (generation - 1) / GroupControl::kNumPhases;
}

}  // namespace

GroupControl::GroupControl(std::vector<ProcessControlBlock*> headers,
                           int own,
                           const PeerStatus& peer_status)
    : headers_(std::move(headers)), own_(own), peer_status_(peer_status) {}

void GroupControl::RingOthers() {
  for (int p = 0; p < num_processes(); ++p) {
    if (p != own_) Ring(headers_[p]->doorbell);
  }
}

void GroupControl::AppendToCallLog(const CallLogEntry& entry) {
  std::lock_guard lock(call_log_mutex_);
  unposted_.push_back(entry);
  AppendPending();
}

// Moves queued entries to the call log until the log is full. The entry of call n +
// kCallLogSize overwrites the entry of call n. It is written only after every process
// has begun call n and has therefore read the entry of call n. For this, a process
// reads an entry before it stores the generation of the call's barrier, and this
// function loads the generations before it writes.
void GroupControl::AppendPending() {
  ProcessControlBlock& own = *headers_[own_];
  uint64_t num_read = UINT64_MAX;
  for (const ProcessControlBlock* header : headers_) {
    num_read = std::min(num_read, NumCallsStarted(header->barrier_generation.load()));
  }
  bool posted = false;
  uint64_t next = own.num_posted.load();
  for (; !unposted_.empty() && next < num_read + ProcessControlBlock::kCallLogSize;
       ++next) {
    own.call_log[next % ProcessControlBlock::kCallLogSize] = unposted_.front();
    unposted_.pop_front();
    posted = true;
  }
  if (!posted) return;
  own.num_posted.store(next);  // the release that makes the entries visible
  RingOthers();
}

std::optional<CallLogEntry> GroupControl::FindLogEntry(int64_t call) const {
  const ProcessControlBlock& leader = *headers_[0];
  const auto index = static_cast<uint64_t>(call);
  if (leader.num_posted.load() <= index) return std::nullopt;
  return leader.call_log[index % ProcessControlBlock::kCallLogSize];
}

CallLogEntry GroupControl::WaitForLogEntry(int64_t call, const WaitReason& reason) {
  std::optional<CallLogEntry> entry;
  peer_status_.Await(
      headers_[own_]->doorbell, reason,
      [&] { return (entry = FindLogEntry(call)).has_value(); },
      [&] { return peer_status_.IsLost(0) ? 0 : PeerStatus::kNoProcess; },
      [&] {
        return WaitDescription{peer_status_.name(own_),
                               peer_status_.name(0) + peer_status_.DescribeState(0) +
                                   " to say which call is next"};
      });
  return *entry;
}

// Each process has two records, for even and odd calls. Peers read the record of `call`
// before Barrier(call + 1, 0), and the process writes to the same record again in
// call + 2, after this barrier. So no record is overwritten while a peer reads it.
void GroupControl::PublishSignature(int64_t call,
                                    uint64_t signature,
                                    std::string_view text) {
  SignatureRecord& record = headers_[own_]->signatures[call % 2];
  record.signature = signature;
  record.text.Store(text);
}

CallSignature GroupControl::call_signature(int process, int64_t call) const {
  const SignatureRecord& record = headers_[process]->signatures[call % 2];
  return {record.signature, record.text.Load()};
}

bool GroupControl::has_arrived(int process, int64_t call) const {
  return !IsMissing(process, BarrierGeneration(call, 0));
}

// Peers read the text only while this process is missing at the barrier of `call`. This
// process writes the text for a later call only after it has arrived there. So it does
// not overwrite the text while a peer reads it.
void GroupControl::PublishSubmitted(int64_t call, std::string_view text) {
  ProcessControlBlock& own = *headers_[own_];
  const auto number = static_cast<uint64_t>(call) + 1;
  if (own.num_unmatched.load() == number) return;
  own.submitted.Store(text);
  own.num_unmatched.store(number);  // the release that makes the text visible
}

std::string GroupControl::DescribeSubmitted(int process, int64_t call) const {
  const ProcessControlBlock& header = *headers_[process];
  if (header.num_unmatched.load() != static_cast<uint64_t>(call) + 1) return "";
  return " (it has submitted other calls: " + header.submitted.Load() +
         "; run the same program with the same control flow in every process)";
}

// Publishes that this process has arrived. The store of `barrier_generation` comes
// after all earlier reads and writes of this process; the loads in IsMissing acquire
// the writes of the peers.
//
// Only the last process to arrive wakes the others, because waking is a system call.
// This is sufficient: all processes reach the same barriers in the same order, so all
// sleeping processes wait for this `generation`. The stores and loads of
// `barrier_generation` are sequentially consistent, so the last process sees that all
// others have arrived. If the last process dies before it wakes the others, the
// notification of its death wakes them.
uint64_t GroupControl::Arrive(int64_t call, int phase) {
  if (phase < 0 || phase >= kNumPhases) {
    throw Error("jax_ub: a call has no barrier " + std::to_string(phase));
  }
  // After a failure, a process must not arrive at a barrier, because the others would
  // continue without its data.
  peer_status_.ThrowIfPoisoned();
  const uint64_t generation = BarrierGeneration(call, phase);
  headers_[own_]->barrier_generation.store(generation);
  if (FirstMissing(0, generation) == num_processes()) RingOthers();
  return generation;
}

bool GroupControl::IsMissing(int process, uint64_t generation) const {
  return static_cast<int64_t>(headers_[process]->barrier_generation.load() -
                              generation) < 0;
}

int GroupControl::FirstMissing(int first, uint64_t generation) const {
  while (first < num_processes() && !IsMissing(first, generation)) ++first;
  return first;
}

void GroupControl::Barrier(int64_t call, int phase, const WaitReason& reason) {
  const uint64_t generation = Arrive(call, phase);
  int first = 0;
  peer_status_.Await(
      headers_[own_]->doorbell, reason,
      [&] { return (first = FirstMissing(first, generation)) == num_processes(); },
      [&] {
        for (int p = first; p < num_processes(); ++p) {
          // IsLost must be called before IsMissing. A process that arrives and then
          // exits is lost, but not missing. If IsMissing were called first, a process
          // that arrives and exits between the two calls would be reported as lost.
          if (peer_status_.IsLost(p) && IsMissing(p, generation)) return p;
        }
        return PeerStatus::kNoProcess;
      },
      [&] {
        std::string missing;
        for (int p = first; p < num_processes(); ++p) {
          if (!IsMissing(p, generation)) continue;
          missing += missing.empty() ? "" : " and ";
          missing += peer_status_.name(p) + peer_status_.DescribeState(p);
          if (phase == 0) missing += DescribeSubmitted(p, call);
        }
        return WaitDescription{peer_status_.name(own_), missing};
      });
  AppendRemaining();
}

// Moves queued entries to the call log if it has room. Called after each barrier,
// because an entry may be overwritten once all processes have begun its call.
void GroupControl::AppendRemaining() {
  if (own_ != 0) return;
  std::lock_guard lock(call_log_mutex_);
  if (!unposted_.empty()) AppendPending();
}

}  // namespace jax_ub
