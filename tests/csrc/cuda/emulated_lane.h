// A thread that does what it is given, one after the other: a stream, or a chain of nodes
// of a graph. And moments that others wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace jax_ub::emulated {

// Comes once. Who has awaited it sees all that was done before it was set: the only order
// between threads, besides that of a lane, that ThreadSanitizer sees of this driver.
class Moment {
 public:
  using Clock = std::chrono::steady_clock;

  void Set();
  bool is_set() const { return is_set_.load(std::memory_order_acquire) != 0; }
  void Await() const;
  Clock::time_point time() const { return time_; }  // once it is set

 private:
  std::atomic<uint32_t> is_set_{0};
  Clock::time_point time_;
};
using SharedMoment = std::shared_ptr<Moment>;

class Lane {
 public:
  // What is done, and what becomes of the emulated driver's books after it (unseen).
  struct WorkList {
    const char* name = "";
    std::function<void()> run;
    std::function<void()> ended;
  };

  // Delays what it does by up to max_delay_us, as the seed says.
  Lane(uint64_t seed, int max_delay_us);
  ~Lane();  // after Stop
  Lane(const Lane&) = delete;

  // The caller is unseen; what it did before is seen by the work.
  void Post(WorkList work);
  // Nothing to do; the caller is unseen.
  bool is_idle() const;
  // What is being done or next, "" when idle; the caller is unseen.
  std::string busy_with() const;
  // Ends the thread once there is nothing left to do.
  void Stop();

  // Sleeps as long as comes next; from the lane's own thread only.
  void Delay();

 private:
  struct Item {
    std::atomic<int> is_published{0};
    WorkList work;
  };
  void Run();

  const int max_delay_us_;
  std::mt19937_64 random_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Item>> items_;  // the first one is being done
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace jax_ub::emulated
