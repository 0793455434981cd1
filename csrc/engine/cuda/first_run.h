// Makes the devices of this process wait for each other in the first run of a call
// site, which prevents a deadlock.
//
// Loading a kernel may take a lock of the process and wait until the device has
// finished all work. If this work waits for another device of this process, whose
// thread needs the lock, neither thread makes progress. XLA loads kernels when it first
// launches them. So in the first run of a call, each device's thread waits for the
// others twice: before it enqueues the call, because the others may still be loading,
// and after it, before XLA launches the work that follows. Later runs load nothing.
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
  // failed in this run. In later runs, the device does not wait for the others.
  bool IsOver(int ordinal) const;

  // Records that the device has reached `stage`, and waits until all `ordinals` have
  // reached it. At the deadline, returns the ordinals that have not reached it. Calls
  // `failure` repeatedly during the wait, and throws the exception that it returns.
  std::vector<int> Await(int ordinal,
                         Stage stage,
                         const std::vector<int>& ordinals,
                         const Deadline& deadline,
                         const std::function<std::exception_ptr()>& failure);

  // Records that the call has failed on this device, so that the other devices do not
  // wait for it.
  void Leave(int ordinal);

 private:
  std::vector<int> MissingAt(Stage stage, const std::vector<int>& ordinals) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Stage> stages_;  // by ordinal; guarded by mutex_
};

}  // namespace jax_ub
