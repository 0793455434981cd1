// Tests messages between processes whose connections are watched.
#include "transport/process/peer_connections.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "no_thread_starts.h"
#include "slot_transports.h"
#include "transport/process/message.h"
#include "transport/process/process_group.h"

namespace jax_ub {
namespace {

void IgnoreFailure(const std::exception_ptr&) {}

// The number of messages, which exceeds the buffer of a connection.
constexpr int kMany = 2000;

std::string SignatureText(int number) {
  return std::to_string(number) + std::string(300, '.');
}

std::vector<Peer> PeerAt(FileDescriptor connection) {
  std::vector<Peer> peers;
  peers.push_back({.process = 1, .connection = std::move(connection), .pid = 0});
  return peers;
}

ProcessGroup Own() {
  return ProcessGroup({.process_of_rank = {0, 1}, .process = 0, .name = "tp"});
}

// A process that is stopped, or on a busy machine, reads messages late.
TEST(APeerThatReadsLateReceivesAllInOrder) {
  Ends ends;
  PeerConnections peers(PeerAt(std::move(ends.one)));
  peers.Watch(Own(), [](const PeerEvent&) {}, IgnoreFailure);
  for (int i = 0; i < kMany; ++i)
    peers.Broadcast(MessageKind::kSignature, SignatureText(i));
  peers.Broadcast(MessageKind::kClose, "");
  int num_notified = 0;
  for (; num_notified < kMany; ++num_notified) {
    if (Await(ends.other).body != SignatureText(num_notified)) break;
  }
  CHECK_EQ(num_notified, kMany);
  const Message last = Await(ends.other);
  CHECK(last.arrival == Arrival::kMessage && last.kind == MessageKind::kClose);
}

TEST(PeersThatSendMuchAtOnceReceiveEverything) {
  Ends ends;
  std::atomic<int> num_notified{0};
  const auto count = [&](const PeerEvent& news) {
    if (news.kind == MessageKind::kSignature) ++num_notified;
  };
  PeerConnections one(PeerAt(std::move(ends.one)));
  PeerConnections other(PeerAt(std::move(ends.other)));
  one.Watch(Own(), count, IgnoreFailure);
  other.Watch(Own(), count, IgnoreFailure);
  const auto say = [](PeerConnections& peers) {
    for (int i = 0; i < kMany; ++i)
      peers.Broadcast(MessageKind::kSignature, SignatureText(i));
  };
  std::thread speaker([&] { say(one); });
  say(other);
  speaker.join();
  const Deadline deadline = Deadline::After(60);
  while (num_notified < 2 * kMany && !deadline.Expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK_EQ(num_notified.load(), 2 * kMany);
}

TEST(APeerThatNeverReadsBlocksNoOtherPeer) {
  for (const bool leaves : {false, true}) {
    Ends ends;
    std::atomic<int> num_lost{0};
    PeerConnections peers(PeerAt(std::move(ends.one)));
    peers.Watch(
        Own(),
        [&](const PeerEvent& news) {
          num_lost += news.kind == MessageKind::kDeathNotice;
        },
        IgnoreFailure);
    for (int i = 0; i < kMany; ++i)
      peers.Broadcast(MessageKind::kSignature, SignatureText(i));
    if (leaves) {
      ends.other.reset();
      const Deadline deadline = Deadline::After(20);
      while (num_lost == 0 && !deadline.Expired()) std::this_thread::yield();
    }
    peers.Broadcast(MessageKind::kClose, "");
    peers.Close();
    CHECK_EQ(num_lost.load(), leaves ? 1 : 0);
  }
}

TEST(IfNoThreadStartsThePeersReceiveTheReason) {
  Ends ends;
  PeerConnections peers(PeerAt(std::move(ends.one)));
  {
    const NoThreadStarts limit;
    CHECK_THROWS(peers.Watch(
                     Own(), [](const PeerEvent&) {}, IgnoreFailure),
                 "CommunicatorError: jax_ub.tp: rank 0 (process 0, pid " +
                     std::to_string(getpid()) + ") failed: a thread cannot start: ");
  }
  const Message received = Await(ends.other);
  CHECK(received.kind == MessageKind::kPoison);
  CHECK(received.body.find(" failed: a thread cannot start: ") != std::string::npos);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
