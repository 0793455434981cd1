// Threads. Both throw SystemError where the system lets no more of them start.
#pragma once

#include <functional>
#include <thread>

namespace jax_ub {

// Ends what is said where one is missing.
inline constexpr char kIsLimitReached[] =
    ": is the limit of threads reached (ulimit -u, or pids.max of the container)?";

std::thread NewThread(std::function<void()> body);

// One that nobody joins.
void StartThread(std::function<void()> body);

}  // namespace jax_ub
