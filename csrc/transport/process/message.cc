#include "transport/process/message.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>
#include <type_traits>

#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr size_t kMaxBody = 8192;
// Delay before a message is sent again if the kernel had no memory for it. No event
// reports when the kernel has memory again.
constexpr std::chrono::milliseconds kResend(10);

}  // namespace

static_assert(std::is_trivially_copyable_v<Hello> && sizeof(Hello) <= kMaxBody);

PoisonMessage PoisonMessageOf(const std::exception_ptr& reason) {
  try {
    std::rethrow_exception(reason);
  } catch (const DeadlineError& error) {
    return {MessageKind::kDeadlinePoison, error.what()};
  } catch (const std::exception& error) {
    return {MessageKind::kPoison, error.what()};
  }
}

Sent SendMessage(const FileDescriptor& connection,
                 MessageKind kind,
                 std::string_view body,
                 const FileDescriptor* passed) {
  std::array<std::byte, sizeof(kind) + kMaxBody> bytes;
  const size_t size = std::min(body.size(), kMaxBody);
  std::memcpy(bytes.data(), &kind, sizeof(kind));
  std::memcpy(bytes.data() + sizeof(kind), body.data(), size);
  return Send(connection, {bytes.data(), sizeof(kind) + size}, passed);
}

Sent SendMessageUntil(const Deadline& deadline,
                      const FileDescriptor& connection,
                      MessageKind kind,
                      std::string_view body,
                      const FileDescriptor* passed) {
  Sent sent = SendMessage(connection, kind, body, passed);
  while (sent == Sent::kFull && !deadline.Expired()) {
    std::this_thread::sleep_for(kResend);
    sent = SendMessage(connection, kind, body, passed);
  }
  return sent;
}

std::string UnsentText(const Deadline& deadline) {
  std::ostringstream text;
  text << " could not be sent a message for " << deadline.timeout_s()
       << " s, because the kernel lacks memory or the process reads no messages";
  return text.str();
}

Message ReceiveMessage(const FileDescriptor& connection) {
  std::array<std::byte, sizeof(MessageKind) + kMaxBody> bytes;
  Received received = Receive(connection, bytes);
  Message message;
  message.arrival = received.arrival;
  if (received.arrival != Arrival::kMessage) return message;
  // The message is too short to have a kind, so its sender does not belong to the
  // group. The handshake rejects the message, because it is not a Hello.
  if (received.size < sizeof(MessageKind)) return message;
  std::memcpy(&message.kind, bytes.data(), sizeof(MessageKind));
  message.body.assign(reinterpret_cast<const char*>(bytes.data()) + sizeof(MessageKind),
                      received.size - sizeof(MessageKind));
  message.passed = std::move(received.passed);
  return message;
}

Sent SendHelloUntil(const Deadline& deadline,
                    const FileDescriptor& connection,
                    const Hello& hello,
                    const FileDescriptor& memory) {
  return SendMessageUntil(deadline, connection, MessageKind::kHello,
                          {reinterpret_cast<const char*>(&hello), sizeof(hello)},
                          memory ? &memory : nullptr);
}

bool ReadHello(const Message& message, Hello* hello) {
  if (message.arrival != Arrival::kMessage || message.kind != MessageKind::kHello ||
      message.body.size() != sizeof(Hello)) {
    return false;
  }
  std::memcpy(hello, message.body.data(), sizeof(Hello));
  hello->setup[Hello::kMaxSetup - 1] = '\0';
  return true;
}

}  // namespace jax_ub
