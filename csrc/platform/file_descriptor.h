// Descriptors, and waiting for them.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "platform/deadline.h"
#include "platform/handle.h"

namespace jax_ub {

struct FileDescriptorTraits {
  using Value = int;
  static constexpr int kNone = -1;
  static void Close(int descriptor) noexcept;
};
using FileDescriptor = UniqueHandle<FileDescriptorTraits>;

// Throws SystemError: `what`, and what the system says of `error`.
[[noreturn]] void ThrowSystemError(const std::string& what, int error);

// A descriptor that is readable from NotifyEvent on, until ClearEvent.
FileDescriptor NewEvent();
void NotifyEvent(const FileDescriptor& event) noexcept;
void ClearEvent(const FileDescriptor& event) noexcept;

// A descriptor that is readable when the process has died, however; none where the
// system has no such thing or the process cannot be seen.
FileDescriptor WatchProcess(pid_t pid);

// " (it is stopped)" when a signal stopped the process, otherwise nothing.
std::string DescribeIfStopped(pid_t pid);

// Waits until one of them has an event, or the time is up: then false.
bool Poll(std::vector<pollfd>& descriptors, Deadline::Clock::time_point until);
// The same, for as long as it takes.
void Poll(std::vector<pollfd>& descriptors);

// From the system's source of randomness.
uint64_t RandomBits();

}  // namespace jax_ub
