// Threads. Both throw SystemError where the system lets no more of them start.
#pragma once

#include <functional>
#include <thread>

namespace jax_ub {

std::thread NewThread(std::function<void()> body);

// One that nobody joins.
void StartThread(std::function<void()> body);

}  // namespace jax_ub
