#include "platform/thread.h"

#include <system_error>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

std::thread NewThread(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw SystemError("a thread cannot start: " + error.code().message() +
                      kIsLimitReached);
  }
}

void StartThread(std::function<void()> body) { NewThread(std::move(body)).detach(); }

}  // namespace jax_ub
