// An intrusive queue, and the tasks that the thread pool queues in it. The queue
// allocates no memory, so a task can be queued even if memory is exhausted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace jax_ub {

// Base class of the objects of type T in a Queue. An object may be in only one queue at
// a time.
template <typename T>
class Queued {
 private:
  template <typename>
  friend class Queue;
  std::shared_ptr<T> next_;
};

template <typename T>
class Queue {
 public:
  Queue() = default;
  Queue(Queue&& other) noexcept { Append(std::move(other)); }
  Queue& operator=(Queue&&) = delete;
  ~Queue() {
    while (!empty())
      Pop();  // the default destructor would recurse through a long queue
  }

  bool empty() const { return first_ == nullptr; }
  int64_t size() const { return size_; }

  void Push(std::shared_ptr<T> one) noexcept {
    T* const pushed = one.get();
    (last_ == nullptr ? first_ : last_->next_) = std::move(one);
    last_ = pushed;
    ++size_;
  }

  std::shared_ptr<T> Pop() noexcept {
    std::shared_ptr<T> one = std::move(first_);
    first_ = std::move(one->next_);
    if (!first_) last_ = nullptr;
    --size_;
    return one;
  }

  void Append(Queue&& other) noexcept {
    if (other.empty()) return;
    (last_ == nullptr ? first_ : last_->next_) = std::move(other.first_);
    last_ = std::exchange(other.last_, nullptr);
    size_ += std::exchange(other.size_, 0);
  }

  void Remove(const T* one) noexcept {
    T* before = nullptr;
    for (T* at = first_.get(); at != one; at = at->next_.get()) before = at;
    std::shared_ptr<T>& link = before == nullptr ? first_ : before->next_;
    std::shared_ptr<T> removed = std::move(link);
    link = std::move(removed->next_);
    if (last_ == removed.get()) last_ = before;
    --size_;
  }

  // Returns the first object for which `is_meant` is true, or nullptr. The object stays
  // in the queue.
  template <typename Predicate>
  std::shared_ptr<T> Find(const Predicate& is_meant) const {
    const std::shared_ptr<T>* at = &first_;
    while (*at && !is_meant(**at)) at = &(*at)->next_;
    return *at;
  }

 private:
  std::shared_ptr<T> first_;
  T* last_ = nullptr;
  int64_t size_ = 0;
};

// A task that may block the thread of the pool that runs it, such as a rank's schedule
// or the continuation of an XLA program.
class BlockingTask : public Queued<BlockingTask> {
 public:
  virtual ~BlockingTask() = default;
  // Runs the task. Must not throw, because the pool does not know which call to fail.
  virtual void Execute() = 0;
};

class Closure : public BlockingTask {
 public:
  explicit Closure(std::function<void()> body) : body_(std::move(body)) {}
  void Execute() override { body_(); }

 private:
  const std::function<void()> body_;
};

}  // namespace jax_ub
