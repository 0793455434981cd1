// What processes tell each other over their sockets.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "platform/file_descriptor.h"
#include "platform/unix_socket.h"

namespace jax_ub {

enum class MessageKind : uint32_t {
  kHello = 0x6a617875,  // "who I am; here is my memory"
  kPoison,              // "it failed, because ..."
  kDeadlinePoison,      // "I waited too long, for ..."
  kDeathNotice,         // "process <place> died"
  kClose,               // "I have done my part and leave"
  kSetupMessage,        // what notes.h exchanges
  kSetupDescriptor,     // a descriptor that belongs to it
  kSignature,           // "by this call I mean ...", where ranks are on GPUs
};

// What a process did that said goodbye, in the errors of those who still waited for it.
inline constexpr char kCloseText[] =
    "closed its communicator, as ub.destroy_ub and the end of a program do";

// The body of kHello. Of one host, so of one byte order.
struct Hello {
  static constexpr size_t kMaxSetup = 2048;
  uint64_t token = 0;          // the receiver's: what bootstrap told the sender alone
  int32_t process = 0;         // number
  int32_t pid = 0;             // as the process knows itself
  char setup[kMaxSetup] = {};  // must be equal: names what both sides shall share
};

struct Message {
  Arrival arrival = Arrival::kNothing;
  MessageKind kind = MessageKind::kClose;  // if one has arrived
  std::string body;
  FileDescriptor passed;
};

// Poison, as it is told: of a deadline by a kind of its own.
struct PoisonMessage {
  MessageKind kind = MessageKind::kPoison;
  std::string text;
};
PoisonMessage PoisonMessageOf(const std::exception_ptr& reason);

// Longer bodies are cut.
Sent SendMessage(const FileDescriptor& connection,
                 MessageKind kind,
                 std::string_view body,
                 const FileDescriptor* passed = nullptr);
Message ReceiveMessage(const FileDescriptor& connection);

// With the descriptor of the sender's memory, if it has one.
void SendHello(const FileDescriptor& connection,
               const Hello& hello,
               const FileDescriptor& memory);
// False when the message is none.
bool ReadHello(const Message& message, Hello* hello);

}  // namespace jax_ub
