// The messages that the processes of a group send each other over their sockets.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "platform/file_descriptor.h"
#include "platform/unix_socket.h"

namespace jax_ub {

enum class MessageKind : uint32_t {
  kHello = 0x6a617875,  // identifies the sender; may pass its memory
  kPoison,              // the communicator failed; the body is the reason
  kDeadlinePoison,      // the same, where the reason is a DeadlineError
  kDeathNotice,         // another process died; the body is its process index
  kClose,               // the sender closes its communicator in order
  kSetupMessage,        // a message of SetupExchange
  kSetupDescriptor,     // passes one file descriptor of the preceding kSetupMessage
  kSignature,           // a GpuCallSignature (cuda/signature_table.h)
};

// How errors describe a process that has sent its close message, for waits that still
// depend on it.
inline constexpr char kCloseText[] =
    "closed its communicator, as ub.destroy_ub and the end of a program do";

// The body of kHello. Sent as raw bytes, because both processes run on the same host
// and have the same byte order.
struct Hello {
  static constexpr size_t kMaxSetup = 2048;
  // The receiver's token. The sender knows it from bootstrap, which proves that the
  // sender belongs to the group.
  uint64_t token = 0;
  int32_t process = 0;  // the sender's process number
  int32_t pid = 0;      // the sender's pid in its own pid namespace
  // Describes the group and the memory layout. Must be equal on both sides.
  char setup[kMaxSetup] = {};
};

struct Message {
  Arrival arrival = Arrival::kNothing;
  // The fields below are set only if `arrival` is kMessage.
  MessageKind kind = MessageKind::kClose;
  std::string body;
  FileDescriptor passed;  // the descriptor that came with the message, if any
};

// The message that sends a failure to the peers. A DeadlineError has a separate kind,
// so that peers raise the same type of error.
struct PoisonMessage {
  MessageKind kind = MessageKind::kPoison;
  std::string text;
};
PoisonMessage PoisonMessageOf(const std::exception_ptr& reason);

// Sends a message, with the descriptor `passed` if it is not null. Never blocks.
// Truncates `body` to 8 KiB.
Sent SendMessage(const FileDescriptor& connection,
                 MessageKind kind,
                 std::string_view body,
                 const FileDescriptor* passed = nullptr);
Message ReceiveMessage(const FileDescriptor& connection);

// Sends a Hello with the descriptor of the sender's memory. `memory` may be empty.
void SendHello(const FileDescriptor& connection,
               const Hello& hello,
               const FileDescriptor& memory);
// Reads a Hello from a message. Returns false if the message is not a Hello.
bool ReadHello(const Message& message, Hello* hello);

}  // namespace jax_ub
