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

bool SetupExchange::IsReached(int place) const {
  return static_cast<bool>(connected_peers_[place].connection);
}

// The first byte of a kSetupMessage's body is the number of kSetupDescriptor messages
// that follow it.
void SetupExchange::Send(int place, const SetupMessage& note) const {
  const FileDescriptor& connection = connected_peers_[place].connection;
  std::string body(1, static_cast<char>(note.passed.size()));
  body += note.text;
  // If the peer has just died, the end of the connection reports it.
  SendMessage(connection, MessageKind::kSetupMessage, body);
  for (const FileDescriptor& passed : note.passed) {
    SendMessage(connection, MessageKind::kSetupDescriptor, "", &passed);
  }
}

std::vector<SetupMessage> SetupExchange::Exchange(SetupMessage own,
                                                  const Deadline& deadline) {
  const int num_processes = group_.num_processes();
  for (int place = 0; place < num_processes; ++place) {
    if (IsReached(place)) Send(place, own);
  }
  std::vector<SetupMessage> notes(num_processes);
  std::vector<int> num_missing(num_processes, kMissing);
  notes[group_.own()] = std::move(own);
  for (;;) {
    std::vector<pollfd> polled;
    std::string missing;
    for (int place = 0; place < num_processes; ++place) {
      if (!IsReached(place)) continue;
      Hear(place, notes[place], num_missing[place]);
      if (num_missing[place] == 0) continue;
      polled.push_back({connected_peers_[place].connection.get(), POLLIN, 0});
      if (!missing.empty()) missing.append(" and ");
      missing.append(group_.Describe(place, connected_peers_[place].pid));
    }
    if (polled.empty()) return notes;
    if (!Poll(polled, deadline.time())) {
      std::ostringstream text;
      text << group_.ErrorPrefix() << group_.Describe(group_.own(), getpid())
           << " waited " << deadline.timeout_s() << " s for " << missing
           << " to share memory";
      throw DeadlineError(text.str());
    }
  }
}

void SetupExchange::Hear(int place, SetupMessage& note, int& num_missing) {
  ConnectedPeer& peer = connected_peers_[place];
  // Messages after a complete setup message belong to the next Exchange.
  while (num_missing != 0 && !peer.early_messages.empty()) {
    Message message = std::move(peer.early_messages.front());
    peer.early_messages.pop_front();
    Take(place, std::move(message), note, num_missing);
  }
  while (num_missing != 0) {
    Message message = ReceiveMessage(peer.connection);
    if (message.arrival == Arrival::kNothing) return;
    Take(place, std::move(message), note, num_missing);
  }
}

void SetupExchange::Take(int place,
                         Message message,
                         SetupMessage& note,
                         int& num_missing) const {
  const std::string name = group_.Describe(place, connected_peers_[place].pid);
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
      note.text = message.body.empty() ? "" : message.body.substr(1);
      return;
    case MessageKind::kSetupDescriptor:
      if (!message.passed) {
        Fail("a descriptor of " + name +
             " did not arrive: are this process's used up (ulimit -n)?");
      }
      note.passed.push_back(std::move(message.passed));
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
  const PoisonMessage told = PoisonMessageOf(reason);
  for (const ConnectedPeer& peer : connected_peers_) {
    if (peer.connection) SendMessage(peer.connection, told.kind, told.text);
  }
}

void SetupExchange::Fail(const std::string& text) const {
  throw CommunicatorError(group_.ErrorPrefix() + text);
}

}  // namespace jax_ub
