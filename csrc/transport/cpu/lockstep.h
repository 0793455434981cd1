// How processes keep together, through the headers of their shared memory: the order of
// the calls, what each says about a call, barriers. Knows nothing of how the memory
// came to be shared.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/cpu/fate.h"
#include "transport/cpu/layout.h"
#include "transport/transport.h"

namespace jax_ub {

// What a process said about a call.
struct Announcement {
  uint64_t signature = 0;
  std::string text;
};

class Lockstep {
 public:
  // `headers` [process]; process 0 is the leader. Only `own` is written here.
  Lockstep(std::vector<ProcessHeader*> headers, int own, const Fate& fate);

  // SharedCommunicator's header says what these do.
  void PostOrder(const Order& order);
  Order WaitOrder(int64_t call, const WaitReason& reason);
  void Announce(int64_t call, uint64_t signature, std::string_view text);
  Announcement announcement(int process, int64_t call) const;
  void Barrier(int64_t call, int phase, const WaitReason& reason);

  // Makes this process look at its fate again.
  void WakeOwn() { Ring(headers_[own_]->doorbell); }

 private:
  void RingOthers();
  std::optional<Order> PostedOrder(int64_t call) const;
  void PostWhatFits();
  void PostTheRest();
  uint64_t Come(int64_t call, int phase);
  int num_processes() const { return static_cast<int>(headers_.size()); }
  bool IsMissing(int process, uint64_t place) const;
  int FirstMissing(int first, uint64_t place) const;

  const std::vector<ProcessHeader*> headers_;
  const int own_;
  const Fate& fate_;

  std::mutex order_mutex_;  // guards what follows, and the own orders
  std::deque<Order> unposted_;
};

}  // namespace jax_ub
