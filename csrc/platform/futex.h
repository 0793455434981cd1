// Sleeping until another thread, of this process or of one that maps the same memory,
// says that a word has changed.
#pragma once

#include <atomic>
#include <cstdint>

#include "platform/deadline.h"

namespace jax_ub {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
              std::atomic<uint32_t>::is_always_lock_free);

// Sleeps while the word is `expected`, until FutexWake or the deadline; or for less.
void FutexWait(const std::atomic<uint32_t>& word,
               uint32_t expected,
               Deadline::Clock::time_point deadline);

// Wakes all that sleep on the word.
void FutexWake(std::atomic<uint32_t>& word) noexcept;

}  // namespace jax_ub
