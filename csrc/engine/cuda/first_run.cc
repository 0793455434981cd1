#include "engine/cuda/first_run.h"

#include <algorithm>
#include <chrono>

namespace jax_ub {

namespace {

// A waiting thread checks at this interval whether the call has failed.
constexpr std::chrono::milliseconds kCheckInterval{1};

}  // namespace

bool FirstRun::IsOver(int ordinal) const {
  const std::lock_guard lock(mutex_);
  const auto found = stages_.find(ordinal);
  return found != stages_.end() && found->second == Stage::kEnqueued;
}

std::vector<int> FirstRun::Await(int ordinal,
                                 Stage stage,
                                 const std::vector<int>& ordinals,
                                 const Deadline& deadline,
                                 const std::function<std::exception_ptr()>& failure) {
  std::unique_lock lock(mutex_);
  stages_[ordinal] = std::max(stages_[ordinal], stage);
  changed_.notify_all();
  for (;;) {
    std::vector<int> missing = MissingAt(stage, ordinals);
    if (missing.empty() || deadline.Expired()) return missing;
    changed_.wait_for(lock, kCheckInterval);
    lock.unlock();
    if (const std::exception_ptr reason = failure()) std::rethrow_exception(reason);
    lock.lock();
  }
}

void FirstRun::Leave(int ordinal) {
  const std::lock_guard lock(mutex_);
  stages_[ordinal] = Stage::kEnqueued;
  changed_.notify_all();
}

std::vector<int> FirstRun::MissingAt(Stage stage,
                                     const std::vector<int>& ordinals) const {
  std::vector<int> missing;
  for (const int ordinal : ordinals) {
    const auto found = stages_.find(ordinal);
    if (found == stages_.end() || found->second < stage) missing.push_back(ordinal);
  }
  return missing;
}

}  // namespace jax_ub
