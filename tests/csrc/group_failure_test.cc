// Tests the propagation of a failure in one process of three; the test acts as its
// peers.
#include "transport/process/group_failure.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "platform/error.h"
#include "slot_transports.h"

namespace jax_ub {
namespace {

std::exception_ptr Boom() { return std::make_exception_ptr(Error("boom")); }

bool WaitUntil(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::After(20);
  while (!condition()) {
    if (deadline.Expired()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

// Process 0, which records the calls of its hooks in order. peers[1] and peers[2] are
// the other ends of its connections.
class Own {
 public:
  explicit Own(std::function<void()> while_waits_end = [] {})
      : while_waits_end_(std::move(while_waits_end)), failure(group, HooksOf()) {
    std::vector<ConnectedPeer> connected_peers(3);
    connected_peers[0].pid = getpid();
    for (const int p : {1, 2}) {
      Ends ends;
      connected_peers[p].connection = std::move(ends.one);
      connected_peers[p].pid = 10 + p;
      peers[p] = std::move(ends.other);
    }
    failure.Watch(connected_peers);
  }

  std::string log() {
    std::lock_guard lock(mutex_);
    return log_;
  }
  bool HasLogged(const std::string& text) {
    return WaitUntil([&] { return log() == text; });
  }

  const std::string name = "rank 0 (process 0, pid " + std::to_string(getpid()) + ")";
  FileDescriptor peers[3];
  const ProcessGroup group{{.process_of_rank = {0, 1, 2}, .process = 0, .name = "tp"}};

 private:
  GroupFailure::Hooks HooksOf() {
    return {.fail_waits =
                [this](const auto& poison) {
                  Log("end(" + check::TextOf(poison) + ")");
                  while_waits_end_();
                },
            .set_lost =
                [this](int process, const auto& how) {
                  Log("lost(" + std::to_string(process) + how + ")");
                  while_waits_end_();
                },
            .on_signature =
                [this](const auto& news) { Log("received(" + news.text + ")"); }};
  }
  void Log(const std::string& text) {
    std::lock_guard lock(mutex_);
    log_ += text;
  }

  const std::function<void()> while_waits_end_;
  std::mutex mutex_;
  std::string log_;

 public:
  GroupFailure failure;  // the last: its thread uses what is above
};

void CheckReceives(const FileDescriptor& peer,
                   MessageKind kind,
                   const std::string& text) {
  const Message received = Await(peer);
  CHECK(received.arrival == Arrival::kMessage);
  CHECK(received.kind == kind);
  CHECK_EQ(received.body, text);
}

bool ReceivesNothing(const FileDescriptor& peer) {
  return ReceiveMessage(peer).arrival == Arrival::kNothing;
}

TEST(PeersAreNotifiedBeforeLocalWaitsFailWithTheReason) {
  std::thread waiter;
  Own* all = nullptr;
  Own own([&] {
    for (const int p : {1, 2}) {
      CheckReceives(all->peers[p], MessageKind::kPoison,
                    "CommunicatorError: jax_ub.tp: " + all->name + " failed: boom");
    }
    waiter =
        std::thread([&] { CHECK_EQ(check::TextOf(all->failure.reason()), "boom"); });
  });
  all = &own;
  own.failure.Poison(Boom());
  waiter.join();
}

TEST(TheFirstPoisonHoldsAndKeepsItsTextAndType) {
  Own own;
  const std::string text = "CommunicatorError: jax_ub.tp: rank 1 waited";
  SendMessage(own.peers[1], MessageKind::kDeadlinePoison, text);
  CHECK(own.HasLogged("end(" + text + ")"));
  own.failure.Poison(Boom());
  for (const int p : {1, 2}) {
    CheckReceives(own.peers[p], MessageKind::kDeadlinePoison, text);
    CHECK(ReceivesNothing(own.peers[p]));
  }
  CHECK(PoisonMessageOf(own.failure.reason()).kind == MessageKind::kDeadlinePoison);
  CHECK_EQ(own.log(), "end(" + text + ")");
}

TEST(ADeathIsForwardedOnceAndRemainsTheReasonAfterPoison) {
  const std::string reason =
      "CommunicatorError: jax_ub.tp: rank 1 (process 1, pid 11) died";
  std::atomic<const FileDescriptor*> first_receiver{nullptr};
  Own own([&] {
    const FileDescriptor* const peer = first_receiver.exchange(nullptr);
    if (peer != nullptr) CheckReceives(*peer, MessageKind::kDeathNotice, "1");
  });
  first_receiver = &own.peers[2];
  own.peers[1].reset();
  CHECK(WaitUntil([&] { return own.failure.reason() != nullptr; }));
  CHECK_EQ(check::TextOf(own.failure.reason()), reason);
  // Death notices that are repeated or invalid have no effect.
  for (const char* who : {"1", "0", "3", "-1"}) {
    SendMessage(own.peers[2], MessageKind::kDeathNotice, who);
  }
  SendMessage(own.peers[2], MessageKind::kSignature, "behind");
  CHECK(own.HasLogged("lost(1died)received(behind)"));
  CHECK(ReceivesNothing(own.peers[2]));
  // Only poison ends a process that waits for another process than the dead one.
  own.failure.Poison(Boom());
  CHECK(own.HasLogged("lost(1died)received(behind)end(boom)"));
  CheckReceives(own.peers[2], MessageKind::kPoison,
                "CommunicatorError: jax_ub.tp: " + own.name + " failed: boom");
  CHECK_EQ(check::TextOf(own.failure.reason()), reason);
}

TEST(ADeathNoticeIsForwardedAndTheDeathIsNot) {
  Own own;
  SendMessage(own.peers[2], MessageKind::kDeathNotice, "1");
  CHECK(own.HasLogged("lost(1died)"));
  own.peers[1].reset();
  SendMessage(own.peers[2], MessageKind::kSignature, "behind");
  CHECK(own.HasLogged("lost(1died)received(behind)"));
  CheckReceives(own.peers[2], MessageKind::kDeathNotice, "1");
  CHECK(ReceivesNothing(own.peers[2]));
}

TEST(ACloseIsNoFailure) {
  Own own;
  SendMessage(own.peers[1], MessageKind::kClose, "");
  CHECK(own.HasLogged("lost(1)"));
  own.peers[1].reset();
  SendMessage(own.peers[2], MessageKind::kDeathNotice, "1");
  SendMessage(own.peers[2], MessageKind::kSignature, "behind");
  CHECK(own.HasLogged("lost(1)received(behind)"));
  CHECK(!own.failure.reason());
  CHECK(ReceivesNothing(own.peers[2]));
}

TEST(APeerThatClosedDuringTheHandshakeIsLost) {
  const ProcessGroup group({.process_of_rank = {0, 1}, .process = 0, .name = "tp"});
  std::string log;
  GroupFailure failure(group, {.fail_waits = [](const auto&) {},
                               .set_lost =
                                   [&](int process, const auto& how) {
                                     log += std::to_string(process) + how;
                                   },
                               .on_signature = {}});
  Ends ends;
  std::vector<ConnectedPeer> connected_peers(2);
  connected_peers[1].connection = std::move(ends.one);
  connected_peers[1].has_closed = true;
  failure.Watch(connected_peers);
  failure.Poison(Boom());
  CHECK_EQ(log, "1");
  CHECK(ReceivesNothing(ends.other));
}

TEST(TheCallbackIsCalledOnceWithoutALock) {
  Own own;
  int num_calls = 0;
  own.failure.OnReason([&](const std::exception_ptr& reason) {
    ++num_calls;
    CHECK_EQ(check::TextOf(reason), "boom");
    CHECK_EQ(check::TextOf(own.failure.reason()), "boom");
    own.failure.Poison(std::make_exception_ptr(Error("again")));
    own.failure.OnReason([&](const std::exception_ptr&) { ++num_calls; });
  });
  own.failure.Poison(Boom());
  CHECK_EQ(num_calls, 2);
  own.failure.Close();
  CHECK_EQ(num_calls, 2);
}

TEST(ClosingSendsCloseOnceAndFailsWaits) {
  for (const bool says_before : {false, true}) {
    Own own;
    const std::string reason =
        "CommunicatorError: jax_ub.tp: " + own.name + " closed its communicator";
    if (says_before) {
      own.failure.SendClose();
      CHECK(!own.failure.reason());
    }
    own.failure.Close();
    own.failure.Close();
    own.failure.Poison(Boom());
    CHECK_EQ(own.log(), "end(" + reason + ")");
    CHECK_EQ(check::TextOf(own.failure.reason()), reason);
    for (const int p : {1, 2}) {
      CheckReceives(own.peers[p], MessageKind::kClose, "");
      CHECK(Await(own.peers[p]).arrival == Arrival::kEnd);
    }
  }
}

TEST(AForkedChildSendsNothing) {
  Own own;
  const pid_t child = fork();
  if (child == 0) {
    own.failure.Poison(Boom());
    own.failure.Close();
    const bool is_untouched = own.failure.IsForkedChild() && own.log().empty();
    own.failure.~GroupFailure();
    _exit(is_untouched ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(!own.failure.reason());
  own.failure.Broadcast(MessageKind::kSignature, "here");
  for (const int p : {1, 2})
    CheckReceives(own.peers[p], MessageKind::kSignature, "here");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
