// What goes wrong with a process, and what its peers hear of it, and when.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "platform/error.h"
#include "platform/shared_mapping.h"
#include "platform/unix_socket.h"
#include "processes.h"
#include "transport/cpu/message.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {
namespace {

const std::string kLabel = "matmul_reduce_scatter (ub_name 'fc2_fprop')";
const std::string kPrefix = "CommunicatorError: jax_ub." + kLabel + ": ";
// A death is heard of within this, however long the deadline.
constexpr double kAtOnceS = 2;

WaitReason Reason(double timeout_s = 60) { return {kLabel, 0, timeout_s}; }

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// "rank 1 (process 1, pid 123)", when there is one rank a process.
std::string NameOf(int process, pid_t pid) {
  const std::string number = std::to_string(process);
  return "rank " + number + " (process " + number + ", pid " + std::to_string(pid) +
         ")";
}

// Sleeps for ever: to be killed.
[[noreturn]] void Hang() {
  for (;;) pause();
}

// Throws what a wait throws, and checks that it did so at once.
template <typename Wait>
void AtOnce(const Wait& wait) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    wait();
  } catch (...) {
    CHECK(SecondsSince(begin) < kAtOnceS);
    throw;
  }
}

TEST(AProcessThatIsKilledIsNamedAtOnce) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1, 2});
    ranks->Barrier(0, 0, Reason());
    ++bulletin.word();
    if (process == 1) Hang();
    bulletin.WaitForWord(4);
    AtOnce([&] { ranks->Barrier(0, 1, Reason()); });
  });
  bulletin.WaitForWord(3);
  processes.Signal(1, SIGKILL);
  ++bulletin.word();
  const std::vector<std::string> texts = processes.Join();
  CHECK(Contains(texts[0], kPrefix + NameOf(1, processes.pid(1)) + " died; " +
                               NameOf(0, processes.pid(0)) + " waited for " +
                               NameOf(1, processes.pid(1))));
  CHECK_EQ(texts[1], "[ended by signal 9]");
  CHECK(Contains(texts[2], NameOf(1, processes.pid(1)) + " died; "));
}

TEST(ADeathEndsASleepAndAWaitForASlot) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 0, 1});
    ranks->Barrier(0, 0, Reason());
    ++bulletin.word();
    if (process == 1) Hang();
    AtOnce([&] { ranks->rank(1, 0, 2, 64).Wait(2, 0, Reason()); });
  });
  bulletin.WaitForWord(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  processes.Signal(1, SIGKILL);
  CHECK_EQ(processes.Join()[0],
           kPrefix + "rank 2 (process 1, pid " + std::to_string(processes.pid(1)) +
               ") died; rank 1 (process 0, pid " + std::to_string(processes.pid(0)) +
               ") waited for chunk 0 of rank 2 (process 1, pid " +
               std::to_string(processes.pid(1)) + ")");
}

TEST(TheLeadersDeathEndsAWaitForTheOrder) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    if (process == 0) Hang();
    ++bulletin.word();
    AtOnce([&] { ranks->WaitOrder(0, Reason()); });
  });
  bulletin.WaitForWord(1);
  processes.Signal(0, SIGKILL);
  CHECK(Contains(processes.Join()[1], NameOf(0, processes.pid(0)) + " died; "));
}

// A child of fork keeps the dead process's connections and memory open.
TEST(AProcessThatLeavesAChildBehindIsNamedAtOnce) {
  Bulletin bulletin;
  std::atomic<int>& child = bulletin.word();
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    ranks->Barrier(0, 0, Reason());
    if (process == 1) {
      const pid_t pid = fork();
      if (pid == 0) Hang();
      child = pid;
      Hang();
    }
    CHECK_THROWS(AtOnce([&] { ranks->Barrier(0, 1, Reason()); }), " died; ");
    kill(child, SIGKILL);
  });
  bulletin.WaitForWord(1);
  processes.Signal(1, SIGKILL);
  CHECK_EQ(processes.Join()[0], "");
}

TEST(AChildOfForkHasNoPartInItsParentsCommunicator) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    auto ranks = ConnectAs(process, bulletin, {0, 1});
    ranks->Barrier(0, 0, Reason());
    if (process == 1) {
      const pid_t pid = fork();
      if (pid == 0) {
        ranks.reset();
        _exit(7);
      }
      int status = 0;
      waitpid(pid, &status, 0);
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
    ranks->Barrier(0, 1, Reason());
    CHECK(ranks->poison() == nullptr);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(AProcessThatDiedAfterItsPartDoesNoHarm) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    if (process == 1) {
      ranks->half(1, 0)[0] = std::byte{42};
      // Its part in the barrier, without waiting for the other.
      try {
        ranks->Barrier(0, 0, Reason(0));
      } catch (const DeadlineError&) {
      }
      kill(getpid(), SIGKILL);
    }
    while (!ranks->poison()) std::this_thread::yield();
    ranks->Barrier(0, 0, Reason());
    CHECK(ranks->half(1, 0)[0] == std::byte{42});
    CHECK_THROWS(std::rethrow_exception(ranks->poison()),
                 "CommunicatorError: jax_ub.tp: rank 1 (process 1, pid ");
    AtOnce([&] { ranks->Barrier(1, 0, Reason()); });
  });
  CHECK(Contains(processes.Join()[0], " died; "));
}

TEST(AProcessThatClosedInOrderFailsOnlyWhoWaitsForIt) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1, 2});
    ranks->Barrier(0, 0, Reason());
    if (process == 1) {
      ranks->Close();
      ranks->Close();
      CHECK_THROWS(ranks->WaitOrder(0, Reason()), "closed its communicator");
      ++bulletin.word();
      return;
    }
    bulletin.WaitForWord(1);
    // Both go on without the one that left.
    if (process == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ranks->PostOrder({11, 0});
    } else {
      CHECK_EQ(ranks->WaitOrder(0, Reason()).call_site, 11u);
    }
    CHECK(ranks->poison() == nullptr);
    AtOnce([&] { ranks->Barrier(1, 0, Reason()); });
  });
  const std::vector<std::string> texts = processes.Join();
  CHECK(Contains(texts[0], kPrefix + NameOf(1, processes.pid(1)) +
                               " closed its communicator; " +
                               NameOf(0, processes.pid(0)) + " waited for " +
                               NameOf(1, processes.pid(1))));
  CHECK_EQ(texts[1], "");
  CHECK(Contains(texts[2], "closed its communicator"));
}

TEST(AStoppedProcessIsNamedAtTheDeadlineAndHearsOfIt) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    ranks->Barrier(0, 0, Reason());
    ++bulletin.word();
    if (process == 0) {
      bulletin.WaitForWord(3);
      try {
        ranks->Barrier(0, 1, Reason(0.3));
      } catch (const DeadlineError&) {
        ranks->Poison(std::current_exception());
        ranks->Close();  // at once, though the peer is stopped
        throw;
      }
    }
    // Goes on behind SIGCONT.
    ranks->WaitOrder(0, Reason());
  });
  bulletin.WaitForWord(2);
  processes.Signal(1, SIGSTOP);
  // Until it is stopped, not only told to.
  int status = 0;
  waitpid(processes.pid(1), &status, WUNTRACED);
  ++bulletin.word();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  processes.Signal(1, SIGCONT);
  const std::vector<std::string> texts = processes.Join();
  CHECK_EQ(texts[0], kPrefix + NameOf(0, processes.pid(0)) + " waited 0.3 s for " +
                         NameOf(1, processes.pid(1)) +
                         " (it is stopped). JAX_UB_TIMEOUT_S sets the seconds.");
  CHECK_EQ(texts[1], texts[0]);
}

TEST(AProcessThatNeverComesIsNamedAtTheDeadline) {
  Bulletin bulletin;
  Processes processes(4, [&](int process) {
    if (process >= 2) {
      const Endpoint endpoint;
      bulletin.Publish(process, endpoint.address());
      Hang();
    }
    const auto begin = std::chrono::steady_clock::now();
    try {
      ConnectAs(process, bulletin, {0, 1, 2, 3, 3}, 4096, 0.3);
    } catch (const DeadlineError&) {
      CHECK(SecondsSince(begin) >= 0.3);
      throw;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  processes.Signal(2, SIGKILL);
  processes.Signal(3, SIGKILL);
  const std::vector<std::string> texts = processes.Join();
  for (int p = 0; p < 2; ++p) {
    CHECK(Contains(texts[p], "CommunicatorError: jax_ub.tp: rank "));
    CHECK(Contains(texts[p],
                   " waited 0.3 s for rank 2 (process 2) and ranks 3, 4 (process 3) to "
                   "connect"));
  }
}

TEST(AProcessThatDiesBeforeItConnectsIsNamedAtOnce) {
  for (const int dead : {0, 2}) {
    Bulletin bulletin;
    Processes processes(3, [&](int process) {
      if (process == dead) {
        const Endpoint endpoint;
        bulletin.Publish(process, endpoint.address());
        bulletin.WaitForWord(1);
        Hang();
      }
      AtOnce([&] { ConnectAs(process, bulletin, {0, 1, 2}, 4096, 60); });
    });
    bulletin.Read(3);
    ++bulletin.word();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    processes.Signal(dead, SIGKILL);
    const std::vector<std::string> texts = processes.Join();
    const std::string number = std::to_string(dead);
    for (int p = 0; p < 3; ++p) {
      if (p == dead) continue;
      CHECK(Contains(texts[p], "CommunicatorError: jax_ub.tp: rank " + number +
                                   " (process " + number));
      CHECK(Contains(texts[p], "failed or ended before it connected"));
    }
  }
}

TEST(AnEndpointThatIsGoneIsNamedAtOnce) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    if (process == 0) {
      const Endpoint endpoint;
      bulletin.Publish(process, endpoint.address());
      return;
    }
    bulletin.Read(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    AtOnce([&] { ConnectAs(process, bulletin, {0, 1}, 4096, 60); });
  });
  CHECK_EQ(processes.Join()[1],
           "CommunicatorError: jax_ub.tp: rank 0 (process 0) failed or ended before it "
           "connected");
}

TEST(PoisonReachesAllWithItsReasonAndType) {
  for (const bool by_deadline : {false, true}) {
    Bulletin bulletin;
    Processes processes(4, [&](int process) {
      std::atomic<int> num_heard{0};
      const auto ranks = ConnectAs(process, bulletin, {0, 1, 1, 2, 3});
      ranks->Barrier(0, 0, Reason());
      if (process == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        ranks->Poison(by_deadline
                          ? std::make_exception_ptr(DeadlineError("waited for long"))
                          : std::make_exception_ptr(std::bad_alloc()));
        ranks->Poison(std::make_exception_ptr(CommunicatorError("later")));
        bulletin.WaitForWord(3);
        return;
      }
      ranks->OnPoison([&](const std::exception_ptr&) { ++num_heard; });
      try {
        AtOnce([&] { ranks->Barrier(0, 1, Reason()); });
      } catch (const DeadlineError&) {
        CHECK(by_deadline);
        ++bulletin.word();
        throw;
      } catch (const CommunicatorError&) {
        CHECK(!by_deadline);
        ++bulletin.word();
        // Later calls too, each wait by itself.
        CHECK_THROWS(ranks->Barrier(1, 0, Reason()), "bad_alloc");
        CHECK_THROWS(std::rethrow_exception(ranks->poison()), "bad_alloc");
        ranks->OnPoison([&](const std::exception_ptr&) { num_heard += 10; });
        ranks->Close();
        CHECK_EQ(num_heard.load(), 11);
        throw;
      }
    });
    const std::vector<std::string> texts = processes.Join();
    CHECK_EQ(texts[2], "");
    for (const int p : {0, 1, 3}) {
      CHECK_EQ(texts[p], "CommunicatorError: jax_ub.tp: rank 3 (process 2, pid " +
                             std::to_string(processes.pid(2)) + ") failed: " +
                             (by_deadline ? "waited for long" : "std::bad_alloc"));
    }
  }
}

TEST(ProcessesThatWantDifferentThingsAreToldBoth) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    AtOnce([&] { ConnectAs(process, bulletin, {0, 1}, 4096 * (process + 1), 60); });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(Contains(text, "CommunicatorError: jax_ub.tp: rank 1 (process 1, pid "));
    CHECK(Contains(text, "halves of 8192 bytes"));
    CHECK(Contains(text, "halves of 4096 bytes"));
  }
}

TEST(NobodyWaitsWhenSomeWantDifferentThings) {
  Bulletin bulletin;
  Processes processes(4, [&](int process) {
    AtOnce([&] {
      ConnectAs(process, bulletin, {0, 1, 2, 3}, process == 1 ? 8192 : 4096, 60);
    });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(Contains(text, "CommunicatorError: jax_ub.tp: rank "));
  }
}

// Who does not know the token gets nothing and disturbs nobody.
TEST(AWrongTokenIsRefused) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    if (process == 2) {
      auto peers = bulletin.Read(2);
      peers[0].token ^= 1;
      try {
        AtOnce([&] {
          SharedCommunicator::Connect(std::make_unique<Endpoint>(), {{0, 1}, 1, "tp"},
                                      peers, 4096, 60);
        });
      } catch (...) {
        ++bulletin.word();
        throw;
      }
    }
    if (process == 1) {
      auto endpoint = std::make_unique<Endpoint>();
      bulletin.Publish(1, endpoint->address());
      bulletin.WaitForWord(1);
      SharedCommunicator::Connect(std::move(endpoint), {{0, 1}, 1, "tp"},
                                  bulletin.Read(2), 4096, 20)
          ->Barrier(0, 0, Reason());
      return;
    }
    ConnectAs(0, bulletin, {0, 1})->Barrier(0, 0, Reason());
  });
  const std::vector<std::string> texts = processes.Join();
  CHECK_EQ(texts[0], "");
  CHECK_EQ(texts[1], "");
  CHECK_EQ(texts[2],
           "CommunicatorError: jax_ub.tp: rank 0 (process 0) refused this process, "
           "failed or ended before it connected");
}

TEST(AGroupOfTwoUsersIsRefused) {
  if (geteuid() != 0) return;  // only root can become somebody else
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    if (process == 1 && setuid(65534) != 0) throw std::runtime_error("setuid");
    AtOnce([&] { ConnectAs(process, bulletin, {0, 1}, 4096, 60); });
  });
  const std::vector<std::string> texts = processes.Join();
  CHECK(Contains(texts[0], "is of user 65534, this process of user 0") ||
        Contains(texts[1], "is of user 0, this process of user 65534"));
  for (const std::string& text : texts) CHECK(text != "");
}

// Who knows name and token, but is somebody else, gets nothing and disturbs nobody.
TEST(AnotherUserIsRefused) {
  if (geteuid() != 0) return;  // only root can become somebody else
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    if (process == 2) {
      if (setuid(65534) != 0) throw std::runtime_error("setuid");
      const PeerAddress address = bulletin.Read(1)[0];
      FileDescriptor connection;
      CHECK(Dial(address.address, &connection) == DialResult::kConnected);
      Hello hello;
      hello.token = address.token;
      hello.process = 1;
      const SharedMapping memory = SharedMapping::Create(4096);
      SendHello(connection, hello, memory.descriptor());
      std::vector<pollfd> polled = {{connection.get(), POLLIN, 0}};
      Poll(polled);
      CHECK(ReceiveMessage(connection).arrival == Arrival::kEnd);
      ++bulletin.word();
      return;
    }
    if (process == 1) {
      auto endpoint = std::make_unique<Endpoint>();
      bulletin.Publish(1, endpoint->address());
      bulletin.WaitForWord(1);
      SharedCommunicator::Connect(std::move(endpoint), {{0, 1}, 1, "tp"},
                                  bulletin.Read(2), 4096, 20)
          ->Barrier(0, 0, Reason());
      return;
    }
    ConnectAs(0, bulletin, {0, 1})->Barrier(0, 0, Reason());
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

int CountFiles(const char* folder) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

int CountMappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (Contains(line, "jax_ub")) ++count;
  }
  return count;
}

TEST(NothingIsLeftAfterManyCycles) {
  constexpr int kNumCycles = 200;
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    std::mt19937 random(process);
    const int num_files = CountFiles("/proc/self/fd");
    int num_threads = 0;
    for (int round = 1; round <= kNumCycles; ++round) {
      const auto ranks = ConnectAs(process, bulletin, {0, 1}, 4096, 20, round);
      ranks->Barrier(0, 0, Reason());
      CHECK_EQ(CountMappings(), 2);
      // Sanitizers have threads of their own.
      if (round == 1) num_threads = CountFiles("/proc/self/task");
      CHECK_EQ(CountFiles("/proc/self/task"), num_threads);
      if (random() % 4 == 0) ranks->Poison(std::make_exception_ptr(Error("x")));
      if (random() % 2 == 0) ranks->Close();
    }
    CHECK_EQ(CountFiles("/proc/self/fd"), num_files);
    CHECK_EQ(CountFiles("/proc/self/task"), num_threads - 1);
    CHECK_EQ(CountMappings(), 0);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(NothingIsLeftWhenConnectingFails) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const int num_files = CountFiles("/proc/self/fd");
    for (int round = 1; round <= 20; ++round) {
      CHECK_THROWS(
          ConnectAs(process, bulletin, {0, 1}, 4096 * (process + 1), 20, round),
          "CommunicatorError: jax_ub.tp: ");
      CHECK_EQ(CountFiles("/proc/self/fd"), num_files);
      CHECK_EQ(CountMappings(), 0);
    }
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

// Memory without a name in any file system does not care how large /dev/shm is.
TEST(ATinyDevShmDoesNotMatter) {
  if (geteuid() != 0) return;  // only root can mount
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4k") != 0 ||
        mount("tmpfs", "/tmp", "tmpfs", MS_RDONLY, "size=4k") != 0) {
      std::cout << "     left out: no right to mount" << std::endl;
      return;
    }
    constexpr int64_t kHalfBytes = 8 << 20;
    const auto ranks = ConnectAs(process, bulletin, {0, 1}, kHalfBytes);
    std::memset(ranks->half(process, 0), process + 1, kHalfBytes);
    ranks->Barrier(0, 0, Reason());
    CHECK(ranks->half(1 - process, 0)[kHalfBytes - 1] == std::byte(2 - process));
    CHECK_EQ(CountFiles("/dev/shm"), 0);
    CHECK_EQ(CountFiles("/tmp"), 0);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
