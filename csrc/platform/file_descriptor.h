// Owned file descriptors, event descriptors, and polling.
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

// Throws a SystemError with the text "`what`: <description of the errno `error`>".
[[noreturn]] void ThrowSystemError(const std::string& what, int error);

// Creates an event: a descriptor that becomes readable at NotifyEvent, and remains
// readable until ClearEvent.
FileDescriptor NewEvent();
void NotifyEvent(const FileDescriptor& event) noexcept;
void ClearEvent(const FileDescriptor& event) noexcept;

// Returns a descriptor that becomes readable when the process exits (a pidfd). Returns
// an empty handle if the kernel does not support pidfds or the process is not visible.
FileDescriptor WatchProcess(pid_t pid);

// Returns " (it is stopped)" if a signal has stopped the process, and otherwise "". For
// error messages.
std::string DescribeIfStopped(pid_t pid);

// Waits until one of the descriptors has an event, which poll(2) stores in its
// `revents`. Returns false if no descriptor has an event by `until`. Without `until`,
// there is no time limit.
bool Poll(std::vector<pollfd>& descriptors,
          Deadline::Clock::time_point until = Deadline::Clock::time_point::max());

// Returns 64 random bits from the operating system.
uint64_t RandomBits();

}  // namespace jax_ub
