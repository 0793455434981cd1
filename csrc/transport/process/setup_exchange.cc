#include "transport/process/setup_exchange.h"

#include <unistd.h>

#include <exception>
#include <sstream>
#include <utility>

#include "platform/error.h"
#include "transport/process/message.h"

namespace jax_ub {

SetupExchange::SetupExchange(const ProcessGroup& group,
                             std::vector<ConnectedPeer>& connected_peers)
    : group_(group), connected_peers_(connected_peers) {}

bool SetupExchange::IsReached(int process_index) const {
  return static_cast<bool>(connected_peers_[process_index].connection);
}

// Sends one setup message to a peer. The first byte of its body is the number of
// kSetupDescriptor messages that follow, one for each file descriptor.
void SetupExchange::Send(int process_index,
                         const SetupMessage& setup,
                         const Deadline& deadline) const {
  const FileDescriptor& connection = connected_peers_[process_index].connection;
  std::string body(1, static_cast<char>(setup.passed.size()));
  body += setup.text;
  // Sent::kNo is ignored. It means that the peer has just died, which the next read
  // reports as Arrival::kEnd.
  const auto send = [&](MessageKind kind, const std::string& text,
                        const FileDescriptor* passed) {
    if (SendMessageUntil(deadline, connection, kind, text, passed) == Sent::kFull) {
      throw DeadlineError(
          group_.ErrorPrefix() +
          group_.Describe(process_index, connected_peers_[process_index].pid) +
          UnsentText(deadline));
    }
  };
  send(MessageKind::kSetupMessage, body, nullptr);
  for (const FileDescriptor& passed : setup.passed) {
    send(MessageKind::kSetupDescriptor, "", &passed);
  }
}

std::vector<SetupMessage> SetupExchange::Exchange(SetupMessage own,
                                                  const Deadline& deadline) {
  const int num_processes = group_.num_processes();
  for (int process_index = 0; process_index < num_processes; ++process_index) {
    if (IsReached(process_index)) Send(process_index, own, deadline);
  }
  std::vector<SetupMessage> setups(num_processes);
  std::vector<int> num_missing(num_processes, kMissing);
  setups[group_.own()] = std::move(own);
  for (;;) {
    std::vector<pollfd> polled;
    std::string missing;
    for (int process_index = 0; process_index < num_processes; ++process_index) {
      if (!IsReached(process_index)) continue;
      Receive(process_index, setups[process_index], num_missing[process_index]);
      if (num_missing[process_index] == 0) continue;
      polled.push_back({connected_peers_[process_index].connection.get(), POLLIN, 0});
      if (!missing.empty()) missing.append(" and ");
      missing.append(
          group_.Describe(process_index, connected_peers_[process_index].pid));
    }
    if (polled.empty()) return setups;
    if (!Poll(polled, deadline.time())) {
      std::ostringstream text;
      text << group_.ErrorPrefix() << group_.Describe(group_.own(), getpid())
           << " waited " << deadline.timeout_s() << " s for " << missing
           << " to share memory";
      throw DeadlineError(text.str());
    }
  }
}

void SetupExchange::Receive(int process_index, SetupMessage& setup, int& num_missing) {
  ConnectedPeer& peer = connected_peers_[process_index];
  // The loops stop after one complete setup message, because further messages belong to
  // the next Exchange.
  while (num_missing != 0 && !peer.early_messages.empty()) {
    Message message = std::move(peer.early_messages.front());
    peer.early_messages.pop_front();
    Take(process_index, std::move(message), setup, num_missing);
  }
  while (num_missing != 0) {
    Message message = ReceiveMessage(peer.connection);
    if (message.arrival == Arrival::kNothing) return;
    Take(process_index, std::move(message), setup, num_missing);
  }
}

void SetupExchange::Take(int process_index,
                         Message message,
                         SetupMessage& setup,
                         int& num_missing) const {
  const std::string name =
      group_.Describe(process_index, connected_peers_[process_index].pid);
  if (message.arrival == Arrival::kEnd) {
    Fail(name + " died before all had shared their memory");
  }
  switch (message.kind) {
    case MessageKind::kPoison:
      throw CommunicatorError(message.body);
    case MessageKind::kDeadlinePoison:
      throw DeadlineError(message.body);
    case MessageKind::kSetupMessage:
      num_missing =
          message.body.empty() ? 0 : static_cast<unsigned char>(message.body[0]);
      setup.text = message.body.empty() ? "" : message.body.substr(1);
      return;
    case MessageKind::kSetupDescriptor:
      if (!message.passed) {
        Fail("a descriptor of " + name +
             " did not arrive: are this process's used up (ulimit -n)?");
      }
      setup.passed.push_back(std::move(message.passed));
      --num_missing;
      return;
    case MessageKind::kClose:
      Fail(name + " left before all had shared their memory");
    case MessageKind::kDeathNotice:  // the lost process's own connection reports it too
    case MessageKind::kHello:
    case MessageKind::kSignature:  // sent only after the last Exchange
      return;
  }
}

void SetupExchange::BroadcastFailure(const std::exception_ptr& reason) const {
  const PoisonMessage poison_message = PoisonMessageOf(reason);
  for (const ConnectedPeer& peer : connected_peers_) {
    if (peer.connection)
      SendMessage(peer.connection, poison_message.kind, poison_message.text);
  }
}

void SetupExchange::Fail(const std::string& text) const {
  throw CommunicatorError(group_.ErrorPrefix() + text);
}

}  // namespace jax_ub
