#include "cuda/emulated_lane.h"

#include <utility>

#include "cuda/unseen.h"
#include "platform/futex.h"

namespace jax_ub::emulated {

void Moment::Set() {
  time_ = Clock::now();
  is_set_.store(1, std::memory_order_release);
  FutexWake(is_set_);
}

void Moment::Await() const {
  for (int i = 0; i < 20; ++i) {
    if (is_set()) return;
    std::this_thread::yield();
  }
  while (!is_set()) FutexWait(is_set_, 0, Clock::now() + std::chrono::seconds(1));
}

Lane::Lane(uint64_t seed, int max_delay_us)
    : max_delay_us_(max_delay_us), random_(seed), thread_([this] { Run(); }) {}

Lane::~Lane() { thread_.join(); }

void Lane::Post(WorkList work) {
  auto item = std::make_unique<Item>();
  item->work = std::move(work);
  {
    const Seen seen;
    item->is_published.store(1, std::memory_order_release);
  }
  const std::lock_guard lock(mutex_);
  items_.push_back(std::move(item));
  changed_.notify_all();
}

bool Lane::is_idle() const {
  const std::lock_guard lock(mutex_);
  return items_.empty();
}

std::string Lane::busy_with() const {
  const std::lock_guard lock(mutex_);
  return items_.empty() ? "" : items_.front()->work.name;
}

void Lane::Stop() {
  const Unseen unseen;
  const std::lock_guard lock(mutex_);
  is_stopping_ = true;
  changed_.notify_all();
}

void Lane::Delay() {
  if (max_delay_us_ == 0 || random_() % 2 == 0) return;
  const uint64_t us = random_() % (static_cast<uint64_t>(max_delay_us_) + 1);
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void Lane::Run() {
  for (;;) {
    Item* item = nullptr;
    {
      const Unseen unseen;
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !items_.empty() || is_stopping_; });
      if (items_.empty()) return;
      item = items_.front().get();
    }
    item->is_published.load(std::memory_order_acquire);
    Delay();
    item->work.run();
    const Unseen unseen;
    if (item->work.ended) item->work.ended();
    const std::lock_guard lock(mutex_);
    items_.pop_front();
  }
}

}  // namespace jax_ub::emulated
