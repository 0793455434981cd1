// Keeps the devices of this process together in the first run of a call site.
//
// Loading a kernel may take a lock of the process and wait until the device has
// finished all work. If that work waits for another device of this process, whose
// thread needs the lock, neither makes progress. XLA loads kernels when it first
// launches them. So in the first run of a call, each device's thread waits twice for
// the others: before it enqueues the call, since the others may still be loading, and
// after it, before XLA launches what follows. Later runs load nothing.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "platform/deadline.h"

namespace jax_ub {

class FirstRun {
 public:
  enum class Stage { kLoading, kReady, kEnqueued };

  // Returns whether this device has enqueued the first run of the call site, or has
  // failed in it. The device does not wait for the others in later runs.
  bool IsOver(int ordinal) const;

  // Records that the device has reached `stage`, and waits until all `ordinals` have
  // reached it. Returns the ordinals that have not at the deadline. `failure` is polled
  // during the wait. An exception that it returns is thrown.
  std::vector<int> Await(int ordinal,
                         Stage stage,
                         const std::vector<int>& ordinals,
                         const Deadline& deadline,
                         const std::function<std::exception_ptr()>& failure);

  // Records that the call has failed on this device, so that the others do not wait for
  // it.
  void Leave(int ordinal);

 private:
  std::vector<int> MissingAt(Stage stage, const std::vector<int>& ordinals) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Stage> stages_;  // by ordinal; guarded by mutex_
};

}  // namespace jax_ub
