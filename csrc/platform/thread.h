// A thread that nobody joins.
#pragma once

#include <functional>

namespace jax_ub {

// Throws SystemError where the system lets no more threads start.
void StartThread(std::function<void()> body);

}  // namespace jax_ub
