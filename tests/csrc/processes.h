// Runs a test in several processes: forks them before any thread exists, lets them
// exchange addresses, and collects what each process reports before a deadline.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {

// Sleeps between two polls of what another thread or process does, which may need the
// core.
inline void SleepBriefly() {
  std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// Shared memory of the processes of a test, with their addresses and a word to wait
// for.
class Bulletin {
 public:
  static constexpr int kMaxProcesses = 8;

  Bulletin()
      : rendezvous_(new (mmap(nullptr,
                              sizeof(Rendezvous),
                              PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS,
                              -1,
                              0)) Rendezvous) {}
  ~Bulletin() { munmap(rendezvous_, sizeof(Rendezvous)); }
  Bulletin(const Bulletin&) = delete;

  void Publish(int process, const PeerAddress& address) {
    std::strcpy(rendezvous_->entries[process].address, address.address.c_str());
    rendezvous_->entries[process].token = address.token;
    ++rendezvous_->entries[process].num_published;
  }
  // Waits until every process has published `round` endpoints; returns the latest
  // addresses.
  std::map<int, PeerAddress> Read(int num_processes, int round = 1) {
    std::map<int, PeerAddress> addresses;
    for (int p = 0; p < num_processes; ++p) {
      while (rendezvous_->entries[p].num_published < round) SleepBriefly();
      addresses[p] = {rendezvous_->entries[p].address, rendezvous_->entries[p].token};
    }
    return addresses;
  }

  std::atomic<int>& word() { return rendezvous_->word; }
  void WaitForWord(int value) {
    while (rendezvous_->word < value) SleepBriefly();
  }

 private:
  struct Rendezvous {
    struct {
      char address[64];
      uint64_t token;
      std::atomic<int> num_published{0};
    } entries[kMaxProcesses];
    std::atomic<int> word{0};
  };
  Rendezvous* const rendezvous_;
};

// Runs `function(process)` in one forked process for each index.
class Processes {
 public:
  Processes(int num_processes, const std::function<void(int)>& function) {
    for (int p = 0; p < num_processes; ++p) {
      int ends[2];
      if (pipe(ends) != 0) throw std::runtime_error("pipe");
      const pid_t pid = fork();
      if (pid == 0) RunChild(p, function, ends[1]);
      close(ends[1]);
      children_.push_back({pid, ends[0]});
    }
  }
  ~Processes() {
    for (const Child& child : children_) {
      if (!child.is_reaped) Reap(child.pid, SIGKILL);
      close(child.output);
    }
  }

  pid_t pid(int process) const { return children_[process].pid; }
  void Signal(int process, int signal) { kill(children_[process].pid, signal); }

  // Waits for all processes; returns for each the text of its exception, "" if there
  // was none, or the way in which it ended otherwise. A failed check in a process fails
  // the test, whatever the text is. Processes that hang are killed after a time that is
  // far longer than a busy machine needs.
  std::vector<std::string> Join() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(5);
    std::vector<std::string> texts;
    for (Child& child : children_) texts.push_back(JoinOne(child, end));
    return texts;
  }

 private:
  struct Child {
    pid_t pid = 0;
    int output = -1;
    bool is_reaped = false;
  };

  static constexpr char kChecksFailed[] = " checks failed]";

  [[noreturn]] static void RunChild(int process,
                                    const std::function<void(int)>& function,
                                    int output) {
    check::num_failures = 0;
    std::string text;
    try {
      function(process);
    } catch (const std::exception& error) {
      text = error.what();
    }
    if (check::num_failures != 0) {
      text.append("[").append(std::to_string(check::num_failures));
      text.append(kChecksFailed);
    }
    text += '\0';
    [[maybe_unused]] const ssize_t written = write(output, text.data(), text.size());
    _exit(0);
  }

  template <typename Time>
  static std::string JoinOne(Child& child, Time end) {
    std::string text;
    for (;;) {
      const std::chrono::duration<double, std::milli> left =
          end - std::chrono::steady_clock::now();
      pollfd polled = {child.output, POLLIN, 0};
      if (poll(&polled, 1, left.count() > 0 ? static_cast<int>(left.count()) + 1 : 0) ==
          0) {
        text = "[late]";
        break;
      }
      char buffer[4096];
      const ssize_t size = read(child.output, buffer, sizeof(buffer));
      if (size <= 0) break;
      text.append(buffer, static_cast<size_t>(size));
    }
    child.is_reaped = true;
    const int status = Reap(child.pid, text == "[late]" ? SIGKILL : 0);
    if (text == "[late]") return text;
    if (!text.empty() && text.back() == '\0') text.pop_back();
    if (text.ends_with(kChecksFailed)) check::Fail(__FILE__, __LINE__, "'", text, "'");
    if (WIFSIGNALED(status)) {
      text.append("[ended by signal ").append(std::to_string(WTERMSIG(status)));
      text.append("]");
    } else if (WEXITSTATUS(status) != 0) {
      text.append("[exit status ").append(std::to_string(WEXITSTATUS(status)));
      text.append("]");
    }
    return text;
  }

  static int Reap(pid_t pid, int signal) {
    if (signal != 0) kill(pid, signal);
    int status = 0;
    waitpid(pid, &status, 0);
    return status;
  }

  std::vector<Child> children_;
};

// Connects as `process` of a group. `round` counts the test's connections.
inline std::shared_ptr<SharedMemoryCommunicator> ConnectAs(
    int process,
    Bulletin& bulletin,
    const std::vector<int>& process_of_rank,
    int64_t buffer_bytes = 4096,
    double timeout_s = 20,
    int round = 1) {
  auto endpoint = std::make_unique<Endpoint>();
  bulletin.Publish(process, endpoint->address());
  int num_processes = 0;
  for (const int p : process_of_rank) num_processes = std::max(num_processes, p + 1);
  return SharedMemoryCommunicator::Connect(
      std::move(endpoint), {process_of_rank, process, "tp"},
      bulletin.Read(num_processes, round), buffer_bytes, timeout_s);
}

inline double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

// The maximum time in which peers must learn of a death, whatever the deadline is. It
// is much less than the deadline, and more than a busy machine needs.
constexpr double kAtOnceS = 20;

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Returns the name of a process in errors, "rank 1 (process 1, pid 123)", if it has one
// rank.
inline std::string NameOf(int process, pid_t pid) {
  const std::string number = std::to_string(process);
  return "rank " + number + " (process " + number + ", pid " + std::to_string(pid) +
         ")";
}

// Sleeps until the process is killed.
[[noreturn]] inline void Hang() {
  for (;;) pause();
}

// Calls `wait`, rethrows its exception, and checks that it returned or threw at once.
template <typename Wait>
void AtOnce(const Wait& wait) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    wait();
  } catch (...) {
    CHECK(SecondsSince(begin) < kAtOnceS);
    throw;
  }
  CHECK(SecondsSince(begin) < kAtOnceS);
}

}  // namespace jax_ub
