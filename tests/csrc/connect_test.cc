// Tests connections of processes: how they find each other, which processes are
// accepted, and what is left afterwards.
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
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
#include "platform/mapping.h"
#include "platform/unix_socket.h"
#include "processes.h"
#include "transport/cpu/shared_memory.h"
#include "transport/process/handshake.h"
#include "transport/process/message.h"
#include "transport/process/setup_exchange.h"

// The number of next calls of sendmsg that fail because the kernel lacks memory.
static std::atomic<int> num_failing_sends{0};

// Replaces the C library's function in this program.
extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  if (num_failing_sends > 0) {
    --num_failing_sends;
    errno = ENOBUFS;
    return -1;
  }
  return syscall(SYS_sendmsg, socket, message, flags);
}

namespace jax_ub {
namespace {

const std::string kLabel = "all_gather";

WaitReason Reason() { return {kLabel, 0, 60}; }

TEST(AMissingProcessIsNamedAtTheDeadline) {
  Bulletin bulletin;
  Processes processes(4, [&](int process) {
    if (process >= 2) {
      const Endpoint endpoint;
      bulletin.Publish(process, endpoint.address());
      Hang();
    }
    const auto begin = std::chrono::steady_clock::now();
    try {
      ConnectAs(process, bulletin, {0, 1, 2, 3, 3}, 4096, 1);
    } catch (const std::exception& error) {
      CHECK(dynamic_cast<const DeadlineError*>(&error) != nullptr);
      CHECK(SecondsSince(begin) >= 1);
      ++bulletin.word();
      throw;
    }
  });
  bulletin.WaitForWord(2);
  processes.Signal(2, SIGKILL);
  processes.Signal(3, SIGKILL);
  const std::vector<std::string> texts = processes.Join();
  for (int p = 0; p < 2; ++p) {
    CHECK(Contains(texts[p], "CommunicatorError: jax_ub.tp: rank "));
    CHECK(Contains(texts[p],
                   " waited 1 s for rank 2 (process 2) and ranks 3, 4 (process 3) to "
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
      CHECK(Contains(texts[p], "failed or exited before it connected"));
    }
  }
}

TEST(AClosedEndpointIsNamedAtOnce) {
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
  const std::string text = processes.Join()[1];
  CHECK(text.starts_with("CommunicatorError: jax_ub.tp: rank 0 (process 0) "));
  CHECK(text.ends_with("failed or exited before it connected"));
}

TEST(ProcessesWithDifferentSettingsNameBoth) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    AtOnce([&] { ConnectAs(process, bulletin, {0, 1}, 4096 * (process + 1), 60); });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(Contains(text, "CommunicatorError: jax_ub.tp: rank 1 (process 1, pid "));
    CHECK(Contains(text, "buffers of 8192 bytes"));
    CHECK(Contains(text, "buffers of 4096 bytes"));
  }
}

TEST(NoProcessWaitsIfSettingsDiffer) {
  Bulletin bulletin;
  Processes processes(4, [&](int process) {
    AtOnce([&] {
      ConnectAs(process, bulletin, {0, 1, 2, 3}, process == 1 ? 8192 : 4096, 60);
    });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(Contains(text, "CommunicatorError: jax_ub.tp: rank "));
    CHECK(Contains(text, "buffers of 8192 bytes"));
    CHECK(Contains(text, "buffers of 4096 bytes"));
  }
}

// The last process finds no listener of the process that has failed, but receives the
// reason that it reported.
TEST(TheLastProcessToConnectNamesTheProcessThatDied) {
  for (const int first : {0, 1}) {
    Bulletin bulletin;
    Processes processes(3, [&](int process) {
      auto endpoint = std::make_unique<Endpoint>();
      bulletin.Publish(process, endpoint->address());
      const auto peers = bulletin.Read(3);
      if (process == 2) return;
      if (process != first) bulletin.WaitForWord(1);
      try {
        AtOnce([&] {
          SharedMemoryCommunicator::Connect(
              std::move(endpoint), {{0, 1, 2}, process, "tp"}, peers, 4096, 60);
        });
      } catch (...) {
        ++bulletin.word();
        throw;
      }
    });
    const std::vector<std::string> texts = processes.Join();
    for (const int p : {0, 1}) {
      CHECK(Contains(texts[p], "CommunicatorError: jax_ub.tp: rank 2 (process 2"));
      CHECK(Contains(texts[p], "failed or exited before it connected"));
    }
  }
}

// A process without the token receives nothing, and does not disturb the others.
TEST(AWrongTokenIsRefused) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    if (process == 2) {
      auto peers = bulletin.Read(2);
      peers[0].token ^= 1;
      try {
        AtOnce([&] {
          SharedMemoryCommunicator::Connect(std::make_unique<Endpoint>(),
                                            {{0, 1}, 1, "tp"}, peers, 4096, 60);
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
      SharedMemoryCommunicator::Connect(std::move(endpoint), {{0, 1}, 1, "tp"},
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
           "CommunicatorError: jax_ub.tp: rank 0 (process 0) rejected this process, "
           "failed or exited before it connected");
}

constexpr uid_t kSomebodyElse = 65534;

// Returns whether the test can change its user: this requires root, and a sandbox with
// more than one user.
bool CanChangeUser() {
  const pid_t child = fork();
  if (child == 0) _exit(setuid(kSomebodyElse) == 0 ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  if (status != 0) std::cout << "     left out: no second user" << std::endl;
  return status == 0;
}

TEST(AGroupOfTwoUsersIsRefused) {
  if (!CanChangeUser()) return;
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    if (process == 1 && setuid(kSomebodyElse) != 0) throw std::runtime_error("setuid");
    AtOnce([&] { ConnectAs(process, bulletin, {0, 1}, 4096, 60); });
  });
  const std::vector<std::string> texts = processes.Join();
  CHECK(Contains(texts[0], "is of user 65534, this process of user 0") ||
        Contains(texts[1], "is of user 0, this process of user 65534"));
  for (const std::string& text : texts) CHECK(text != "");
}

// Another user's process with the name and the token receives nothing, and does not
// disturb the others.
TEST(AnotherUserIsRefused) {
  if (!CanChangeUser()) return;
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    if (process == 2) {
      if (setuid(kSomebodyElse) != 0) throw std::runtime_error("setuid");
      const PeerAddress address = bulletin.Read(1)[0];
      FileDescriptor connection;
      CHECK(Dial(address.address, &connection) == DialResult::kConnected);
      Hello hello;
      hello.token = address.token;
      hello.process = 1;
      const SharedMapping memory = SharedMapping::Create(4096);
      SendHelloUntil(Deadline::After(0), connection, hello, memory.descriptor());
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
      SharedMemoryCommunicator::Connect(std::move(endpoint), {{0, 1}, 1, "tp"},
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
    if (Contains(line, "memfd:jax_ub")) ++count;
  }
  return count;
}

// Waits for the number of threads, since a joined thread remains listed for a moment.
void CheckNumThreads(int wanted) {
  const auto begin = std::chrono::steady_clock::now();
  while (CountFiles("/proc/self/task") != wanted && SecondsSince(begin) < kAtOnceS) {
    std::this_thread::yield();
  }
  CHECK_EQ(CountFiles("/proc/self/task"), wanted);
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
      // The number includes the threads of sanitizers.
      if (round == 1) num_threads = CountFiles("/proc/self/task");
      CheckNumThreads(num_threads);
      if (random() % 4 == 0) ranks->Poison(std::make_exception_ptr(Error("x")));
      if (random() % 2 == 0) ranks->Close();
    }
    CHECK_EQ(CountFiles("/proc/self/fd"), num_files);
    CheckNumThreads(num_threads - 1);
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

TEST(MoreMemoryThanThereIsEndsEveryProcessAtOnce) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    AtOnce([&] {
      ConnectAs(process, bulletin, {0, 1}, process == 1 ? int64_t{1} << 46 : 4096, 60);
    });
  });
  const std::vector<std::string> texts = processes.Join();
  CHECK_EQ(
      texts[0],
      "CommunicatorError: jax_ub.tp: rank 1 (process 1) failed or exited before it "
      "connected");
  CHECK(Contains(texts[1], "CommunicatorError: jax_ub.tp: memory of 140737488"));
  CHECK(
      Contains(texts[1], "are available. A smaller shape of initialize_ub needs less"));
}

// Connects two processes whose sends fail as often as `num_failing`, and exchanges a
// setup message with a descriptor. Returns the errors.
std::vector<std::string> ConnectWhileSendsFail(int num_failing_hellos,
                                               int num_failing_setups,
                                               double timeout_s) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const Endpoint endpoint;
    bulletin.Publish(process, endpoint.address());
    const ProcessGroup group({{0, 1}, process, "tp"});
    const SharedMapping memory = SharedMapping::Create(4096);
    const auto addresses = bulletin.Read(2);
    num_failing_sends = num_failing_hellos;
    std::vector<ConnectedPeer> peers =
        Handshake(endpoint, group, addresses, "", memory.descriptor(), {})
            .Run(timeout_s);
    num_failing_sends = num_failing_setups;
    SetupMessage own;
    own.text = std::to_string(process);
    own.passed.emplace_back(dup(memory.descriptor().get()));
    SetupExchange exchange(group, peers);
    try {
      const auto setups = exchange.Exchange(std::move(own), Deadline::After(timeout_s));
      CHECK_EQ(setups[1 - process].text, std::to_string(1 - process));
      CHECK_EQ(setups[1 - process].passed.size(), 1u);
    } catch (...) {
      num_failing_sends = 0;
      exchange.BroadcastFailure(std::current_exception());
      throw;
    }
  });
  return processes.Join();
}

TEST(MessagesForWhichTheKernelLacksMemoryAreSentLater) {
  for (const std::string& text : ConnectWhileSendsFail(3, 3, 60)) CHECK_EQ(text, "");
}

TEST(AMessageThatCannotBeSentIsNamedAtTheDeadline) {
  constexpr int kAlways = 1 << 30;
  const std::string reason =
      " could not be sent a message for 0.5 s, because the kernel lacks memory";
  for (const auto& [num_failing_hellos, num_failing_setups] :
       {std::pair(kAlways, 0), std::pair(0, kAlways)}) {
    const std::vector<std::string> texts =
        ConnectWhileSendsFail(num_failing_hellos, num_failing_setups, 0.5);
    CHECK(Contains(texts[1], "CommunicatorError: jax_ub.tp: rank 0 (process 0"));
    CHECK(Contains(texts[1], reason));
  }
}

// Shared memory has no name in a file system, so the size of /dev/shm does not matter.
TEST(ATinyDevShmDoesNotMatter) {
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
    std::memset(ranks->buffer(process, 0), process + 1, kHalfBytes);
    ranks->Barrier(0, 0, Reason());
    CHECK(ranks->buffer(1 - process, 0)[kHalfBytes - 1] == std::byte(2 - process));
    CHECK_EQ(CountFiles("/dev/shm"), 0);
    CHECK_EQ(CountFiles("/tmp"), 0);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
