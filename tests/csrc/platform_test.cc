// Tests the wrappers of operating-system resources: descriptors, shared memory, sockets
// and sleeps.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "platform/cgroup.h"
#include "platform/error.h"
#include "platform/futex.h"
#include "platform/handle.h"
#include "platform/mapping.h"
#include "platform/unix_socket.h"

namespace jax_ub {
namespace {

constexpr int64_t kPage = 4096;

std::string NewName() { return "jax_ub-test-" + std::to_string(RandomBits()); }

std::span<const std::byte> BytesOf(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Both ends of a connection.
struct Pair {
  Pair() {
    const std::string name = NewName();
    listener = ListenAt(name);
    CHECK(Dial(name, &dialed) == DialResult::kConnected);
    accepted = Accept(listener);
  }
  FileDescriptor listener, dialed, accepted;
};

struct CountedTraits {
  using Value = int;
  static constexpr int kNone = 0;
  static inline std::string closed;
  static void Close(int value) noexcept { closed += std::to_string(value); }
};

TEST(AHandleIsClosedOnceByItsLastOwner) {
  using Counted = UniqueHandle<CountedTraits>;
  CountedTraits::closed = "";
  {
    Counted one(1), two(2), none;
    CHECK(!none && one && one.get() == 1);
    none = std::move(one);
    CHECK(!one && none.get() == 1);
    none = std::move(none);
    CHECK_EQ(CountedTraits::closed, "");
    none = std::move(two);  // 1 has no owner any more
    CHECK_EQ(CountedTraits::closed, "1");
    Counted three(3);
    CHECK_EQ(three.release(), 3);
    Counted moved(std::move(none));
  }
  CHECK_EQ(CountedTraits::closed, "12");
}

TEST(MemoryIsSharedSealedPrivateAndZero) {
  SharedMapping own = SharedMapping::Create(3 * kPage);
  const int descriptor = own.descriptor().get();
  struct stat status = {};
  CHECK_EQ(fstat(descriptor, &status), 0);
  CHECK_EQ(status.st_mode & 0777, 0600u);
  CHECK_EQ(status.st_size, 3 * kPage);
  CHECK_EQ(status.st_blocks * 512, 3 * kPage);  // all of it is there
  CHECK(ftruncate(descriptor, kPage) != 0);
  CHECK(ftruncate(descriptor, 4 * kPage) != 0);
  CHECK(fcntl(descriptor, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  CHECK((fcntl(descriptor, F_GETFD) & FD_CLOEXEC) != 0);

  FileDescriptor passed(dup(descriptor));
  const SharedMapping other = SharedMapping::Map(std::move(passed), 3 * kPage);
  CHECK(other.data() != own.data());
  CHECK(other.data()[3 * kPage - 1] == std::byte{0});
  own.data()[3 * kPage - 1] = std::byte{7};
  CHECK(other.data()[3 * kPage - 1] == std::byte{7});
  CHECK(!other.descriptor());
}

TEST(OnlySealedMemoryOfTheRightSizeIsMapped) {
  const SharedMapping own = SharedMapping::Create(kPage);
  CHECK_THROWS(
      SharedMapping::Map(FileDescriptor(dup(own.descriptor().get())), 2 * kPage),
      "memory of 4096 bytes instead of 8192 bytes");
  FileDescriptor unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(ftruncate(unsealed.get(), kPage), 0);
  CHECK_THROWS(SharedMapping::Map(std::move(unsealed), kPage),
               "memory whose size is not sealed");
  CHECK_THROWS(SharedMapping::Map(FileDescriptor(open("/dev/zero", O_RDWR)), kPage),
               "memory whose size is not sealed");
}

void Write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

TEST(TheQuotaOfProcessorTimeIsTheLeastAlongThePath) {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / NewName();
  const auto write = [&](const std::string& path, const std::string& text) {
    Write(root / path, text);
  };
  const std::string membership = (root / "membership").string();
  const auto quota = [&] { return CpuQuota(root.string(), membership).value_or(0); };
  CHECK_EQ(quota(), 0);  // nothing is mounted
  write("membership", "0::/a/b\n");
  write("a/b/cpu.max", "max 100000\n");
  CHECK_EQ(quota(), 0);
  write("a/cpu.max", "250000 100000\n");
  CHECK_EQ(quota(), 2.5);
  write("a/b/cpu.max", "400000 100000\n");
  CHECK_EQ(quota(), 2.5);
  write("a/b/cpu.max", "50000 100000\n");
  CHECK_EQ(quota(), 0.5);
  // In a container, the mount begins at the container's group.
  write("membership", "0::/\n");
  CHECK_EQ(quota(), 0);
  write("cpu.max", "200000 100000\n");
  CHECK_EQ(quota(), 2);
  // cgroups version 1, also if the mount lacks the path.
  write("membership", "5:memory:/x\n4:cpu,cpuacct:/docker/x\n0::/\n");
  fs::remove(root / "cpu.max");
  write("cpu/docker/x/cpu.cfs_quota_us", "-1\n");
  write("cpu/docker/x/cpu.cfs_period_us", "100000\n");
  CHECK_EQ(quota(), 0);
  write("cpu/cpu.cfs_quota_us", "300000\n");
  write("cpu/cpu.cfs_period_us", "100000\n");
  CHECK_EQ(quota(), 3);
  fs::remove_all(root);
}

TEST(MemoryThatIsNotThereIsAnErrorAtOnce) {
  CHECK_THROWS(SharedMapping::Create(int64_t{1} << 46),
               "memory of 70368744177664 bytes: only ");
}

TEST(ADescriptorIsPassedWithAMessage) {
  Pair pair;
  const SharedMapping own = SharedMapping::Create(kPage);
  own.data()[5] = std::byte{9};
  CHECK(Send(pair.dialed, BytesOf("here"), &own.descriptor()) == Sent::kYes);
  CHECK(Send(pair.dialed, BytesOf("and more")) == Sent::kYes);
  std::byte buffer[64];
  Received first = Receive(pair.accepted, buffer);
  CHECK(first.arrival == Arrival::kMessage);
  CHECK_EQ(std::string(reinterpret_cast<char*>(buffer), first.size), "here");
  CHECK((fcntl(first.passed.get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(SharedMapping::Map(std::move(first.passed), kPage).data()[5] == std::byte{9});
  const Received second = Receive(pair.accepted, buffer);
  CHECK_EQ(std::string(reinterpret_cast<char*>(buffer), second.size), "and more");
  CHECK(!second.passed);
  CHECK(Receive(pair.accepted, buffer).arrival == Arrival::kNothing);
  CHECK(!Accept(pair.listener));
}

TEST(MessagesBeforeACloseAreReceived) {
  Pair pair;
  CHECK(Send(pair.accepted, BytesOf("unread")) == Sent::kYes);
  CHECK(Send(pair.dialed, BytesOf("last words")) == Sent::kYes);
  pair.dialed.reset();  // with a message unread
  std::byte buffer[64];
  CHECK_EQ(Receive(pair.accepted, buffer).size, 10u);
  CHECK(Receive(pair.accepted, buffer).arrival == Arrival::kEnd);
  CHECK(Receive(pair.accepted, buffer).arrival == Arrival::kEnd);
  CHECK(Send(pair.accepted, BytesOf("nobody")) == Sent::kNo);
}

TEST(APeerThatDoesNotReadDoesNotBlockSends) {
  Pair pair;
  const std::string message(4096, 'x');
  int num_sent = 0;
  Sent last = Sent::kYes;
  while (num_sent < 100000 && last == Sent::kYes) {
    last = Send(pair.dialed, BytesOf(message));
    ++num_sent;
  }
  CHECK(num_sent > 1 && last == Sent::kFull);
}

// Lets every sendmsg of the calling thread fail with `error`, until the thread exits.
// Returns false if the system does not allow it.
bool FailSends(int error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sendmsg, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {std::size(filter), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(AKernelThatLacksMemoryIsNoLostPeer) {
  Pair pair;
  for (const int error : {ENOBUFS, ENOMEM, EPIPE}) {
    std::thread([&] {
      if (!FailSends(error)) {
        std::puts("not tested: this system does not allow a seccomp filter");
        return;
      }
      CHECK(Send(pair.dialed, BytesOf("later")) ==
            (error == EPIPE ? Sent::kNo : Sent::kFull));
    }).join();
  }
}

TEST(NoSocketListensBeforeAndAfterAListener) {
  const std::string name = NewName();
  FileDescriptor connection;
  CHECK(Dial(name, &connection) == DialResult::kNoProcess);
  FileDescriptor listener = ListenAt(name);
  CHECK_THROWS(ListenAt(name), "bind: ");
  CHECK(Dial(name, &connection) == DialResult::kConnected);
  CHECK_EQ(PeerCredentials(connection).pid, getpid());
  CHECK_EQ(PeerCredentials(connection).uid, geteuid());
  listener.reset();
  // A connection to the listener that was never accepted ends.
  std::byte buffer[8];
  CHECK(Receive(connection, buffer).arrival == Arrival::kEnd);
  CHECK(Dial(name, &connection) == DialResult::kNoProcess);
  CHECK_THROWS(ListenAt(std::string(200, 'x')), "is no name for a socket");
}

TEST(ASleepEndsByAWakeOrByItsDeadline) {
  std::atomic<uint32_t> word{4};
  const auto begin = Deadline::Clock::now();
  FutexWait(word, 4, begin + std::chrono::milliseconds(20));
  CHECK(Deadline::Clock::now() - begin >= std::chrono::milliseconds(20));
  FutexWait(word, 5, begin + std::chrono::hours(1));  // it is another value already
  FutexWait(word, 4, Deadline::Clock::time_point());  // long over
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    word = 5;
    FutexWake(word);
  });
  while (word == 4) FutexWait(word, 4, begin + std::chrono::hours(1));
  waker.join();
  CHECK(Deadline::Clock::now() - begin < std::chrono::minutes(1));
}

TEST(TheWordOfASleepMayBeInTwoMappings) {
  const SharedMapping own = SharedMapping::Create(kPage);
  const SharedMapping other =
      SharedMapping::Map(FileDescriptor(dup(own.descriptor().get())), kPage);
  auto* word = reinterpret_cast<std::atomic<uint32_t>*>(own.data());
  auto* same_word = reinterpret_cast<std::atomic<uint32_t>*>(other.data());
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    same_word->store(1);
    FutexWake(*same_word);
  });
  const auto begin = Deadline::Clock::now();
  while (word->load() == 0) FutexWait(*word, 0, begin + std::chrono::minutes(1));
  waker.join();
  CHECK(Deadline::Clock::now() - begin < std::chrono::seconds(30));
}

TEST(ADeadlineDoesNotCountTheTimeWhileTheProcessIsStopped) {
  using std::chrono::milliseconds, std::chrono::seconds;
  auto deadline = StoppableDeadline::After(3);
  Deadline::Clock::time_point now = Deadline::Clock::now();
  const auto sleeps_s = [&] {
    return std::chrono::duration<double>(deadline.next_check() - now).count();
  };
  CHECK(sleeps_s() <= 1);
  CHECK(!deadline.Expired(now += seconds(1)));
  // Counts one second of a stop, because the process may have slept until then.
  CHECK(!deadline.Expired(now += seconds(60)));
  CHECK(sleeps_s() > 0.5 && sleeps_s() <= 1);
  CHECK(!deadline.Expired(now += milliseconds(600)));
  CHECK(sleeps_s() > 0 && sleeps_s() < 0.5);
  CHECK(deadline.Expired(now += milliseconds(600)));
  // A thread that gets a core late has not been stopped.
  deadline = StoppableDeadline::After(2);
  now = Deadline::Clock::now();
  CHECK(!deadline.Expired(now += milliseconds(900)));
  CHECK(deadline.Expired(now += milliseconds(1900)));
}

TEST(AWaitForDescriptorsEndsByAnEventOrByItsDeadline) {
  const FileDescriptor event = NewEvent();
  std::vector<pollfd> polled = {{event.get(), POLLIN, 0}, {-1, POLLIN, 0}};
  const auto begin = Deadline::Clock::now();
  CHECK(!Poll(polled, begin + std::chrono::milliseconds(20)));
  CHECK(Deadline::Clock::now() - begin >= std::chrono::milliseconds(20));
  NotifyEvent(event);
  NotifyEvent(event);
  CHECK(Poll(polled, begin));
  Poll(polled);
  CHECK(polled[0].revents == POLLIN && polled[1].revents == 0);
  ClearEvent(event);
  ClearEvent(event);
  CHECK(!Poll(polled, begin));
  NotifyEvent(event);
  CHECK(Poll(polled, begin));
}

TEST(TheStateOfAnotherProcessIsSeen) {
  const pid_t pid = fork();
  if (pid == 0) {
    for (;;) pause();
  }
  const FileDescriptor life = WatchProcess(pid);
  CHECK_EQ(DescribeIfStopped(pid), "");
  kill(pid, SIGSTOP);
  waitpid(pid, nullptr, WUNTRACED);
  CHECK_EQ(DescribeIfStopped(pid), " (it is stopped)");
  std::vector<pollfd> polled = {{life.get(), POLLIN, 0}};
  CHECK(!Poll(polled, Deadline::Clock::now()));
  kill(pid, SIGKILL);
  CHECK(Poll(polled, Deadline::After(10).time()));
  waitpid(pid, nullptr, 0);
  CHECK_EQ(DescribeIfStopped(pid), "");
  CHECK_EQ(DescribeIfStopped(0), "");
  CHECK(!WatchProcess(0));
}

TEST(AProcessMayEndWhileItsStateIsRead) {
  for (int round = 0; round < 200; ++round) {
    const pid_t pid = fork();
    if (pid == 0) _exit(0);
    std::atomic<bool> ended{false};
    std::thread reader([&] {
      while (!ended) CHECK_EQ(DescribeIfStopped(pid), "");
    });
    waitpid(pid, nullptr, 0);
    ended = true;
    reader.join();
  }
}

TEST(AvailableMemoryOfAContainerIncludesItsCache) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / NewName();
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((folder / name).parent_path());
    std::ofstream(folder / name) << text << "\n";
  };
  const auto available = [&] { return AvailableBytes(folder, folder / "membership"); };
  CHECK(available() > 100000);  // no control groups: the machine's
  write("membership", "4:memory:/\n0::/");
  CHECK(available() > 100000);
  write("memory.max", "100000");
  write("memory.current", "90000");
  CHECK_EQ(available(), 10000);
  write("memory.stat", "anon 70000\nactive_file 2000\ninactive_file 3000");
  CHECK_EQ(available(), 15000);
  write("memory.current", "110000");
  CHECK_EQ(available(), 0);
  write("memory.max", "max");
  CHECK(available() > 100000);
  write("memory/memory.limit_in_bytes", "50000");  // of the older version
  write("memory/memory.usage_in_bytes", "40000");
  write("memory/memory.stat", "active_file 9\ntotal_active_file 1000");
  CHECK_EQ(available(), 11000);
  std::filesystem::remove_all(folder);
}

TEST(TheMemoryThatIsLeftIsTheLeastAlongThePath) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / NewName();
  const auto limit = [&](const std::string& group, const std::string& bytes) {
    Write(folder / group / "memory.max", bytes);
    Write(folder / group / "memory.current", "1000");
  };
  Write(folder / "membership", "0::/slurm/job_7/step_0\n");
  const auto available = [&] { return AvailableBytes(folder, folder / "membership"); };
  limit("slurm/job_7/step_0", "max");
  limit("slurm/job_7", "51000");
  CHECK_EQ(available(), 50000);
  limit("slurm", "91000");
  CHECK_EQ(available(), 50000);
  limit("slurm/job_7/step_0", "31000");
  CHECK_EQ(available(), 30000);
  limit("", "21000");
  CHECK_EQ(available(), 20000);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
