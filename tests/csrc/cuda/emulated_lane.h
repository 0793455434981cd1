// Lane: a thread that runs the work of a stream, or of a chain of graph nodes, in
// order. Moment: an event that other threads wait for.
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

// An event that is set once. A thread that has waited for it sees all writes before it
// was set. Besides the order of a lane, this is the only synchronization of the
// emulated driver that ThreadSanitizer sees.
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
  // The work of an operation, and the update of the emulated driver's state after it,
  // which is hidden from ThreadSanitizer.
  struct WorkList {
    const char* name = "";
    std::function<void()> run;
    std::function<void()> ended;
  };

  // Delays each operation by a random time of up to max_delay_us, drawn with the seed.
  Lane(uint64_t seed, int max_delay_us);
  ~Lane();  // after Stop
  Lane(const Lane&) = delete;

  // Appends work. The caller must be hidden from ThreadSanitizer (Unseen); the work
  // sees all earlier writes of the caller.
  void Post(WorkList work);
  // Returns whether no work is running or pending. The caller must be hidden (Unseen).
  bool is_idle() const;
  // Returns the name of the running or next work; "" if idle. The caller must be hidden
  // (Unseen).
  std::string busy_with() const;
  // Ends the thread after all pending work.
  void Stop();

  // Sleeps for the next random delay. Called only from the lane's thread.
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
