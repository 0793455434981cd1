// The messages that the processes of a group send each other over their sockets.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "platform/deadline.h"
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

// States that a process has closed its communicator. The error messages of waits that
// depend on the process have this text after the name of the process.
inline constexpr char kCloseText[] =
    "closed its communicator, as ub.destroy_ub and the end of a program do";

// The body of a kHello message. It is sent as raw bytes, because both processes run on
// the same host.
struct Hello {
  static constexpr size_t kMaxSetup = 2048;
  // A random number that the receiver has sent to its peers during bootstrap. It proves
  // that the sender is a peer.
  uint64_t token = 0;
  int32_t process = 0;  // the sender's process number
  int32_t pid = 0;      // the sender's pid in its own pid namespace
  // A description of the group and the memory layout, which must be equal on both
  // sides.
  char setup[kMaxSetup] = {};
};

struct Message {
  Arrival arrival = Arrival::kNothing;
  // The members below are set only if `arrival` is kMessage.
  MessageKind kind = MessageKind::kClose;
  std::string body;
  FileDescriptor passed;  // the descriptor that came with the message, if any
};

// A message that sends a failure to the peers. Its kind tells the peers whether the
// failure is a DeadlineError, so that they raise the same type of error.
struct PoisonMessage {
  MessageKind kind = MessageKind::kPoison;
  std::string text;
};
PoisonMessage PoisonMessageOf(const std::exception_ptr& reason);

// Sends a message and, if `passed` is not null, a file descriptor. Never blocks.
// Truncates `body` to 8 KiB.
Sent SendMessage(const FileDescriptor& connection,
                 MessageKind kind,
                 std::string_view body,
                 const FileDescriptor* passed = nullptr);
// Sends a message. While the result is kFull, repeats it until the deadline.
Sent SendMessageUntil(const Deadline& deadline,
                      const FileDescriptor& connection,
                      MessageKind kind,
                      std::string_view body,
                      const FileDescriptor* passed = nullptr);
Message ReceiveMessage(const FileDescriptor& connection);

// Returns the end of an error text about a message that could not be sent before the
// deadline.
std::string UnsentText(const Deadline& deadline);

// Sends a Hello with `memory`, the file descriptor of this process's memory, which may
// be empty. Repeats it until the deadline, as SendMessageUntil does.
Sent SendHelloUntil(const Deadline& deadline,
                    const FileDescriptor& connection,
                    const Hello& hello,
                    const FileDescriptor& memory);
// Decodes a Hello. Returns false if the message is of another kind.
bool ReadHello(const Message& message, Hello* hello);

}  // namespace jax_ub
