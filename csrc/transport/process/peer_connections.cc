#include "transport/process/peer_connections.h"

#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

PeerConnections::PeerConnections(std::vector<Peer> peers) {
  for (Peer& peer : peers) {
    Watched watched;
    watched.process = peer.process;
    watched.connection = std::move(peer.connection);
    // The peer's process is watched in addition to its connection. If the process has
    // forked and dies, a child may keep the connection open.
    watched.life = WatchProcess(peer.pid);
    watched_.push_back(std::move(watched));
  }
}

void PeerConnections::Watch(const ProcessGroup& group,
                            std::function<void(const PeerEvent&)> on_event,
                            std::function<void(const std::exception_ptr&)> on_failure) {
  on_event_ = std::move(on_event);
  on_failure_ = std::move(on_failure);
  try {
    wake_ = NewEvent();
    thread_ = std::make_unique<Thread>([this] { Run(); });
  } catch (const SystemError& error) {
    const std::string text = group.ErrorPrefix() +
                             group.Describe(group.own(), getpid()) +
                             " failed: " + error.what();
    Broadcast(MessageKind::kPoison, text);
    throw CommunicatorError(text);
  }
}

PeerConnections::~PeerConnections() { Close(); }

void PeerConnections::Broadcast(MessageKind kind, std::string_view body) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return;
  bool is_rest = false;
  for (Watched& peer : watched_) {
    if (peer.unsent.empty() &&
        SendMessage(peer.connection, kind, body) != Sent::kFull) {
      continue;
    }
    peer.unsent.emplace_back(kind, body);
    is_rest = true;
  }
  if (is_rest) NotifyEvent(wake_);
}

void PeerConnections::FlushUnsent(Watched& peer) {
  std::lock_guard lock(mutex_);
  while (!peer.unsent.empty()) {
    const auto& [kind, body] = peer.unsent.front();
    if (SendMessage(peer.connection, kind, body) == Sent::kFull) return;
    peer.unsent.pop_front();
  }
}

void PeerConnections::Close() {
  if (!thread_) return;
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  NotifyEvent(wake_);
  thread_->Join();
  thread_.reset();
  std::lock_guard lock(mutex_);
  watched_.clear();
}

void PeerConnections::DetachAfterFork() {
  // A forked child does not have the thread, so it cannot join the thread. It must not
  // lock the mutex either: if another thread of the parent held the mutex during the
  // fork, the mutex stays locked in the child.
  static_cast<void>(thread_.release());
  watched_.clear();
}

void PeerConnections::Run() noexcept {
  try {
    RunUntilStopped();
  } catch (const std::exception& error) {
    on_failure_(std::current_exception());
    for (Watched& peer : watched_) SetLost(peer, error.what());
  }
}

void PeerConnections::SetLost(Watched& peer, const char* why) noexcept {
  try {
    SetLeft(peer, MessageKind::kDeathNotice,
            std::string("can no longer be watched: ") + why);
  } catch (const std::exception&) {
    // std::bad_alloc is ignored, because on_failure_ has already reported that the
    // thread has failed. A call that waits for this peer fails at its deadline at the
    // latest.
  }
}

void PeerConnections::RunUntilStopped() {
  for (;;) {
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      if (is_closed_) return;
      for (const Watched& peer : watched_) {
        int events = peer.has_closed ? 0 : POLLIN;
        if (!peer.unsent.empty()) events |= POLLOUT;
        // poll() ignores negative descriptors. The descriptor of an empty `life` is
        // negative.
        polled.push_back(
            {events != 0 ? peer.connection.get() : -1, static_cast<short>(events), 0});
        polled.push_back({peer.has_closed ? -1 : peer.life.get(), POLLIN, 0});
      }
    }
    Poll(polled);
    if (polled[0].revents != 0) ClearEvent(wake_);
    for (size_t i = 0; i < watched_.size(); ++i) {
      const bool has_input = polled[1 + 2 * i].revents != 0;
      const bool has_died = polled[2 + 2 * i].revents != 0;
      if (has_input) FlushUnsent(watched_[i]);
      if (has_input || has_died) Receive(watched_[i], has_died);
    }
  }
}

// Reads all messages of a peer. If `has_died` is true, reports the death of the peer
// after its last message.
void PeerConnections::Receive(Watched& peer, bool has_died) {
  while (!peer.has_closed) {
    Message message = ReceiveMessage(peer.connection);
    if (message.arrival == Arrival::kEnd ||
        (message.arrival == Arrival::kNothing && has_died)) {
      SetLeft(peer, MessageKind::kDeathNotice, "died");
      return;
    }
    if (message.arrival == Arrival::kNothing) return;
    switch (message.kind) {
      case MessageKind::kDeathNotice:
        on_event_({std::atoi(message.body.c_str()), message.kind, "died"});
        break;
      case MessageKind::kClose:
        SetLeft(peer, message.kind, "");
        break;
      default:
        on_event_({peer.process, message.kind, std::move(message.body)});
    }
  }
}

void PeerConnections::SetLeft(Watched& peer, MessageKind kind, const std::string& how) {
  if (peer.has_closed) return;
  peer.has_closed = true;
  on_event_({peer.process, kind, how});
}

}  // namespace jax_ub
