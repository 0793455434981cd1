// What processes say to each other while their connections are watched.
#include "transport/process/peers.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "ends.h"
#include "no_thread_starts.h"
#include "transport/process/group.h"
#include "transport/process/message.h"

namespace jax_ub {
namespace {

// More than a connection holds.
constexpr int kMany = 2000;

std::string Statement(int number) {
  return std::to_string(number) + std::string(300, '.');
}

std::vector<Peer> PeerAt(FileDescriptor connection) {
  std::vector<Peer> peers;
  peers.push_back({.process = 1, .connection = std::move(connection), .pid = 0});
  return peers;
}

Group Own() { return Group({.process_of_rank = {0, 1}, .process = 0, .name = "tp"}); }

// A process that is stopped, or whose cores are busy, reads late.
TEST(APeerThatReadsLateHearsAllInItsOrder) {
  Ends ends;
  Peers peers(PeerAt(std::move(ends.one)));
  peers.Watch(Own(), [](const PeerNews&) {});
  for (int i = 0; i < kMany; ++i) peers.Say(MessageKind::kStatement, Statement(i));
  peers.Say(MessageKind::kGoodbye, "");
  int num_heard = 0;
  for (; num_heard < kMany; ++num_heard) {
    if (Await(ends.other).body != Statement(num_heard)) break;
  }
  CHECK_EQ(num_heard, kMany);
  const Message last = Await(ends.other);
  CHECK(last.arrival == Arrival::kMessage && last.kind == MessageKind::kGoodbye);
}

TEST(PeersThatSayMuchAtOnceHearEachOther) {
  Ends ends;
  std::atomic<int> num_heard{0};
  const auto count = [&](const PeerNews& news) {
    if (news.kind == MessageKind::kStatement) ++num_heard;
  };
  Peers one(PeerAt(std::move(ends.one)));
  Peers other(PeerAt(std::move(ends.other)));
  one.Watch(Own(), count);
  other.Watch(Own(), count);
  const auto say = [](Peers& peers) {
    for (int i = 0; i < kMany; ++i) peers.Say(MessageKind::kStatement, Statement(i));
  };
  std::thread speaker([&] { say(one); });
  say(other);
  speaker.join();
  const Deadline deadline = Deadline::After(60);
  while (num_heard < 2 * kMany && !deadline.Expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK_EQ(num_heard.load(), 2 * kMany);
}

TEST(APeerThatNeverReadsHindersNobody) {
  for (const bool leaves : {false, true}) {
    Ends ends;
    std::atomic<int> num_lost{0};
    Peers peers(PeerAt(std::move(ends.one)));
    peers.Watch(Own(), [&](const PeerNews& news) {
      num_lost += news.kind == MessageKind::kObituary;
    });
    for (int i = 0; i < kMany; ++i) peers.Say(MessageKind::kStatement, Statement(i));
    if (leaves) {
      ends.other.reset();
      const Deadline deadline = Deadline::After(20);
      while (num_lost == 0 && !deadline.Expired()) std::this_thread::yield();
    }
    peers.Say(MessageKind::kGoodbye, "");
    peers.Close();
    CHECK_EQ(num_lost.load(), leaves ? 1 : 0);
  }
}

TEST(WhereNoThreadStartsThePeersAreToldWhy) {
  Ends ends;
  Peers peers(PeerAt(std::move(ends.one)));
  {
    const NoThreadStarts limit;
    CHECK_THROWS(peers.Watch(Own(), [](const PeerNews&) {}),
                 "CommunicatorError: jax_ub.tp: rank 0 (process 0, pid " +
                     std::to_string(getpid()) + ") failed: a thread cannot start: ");
  }
  const Message told = Await(ends.other);
  CHECK(told.kind == MessageKind::kPoison);
  CHECK(told.body.find(" failed: a thread cannot start: ") != std::string::npos);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
