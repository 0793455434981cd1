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
                      ": is the limit of threads reached (ulimit -u, or pids.max of "
                      "the container)?");
  }
}

void StartThread(std::function<void()> body) { NewThread(std::move(body)).detach(); }

}  // namespace jax_ub
