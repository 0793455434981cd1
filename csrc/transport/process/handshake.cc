#include "transport/process/handshake.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "platform/error.h"
#include "platform/unix_socket.h"

namespace jax_ub {

namespace {

// Delay before this process connects again to a listener whose queue was full.
constexpr std::chrono::milliseconds kRedial(10);

std::string RandomName() {
  return "jax_ub-" + std::to_string(RandomBits()) + "-" + std::to_string(RandomBits());
}

}  // namespace

Endpoint::Endpoint()
    : address_{.address = RandomName(), .token = RandomBits()},
      listener_(ListenAt(address_.address)) {}

Handshake::Handshake(const Endpoint& endpoint,
                     const ProcessGroup& group,
                     const std::map<int, PeerAddress>& peers,
                     std::string setup,
                     const FileDescriptor& memory,
                     Take take)
    : endpoint_(endpoint),
      group_(group),
      peers_(peers),
      setup_(setup.substr(0, Hello::kMaxSetup - 1)),
      memory_(memory),
      take_(std::move(take)),
      stages_(group.num_processes(), Stage::kUndialed),
      connected_peers_(group.num_processes()) {
  connected_peers_[group.own()].pid = getpid();
}

std::vector<ConnectedPeer> Handshake::Run(double timeout_s) {
  const Deadline deadline = Deadline::After(timeout_s);
  try {
    return RunUntil(deadline);
  } catch (const DeadlineError& error) {
    BroadcastFailure(MessageKind::kDeadlinePoison, error.what());
    throw;
  } catch (const CommunicatorError& error) {
    BroadcastFailure(MessageKind::kPoison, error.what());
    throw;
  } catch (const SystemError& error) {
    const std::string text = group_.ErrorPrefix() + error.what();
    BroadcastFailure(MessageKind::kPoison, text);
    throw CommunicatorError(text);
  }
}

std::vector<ConnectedPeer> Handshake::RunUntil(const Deadline& deadline) {
  const int num_processes = group_.num_processes();
  const auto is_done = [&] {
    for (int process_index = 0; process_index < num_processes; ++process_index) {
      if (IsWaited(process_index)) return false;
    }
    return true;
  };
  while (!is_done()) {
    if (deadline.Expired()) FailExpired(deadline.timeout_s());
    const bool dialed = DialAll(deadline);
    // If a process is lost, the handshake fails only after all pending messages were
    // read, because one of them may have the reason.
    const bool is_lost = !loss_.empty();
    std::vector<pollfd> polled = {{endpoint_.listener().get(), POLLIN, 0}};
    const size_t num_unidentified = unidentified_.size();
    for (const FileDescriptor& unidentified : unidentified_) {
      polled.push_back({unidentified.get(), POLLIN, 0});
    }
    for (const ConnectedPeer& peer : connected_peers_) {
      // poll() ignores negative descriptors, so peers that have closed are not polled.
      const int descriptor = peer.has_closed ? -1 : peer.connection.get();
      polled.push_back({descriptor, POLLIN, 0});
    }
    const auto now = Deadline::Clock::now();
    const bool is_readable =
        Poll(polled, is_lost  ? now
                     : dialed ? deadline.time()
                              : std::min(deadline.time(), now + kRedial));
    if (is_lost && !is_readable) Fail(loss_);
    for (int process_index = 0; process_index < num_processes; ++process_index) {
      if (polled[1 + num_unidentified + process_index].revents != 0)
        HandleMessage(process_index);
    }
    for (size_t i = num_unidentified; i > 0; --i) {
      if (polled[i].revents != 0) HandleUnidentified(i - 1, deadline);
    }
    if (polled[0].revents != 0) AcceptAll();
  }
  return std::move(connected_peers_);
}

// Connects to all peers to which this process has not connected yet. Returns false if
// some peers were busy. DialAll must then be called again.
bool Handshake::DialAll(const Deadline& deadline) {
  bool dialed = true;
  for (int process_index = 0; process_index < group_.num_processes(); ++process_index) {
    if (!IsReached(process_index) || stages_[process_index] != Stage::kUndialed)
      continue;
    DialOne(process_index, deadline);
    if (stages_[process_index] == Stage::kUndialed) dialed = false;
  }
  return dialed;
}

void Handshake::DialOne(int process_index, const Deadline& deadline) {
  FileDescriptor connection;
  switch (Dial(peers_.at(group_.process_ids()[process_index]).address, &connection)) {
    case DialResult::kBusy:
      return;
    case DialResult::kNoProcess:
      MarkLost(process_index, " failed or exited before it connected");
      return;
    case DialResult::kConnected:
      break;
  }
  const Credentials credentials = PeerCredentials(connection);
  if (credentials.uid != geteuid()) {
    Fail(group_.Describe(process_index, 0) + " is of user " +
         std::to_string(credentials.uid) + ", this process of user " +
         std::to_string(geteuid()));
  }
  ConnectedPeer& peer = connected_peers_[process_index];
  peer.seen_pid = credentials.pid;
  peer.connection = std::move(connection);
  if (process_index > group_.own()) {
    stages_[process_index] = Stage::kLivenessSocket;
    return;
  }
  Greet(process_index, deadline);
  stages_[process_index] = Stage::kHelloSent;
}

void Handshake::Greet(int process_index, const Deadline& deadline) {
  // Sent::kNo is ignored. It means that the peer has just died, which the next read
  // reports as Arrival::kEnd.
  const Sent sent = SendHelloUntil(deadline, connected_peers_[process_index].connection,
                                   HelloTo(process_index), memory_);
  if (sent == Sent::kFull) {
    throw DeadlineError(group_.ErrorPrefix() + group_.Describe(process_index, 0) +
                        UnsentText(deadline));
  }
}

void Handshake::AcceptAll() {
  while (FileDescriptor connection = Accept(endpoint_.listener())) {
    if (PeerCredentials(connection).uid == geteuid()) {
      unidentified_.push_back(std::move(connection));
    } else {
      ++num_rejected_;
    }
  }
}

// Handles the first message on an accepted connection, which identifies the sender.
// Closes the connection if the message lacks the token of this process.
void Handshake::HandleUnidentified(size_t index, const Deadline& deadline) {
  Message message = ReceiveMessage(unidentified_[index]);
  if (message.arrival == Arrival::kNothing) return;
  FileDescriptor connection = std::move(unidentified_[index]);
  unidentified_.erase(unidentified_.begin() + static_cast<std::ptrdiff_t>(index));
  // The connection was a liveness socket, which the peer has closed because the two
  // processes are connected.
  if (message.arrival == Arrival::kEnd) return;
  Hello hello;
  const bool is_hello = ReadHello(message, &hello);
  const std::vector<int>& numbers = group_.process_ids();
  const auto process_index = static_cast<int>(
      std::find(numbers.begin(), numbers.end(), hello.process) - numbers.begin());
  if (!is_hello || hello.token != endpoint_.address().token ||
      process_index == group_.own() || process_index >= group_.num_processes() ||
      !IsWaited(process_index)) {
    ++num_rejected_;
    return;
  }
  ConnectedPeer& peer = connected_peers_[process_index];
  if (process_index < group_.own()) {
    // In a handshake, the process with the higher index sends the first Hello. Here,
    // the process with the lower index has sent one. This means that it has failed, and
    // that its next message has the reason.
    peer.connection = std::move(connection);
    stages_[process_index] = Stage::kLivenessSocket;
    return;
  }
  peer.seen_pid = PeerCredentials(connection).pid;
  peer.connection = std::move(connection);
  stages_[process_index] = Stage::kHelloSent;
  Check(process_index, hello);
  Greet(process_index, deadline);
  Connect(process_index, hello, std::move(message.passed));
}

void Handshake::HandleMessage(int process_index) {
  ConnectedPeer& peer = connected_peers_[process_index];
  Message message = ReceiveMessage(peer.connection);
  if (message.arrival == Arrival::kNothing) return;
  if (message.arrival == Arrival::kEnd) {
    const char* how =
        stages_[process_index] == Stage::kConnected ? " died before all had connected"
        : stages_[process_index] == Stage::kHelloSent
            ? " rejected this process, failed or exited before it connected"
            : " failed or exited before it connected";
    MarkLost(process_index, how);
    return;
  }
  switch (message.kind) {
    case MessageKind::kPoison:
      throw CommunicatorError(message.body);
    case MessageKind::kDeadlinePoison:
      throw DeadlineError(message.body);
    case MessageKind::kDeathNotice:
      return;  // the lost process's own connection reports it too
    case MessageKind::kSignature:
      return;  // sent only after the handshake
    case MessageKind::kClose:
      peer.has_closed = true;
      return;
    case MessageKind::kSetupMessage:
    case MessageKind::kSetupDescriptor:
      if (stages_[process_index] == Stage::kConnected) {
        peer.early_messages.push_back(std::move(message));
      }
      return;
    case MessageKind::kHello:
      break;
  }
  Hello hello;
  if (stages_[process_index] != Stage::kHelloSent || !ReadHello(message, &hello) ||
      hello.token != endpoint_.address().token) {
    Fail(group_.Describe(process_index, 0) + " answered with a wrong token");
  }
  Check(process_index, hello);
  Connect(process_index, hello, std::move(message.passed));
}

void Handshake::Check(int process_index, const Hello& hello) {
  connected_peers_[process_index].pid = hello.pid;
  if (hello.setup != setup_) {
    Fail(group_.Describe(process_index, hello.pid) + " has " + hello.setup + "; " +
         group_.Describe(group_.own(), getpid()) + " has " + setup_);
  }
}

void Handshake::Connect(int process_index, const Hello& hello, FileDescriptor memory) {
  if (take_) take_(process_index, connected_peers_[process_index], std::move(memory));
  stages_[process_index] = Stage::kConnected;
}

Hello Handshake::HelloTo(int process_index) const {
  Hello hello;
  const int number = group_.process_ids()[process_index];
  hello.token = peers_.at(number).token;
  hello.process = group_.process_ids()[group_.own()];
  hello.pid = getpid();
  std::memcpy(hello.setup, setup_.data(), setup_.size());
  return hello;
}

void Handshake::MarkLost(int process_index, const std::string& how) {
  if (loss_.empty())
    loss_ = group_.Describe(process_index, connected_peers_[process_index].pid) + how;
  connected_peers_[process_index].connection = {};
  stages_[process_index] = Stage::kLost;
}

// Sends the failure to all peers. On a liveness socket, first sends a Hello that
// identifies this process. Also sends the failure on accepted connections that have
// received nothing yet, because their senders may be peers.
void Handshake::BroadcastFailure(MessageKind kind, const std::string& text) {
  for (int process_index = 0; process_index < group_.num_processes(); ++process_index) {
    const FileDescriptor& connection = connected_peers_[process_index].connection;
    if (!connection) continue;
    if (stages_[process_index] == Stage::kLivenessSocket)
      SendHelloUntil(Deadline::After(0), connection, HelloTo(process_index), {});
    SendMessage(connection, kind, text);
  }
  try {
    AcceptAll();
  } catch (const SystemError&) {
    // The error is ignored. Connections that cannot be accepted get no reason, and are
    // closed when the endpoint closes.
  }
  for (const FileDescriptor& unidentified : unidentified_)
    SendMessage(unidentified, kind, text);
}

void Handshake::Fail(const std::string& text) const {
  throw CommunicatorError(group_.ErrorPrefix() + text);
}

void Handshake::FailExpired(double timeout_s) const {
  std::ostringstream text;
  text << group_.ErrorPrefix() << group_.Describe(group_.own(), getpid()) << " waited "
       << timeout_s << " s for ";
  bool is_first = true;
  for (int process_index = 0; process_index < group_.num_processes(); ++process_index) {
    if (!IsWaited(process_index)) continue;
    text << (is_first ? "" : " and ") << group_.Describe(process_index, 0);
    is_first = false;
  }
  text << " to connect";
  if (num_rejected_ > 0) {
    text << "; " << num_rejected_ << " connections of other users or without the token "
         << "were rejected";
  }
  throw DeadlineError(text.str());
}

}  // namespace jax_ub
