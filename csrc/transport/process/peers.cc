#include "transport/process/peers.h"

#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

// Signals are for the threads of the program.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Peers::Peers(std::vector<Peer> peers) : stop_(NewEvent()) {
  for (Peer& peer : peers) {
    Watched watched;
    watched.process = peer.process;
    watched.connection = std::move(peer.connection);
    // A child of fork that outlives the peer keeps its end of the connection open.
    watched.life = WatchProcess(peer.pid);
    watched_.push_back(std::move(watched));
  }
}

void Peers::Watch(std::function<void(const PeerNews&)> tell) {
  tell_ = std::move(tell);
  const BlockedSignals blocked;
  thread_ = std::make_unique<std::thread>([this] { Run(); });
}

Peers::~Peers() { Close(); }

void Peers::Say(MessageKind kind, std::string_view body) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return;
  for (const Watched& peer : watched_) SendMessage(peer.connection, kind, body);
}

void Peers::Close() {
  if (!thread_) return;
  NotifyEvent(stop_);
  thread_->join();
  thread_.reset();
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  watched_.clear();
}

void Peers::Forget() {
  // Its thread does not exist here, and nobody knows who held the mutex.
  static_cast<void>(thread_.release());
  watched_.clear();
}

void Peers::Run() noexcept {
  try {
    RunUntilStopped();
  } catch (const SystemError& error) {
    for (Watched& peer : watched_) {
      SetLeft(peer, PeerNews::kLost, std::string("is out of sight: ") + error.what());
    }
  }
}

void Peers::RunUntilStopped() {
  for (;;) {
    std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}};
    std::vector<size_t> whose;
    for (size_t i = 0; i < watched_.size(); ++i) {
      if (watched_[i].has_left) continue;
      // One of them may be none: poll passes over negative descriptors.
      polled.push_back({watched_[i].connection.get(), POLLIN, 0});
      polled.push_back({watched_[i].life.get(), POLLIN, 0});
      whose.push_back(i);
    }
    Poll(polled);
    if (polled[0].revents != 0) return;
    for (size_t i = 0; i < whose.size(); ++i) {
      const bool has_news = polled[1 + 2 * i].revents != 0;
      const bool has_died = polled[2 + 2 * i].revents != 0;
      if (has_news || has_died) Hear(watched_[whose[i]], has_died);
    }
  }
}

// What a process said before it died comes first.
void Peers::Hear(Watched& peer, bool has_died) {
  while (!peer.has_left) {
    Message message = ReceiveMessage(peer.connection);
    if (message.arrival == Arrival::kEnd ||
        (message.arrival == Arrival::kNothing && has_died)) {
      SetLeft(peer, PeerNews::kLost, "died");
      return;
    }
    if (message.arrival == Arrival::kNothing) return;
    switch (message.kind) {
      case MessageKind::kPoison:
        tell_({peer.process, PeerNews::kPoisoned, std::move(message.body)});
        break;
      case MessageKind::kDeadlinePoison:
        tell_({peer.process, PeerNews::kPoisonedByDeadline, std::move(message.body)});
        break;
      case MessageKind::kObituary:
        tell_({std::atoi(message.body.c_str()), PeerNews::kLost, "died"});
        break;
      case MessageKind::kStatement:
        tell_({peer.process, PeerNews::kStated, std::move(message.body)});
        break;
      case MessageKind::kGoodbye:
        SetLeft(peer, PeerNews::kClosed, "");
        break;
      case MessageKind::kHello:
      case MessageKind::kNote:
      case MessageKind::kNotePassed:
        break;
    }
  }
}

void Peers::SetLeft(Watched& peer, PeerNews::Kind kind, const std::string& how) {
  if (peer.has_left) return;
  peer.has_left = true;
  tell_({peer.process, kind, how});
}

}  // namespace jax_ub
