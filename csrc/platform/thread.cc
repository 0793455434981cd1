#include "platform/thread.h"

#include <system_error>
#include <thread>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

void StartThread(std::function<void()> body) {
  try {
    std::thread(std::move(body)).detach();
  } catch (const std::system_error& error) {
    throw SystemError("a thread cannot start: " + error.code().message() +
                      ": is the limit of threads reached (ulimit -u, or pids.max of "
                      "the container)?");
  }
}

}  // namespace jax_ub
