#include "platform/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

// Maximum number of processes that may connect before this process accepts the first
// connection.
constexpr int kBacklog = 256;

struct Address {
  explicit Address(const std::string& name) {
    // A name in the abstract namespace begins with a zero byte, and its end is
    // determined by the length of the address.
    if (name.empty() || name.size() + 1 > sizeof(address.sun_path)) {
      throw SystemError("'" + name + "' is no name for a socket");
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address = {};
  socklen_t size = 0;
};

FileDescriptor NewSocket() {
  FileDescriptor made(
      socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) ThrowSystemError("socket", errno);
  return made;
}

// Memory for the file descriptor of a message. The kernel drops received descriptors
// that do not fit.
union Control {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr alignment;
};

FileDescriptor TakeDescriptor(msghdr& header) {
  FileDescriptor taken;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr;
       part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t num_passed = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < num_passed; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      taken = FileDescriptor(descriptor);
    }
  }
  return taken;
}

}  // namespace

FileDescriptor ListenAt(const std::string& name) {
  FileDescriptor listener = NewSocket();
  const Address address(name);
  if (bind(listener.get(), address.get(), address.size) != 0) {
    ThrowSystemError("bind", errno);
  }
  if (listen(listener.get(), kBacklog) != 0) ThrowSystemError("listen", errno);
  return listener;
}

FileDescriptor Accept(const FileDescriptor& listener) {
  FileDescriptor connection(
      accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    ThrowSystemError("accept", errno);
  }
  return connection;
}

DialResult Dial(const std::string& name, FileDescriptor* connection) {
  FileDescriptor made = NewSocket();
  const Address address(name);
  if (connect(made.get(), address.get(), address.size) == 0) {
    *connection = std::move(made);
    return DialResult::kConnected;
  }
  if (errno == ECONNREFUSED) return DialResult::kNoProcess;
  if (errno != EAGAIN && errno != EINTR) ThrowSystemError("connect", errno);
  return DialResult::kBusy;
}

Credentials PeerCredentials(const FileDescriptor& connection) {
  ucred found = {};
  socklen_t size = sizeof(found);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &found, &size) != 0) {
    ThrowSystemError("getsockopt SO_PEERCRED", errno);
  }
  return {found.pid, found.uid};
}

Sent Send(const FileDescriptor& connection,
          std::span<const std::byte> message,
          const FileDescriptor* passed) noexcept {
  iovec part = {const_cast<std::byte*>(message.data()), message.size()};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  Control control = {};
  if (passed != nullptr) {
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof(control.bytes);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &passed->get(), sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(connection.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    const bool is_short_of_memory = errno == ENOBUFS || errno == ENOMEM;
    return errno == EAGAIN || is_short_of_memory ? Sent::kFull : Sent::kNo;
  }
  return Sent::kYes;  // SOCK_SEQPACKET sends a message completely or not at all
}

Received Receive(const FileDescriptor& connection, std::span<std::byte> buffer) {
  iovec part = {buffer.data(), buffer.size()};
  Control control = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  ssize_t size = 0;
  do {
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof(control.bytes);
    size = recvmsg(connection.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // ECONNRESET means that the peer exited without reading all messages. The kernel
    // reports it once, before the messages that the peer has sent, so recvmsg is
    // repeated.
  } while (size < 0 && (errno == EINTR || errno == ECONNRESET));
  if (size < 0 && errno == EAGAIN) return {};
  if (size < 0) ThrowSystemError("recvmsg", errno);
  Received received;
  received.arrival = size == 0 ? Arrival::kEnd : Arrival::kMessage;
  received.size = static_cast<size_t>(size);
  received.passed = TakeDescriptor(header);
  return received;
}

}  // namespace jax_ub
