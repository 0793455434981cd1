#include "platform/file_descriptor.h"

#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <system_error>

#include "platform/error.h"

namespace jax_ub {

void FileDescriptorTraits::Close(int descriptor) noexcept {
  // close is not repeated after EINTR, because Linux closes the descriptor in any case.
  static_cast<void>(close(descriptor));
}

void ThrowSystemError(const std::string& what, int error) {
  throw SystemError(what + ": " + std::generic_category().message(error));
}

FileDescriptor NewEvent() {
  FileDescriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) ThrowSystemError("eventfd", errno);
  return event;
}

void NotifyEvent(const FileDescriptor& event) noexcept {
  const uint64_t one = 1;
  // The write fails only if the counter of the eventfd has its maximum. The event is
  // readable in this case, too.
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof(one));
}

void ClearEvent(const FileDescriptor& event) noexcept {
  uint64_t count = 0;
  // The read fails only if there was no notification. The event is then not readable,
  // as after a successful read.
  [[maybe_unused]] const ssize_t taken = read(event.get(), &count, sizeof(count));
}

FileDescriptor WatchProcess(pid_t pid) {
#if defined(SYS_pidfd_open)
  if (pid > 0) {
    return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  }
#endif
  return FileDescriptor();
}

std::string DescribeIfStopped(pid_t pid) {
  // The file contains "<pid> (<name>) <state> ...". The name may contain any character,
  // even ")".
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  // The state is within the first 256 bytes. If the process exits during the read,
  // `read` returns fewer bytes, whereas a stream iterator would throw.
  std::string line(256, '\0');
  file.read(line.data(), static_cast<std::streamsize>(line.size()));
  line.resize(static_cast<size_t>(file.gcount()));
  const size_t name_end = line.rfind(") ");
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return "";
  const char state = line[name_end + 2];
  return state == 'T' || state == 't' ? " (it is stopped)" : "";
}

bool Poll(std::vector<pollfd>& descriptors, Deadline::Clock::time_point until) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - Deadline::Clock::now());
    constexpr int64_t kLongestMs = 1 << 30;
    const int timeout_ms =
        static_cast<int>(std::clamp<int64_t>(left.count(), 0, kLongestMs));
    const int found = poll(descriptors.data(), descriptors.size(), timeout_ms);
    if (found > 0) return true;
    if (found < 0 && errno != EINTR) ThrowSystemError("poll", errno);
    if (found == 0 && timeout_ms < kLongestMs) return false;
  }
}

uint64_t RandomBits() {
  uint64_t bits = 0;
  // getrandom is never interrupted for sizes of up to 256 bytes.
  if (getrandom(&bits, sizeof(bits), 0) != sizeof(bits)) {
    ThrowSystemError("getrandom", errno);
  }
  return bits;
}

}  // namespace jax_ub
