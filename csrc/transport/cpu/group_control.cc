#include "transport/cpu/group_control.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr int kNumPhases = 16;

// Barriers in the order in which they are reached; 0 is before the first.
uint64_t Place(int64_t call, int phase) {
  return static_cast<uint64_t>(call) * kNumPhases + static_cast<uint64_t>(phase) + 1;
}

// The calls below this one were ended, or their order at least read.
uint64_t CallsBegun(uint64_t place) {
  return place == 0 ? 0 : (place - 1) / kNumPhases + 1;
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

void GroupControl::AppendToCallLog(const CallLogEntry& order) {
  std::lock_guard lock(order_mutex_);
  unposted_.push_back(order);
  AppendPending();
}

// An entry is overwritten when every process has begun the call it was for, and so has
// read it: progress is stored behind that read and loaded before the entry is written.
void GroupControl::AppendPending() {
  ProcessControlBlock& own = *headers_[own_];
  uint64_t num_read = UINT64_MAX;
  for (const ProcessControlBlock* header : headers_) {
    num_read = std::min(num_read, CallsBegun(header->progress.load()));
  }
  bool posted = false;
  uint64_t next = own.num_posted.load();
  for (; !unposted_.empty() && next < num_read + ProcessControlBlock::kNumOrders;
       ++next) {
    own.orders[next % ProcessControlBlock::kNumOrders] = unposted_.front();
    unposted_.pop_front();
    posted = true;
  }
  if (!posted) return;
  own.num_posted.store(next);  // releases the entries
  RingOthers();
}

std::optional<CallLogEntry> GroupControl::FindLogEntry(int64_t call) const {
  const ProcessControlBlock& leader = *headers_[0];
  const auto place = static_cast<uint64_t>(call);
  if (leader.num_posted.load() <= place) return std::nullopt;
  return leader.orders[place % ProcessControlBlock::kNumOrders];
}

CallLogEntry GroupControl::WaitForLogEntry(int64_t call, const WaitReason& reason) {
  std::optional<CallLogEntry> order;
  peer_status_.Await(
      headers_[own_]->doorbell, reason,
      [&] { return (order = FindLogEntry(call)).has_value(); },
      [&] { return peer_status_.IsLost(0) ? 0 : PeerStatus::kNoProcess; },
      [&] {
        return WaitDescription{peer_status_.name(own_),
                               peer_status_.name(0) + peer_status_.DescribeState(0) +
                                   " to say which call is next"};
      });
  return *order;
}

// Read by the others between their Barrier(call, 0) and Barrier(call + 1, 0), which is
// before this process comes to call + 2, the next that writes here.
void GroupControl::PublishSignature(int64_t call,
                                    uint64_t signature,
                                    std::string_view text) {
  SignatureRecord& record = headers_[own_]->signatures[call % 2];
  record.signature = signature;
  record.size_bytes = std::min(text.size(), SignatureRecord::kMaxBytes);
  std::memcpy(record.text, text.data(), record.size_bytes);
}

CallSignature GroupControl::call_signature(int process, int64_t call) const {
  const SignatureRecord& record = headers_[process]->signatures[call % 2];
  const uint64_t size = record.size_bytes;
  return {record.signature,
          {record.text, std::min<uint64_t>(size, SignatureRecord::kMaxBytes)}};
}

// The store releases all that this process wrote, and comes behind all it read; the
// loads of IsMissing acquire what its peers wrote.
//
// Only the last process to arrive wakes the others: 15 system calls for a barrier of 16
// processes, where every arrival would take as many. All processes come to the same
// barriers in the same order, so whoever waits here waits for `place`. Stores and loads
// of progress are sequentially consistent: the process whose store is the last one sees
// all of them. If it dies before it rings, the notice of its death wakes the others.
uint64_t GroupControl::Arrive(int64_t call, int phase) {
  if (phase < 0 || phase >= kNumPhases) {
    throw Error("jax_ub: a call has no barrier " + std::to_string(phase));
  }
  // A process that has failed does not come: the others would go on without its part.
  peer_status_.ThrowIfPoisoned();
  const uint64_t place = Place(call, phase);
  headers_[own_]->progress.store(place);
  if (FirstMissing(0, place) == num_processes()) RingOthers();
  return place;
}

bool GroupControl::IsMissing(int process, uint64_t place) const {
  return static_cast<int64_t>(headers_[process]->progress.load() - place) < 0;
}

int GroupControl::FirstMissing(int first, uint64_t place) const {
  while (first < num_processes() && !IsMissing(first, place)) ++first;
  return first;
}

void GroupControl::Barrier(int64_t call, int phase, const WaitReason& reason) {
  const uint64_t place = Arrive(call, phase);
  int first = 0;
  peer_status_.Await(
      headers_[own_]->doorbell, reason,
      [&] { return (first = FirstMissing(first, place)) == num_processes(); },
      [&] {
        for (int p = first; p < num_processes(); ++p) {
          // Gone before it is looked for again: what it stored before it left counts.
          if (peer_status_.IsLost(p) && IsMissing(p, place)) return p;
        }
        return PeerStatus::kNoProcess;
      },
      [&] {
        std::string missing;
        for (int p = first; p < num_processes(); ++p) {
          if (!IsMissing(p, place)) continue;
          missing += missing.empty() ? "" : " and ";
          missing += peer_status_.name(p) + peer_status_.DescribeState(p);
        }
        return WaitDescription{peer_status_.name(own_), missing};
      });
  AppendRemaining();
}

// The others have begun one more call.
void GroupControl::AppendRemaining() {
  if (own_ != 0) return;
  std::lock_guard lock(order_mutex_);
  if (!unposted_.empty()) AppendPending();
}

}  // namespace jax_ub
