// Futexes: a thread sleeps until another thread changes a word and wakes it. The word
// may be in memory that several processes share.
#pragma once

#include <atomic>
#include <cstdint>

#include "platform/deadline.h"

namespace jax_ub {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
              std::atomic<uint32_t>::is_always_lock_free);

// Sleeps if `word` equals `expected`, until FutexWake or the deadline. May return
// early.
void FutexWait(const std::atomic<uint32_t>& word,
               uint32_t expected,
               Deadline::Clock::time_point deadline);

// Wakes all threads that sleep on the word, in all processes that map it.
void FutexWake(std::atomic<uint32_t>& word) noexcept;

}  // namespace jax_ub
