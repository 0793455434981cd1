#include "transport/cpu/in_process.h"

#include <cstring>
#include <sstream>
#include <thread>

#include "platform/deadline.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

// A peer on another core answers within a few hundred looks; one that needs this core
// gets it by the yields; beyond that, sleeping costs less than it takes from others.
constexpr int kSpins = 200;
constexpr int kYields = 50;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

constexpr int64_t kAlignment = 64;

}  // namespace

class InProcessCommunicator::End : public Transport {
 public:
  End(InProcessCommunicator& communicator, int rank, uint32_t first_epoch)
      : communicator_(communicator),
        rank_(rank),
        uses_(communicator.num_slots(), Use{first_epoch, false, false}) {}

  int rank() const override { return rank_; }
  int num_ranks() const override { return communicator_.num_ranks(); }
  int64_t slot_bytes() const override { return communicator_.slot_bytes_; }

  const std::byte* slot(int index) const override {
    return communicator_.ranks_[rank_]->memory.get() +
           index * communicator_.slot_bytes_;
  }

  void Write(int peer, int slot, int64_t offset, const Rows& rows) override {
    if (offset + rows.num_rows * rows.row_bytes > communicator_.slot_bytes_) {
      throw Error("jax_ub: a piece of " +
                  std::to_string(offset + rows.num_rows * rows.row_bytes) +
                  " bytes does not fit into a slot of " +
                  std::to_string(communicator_.slot_bytes_));
    }
    std::byte* to = communicator_.ranks_[peer]->memory.get() +
                    slot * communicator_.slot_bytes_ + offset;
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      std::memcpy(to + row * rows.row_bytes, rows.data + row * rows.stride_bytes,
                  rows.row_bytes);
    }
  }

  void Signal(int peer, int slot) override {
    uses_[slot].put = true;
    communicator_.ranks_[peer]->flags[slot].arrived.store(uses_[slot].epoch + 1);
    Wake(peer);
  }

  void Wait(int peer, int slot, const WaitReason& reason) override {
    uses_[slot].received = true;
    WaitFor(communicator_.ranks_[rank_]->flags[slot].arrived, uses_[slot].epoch + 1,
            "the chunk of", peer, reason);
  }

  void Release(int slot) override {
    uses_[slot].received = true;
    communicator_.ranks_[rank_]->flags[slot].released.store(uses_[slot].epoch + 1);
    // Whoever writes the slot next: that is for the next schedule to say.
    communicator_.WakeAll();
  }

  void WaitFree(int peer, int slot, const WaitReason& reason) override {
    const uint32_t epoch = uses_[slot].epoch + (uses_[slot].put ? 1 : 0);
    WaitFor(communicator_.ranks_[peer]->flags[slot].released, epoch,
            "the release of a slot by", peer, reason);
  }

  void EndCall() override {
    for (Use& use : uses_) {
      if (use.put || use.received) ++use.epoch;
      use.put = use.received = false;
    }
  }

  void Poison(const std::exception_ptr& reason) override {
    {
      std::lock_guard lock(communicator_.poison_mutex_);
      if (!communicator_.poison_) communicator_.poison_ = reason;
    }
    communicator_.poisoned_.store(true);
    communicator_.WakeAll();
  }

 private:
  struct Use {
    uint32_t epoch = 0;     // calls that used this slot number
    bool put = false;       // in this call: a peer's
    bool received = false;  // in this call: the own
  };

  static bool Reached(const std::atomic<uint32_t>& flag, uint32_t epoch) {
    return static_cast<int32_t>(flag.load() - epoch) >= 0;
  }

  // The flag was set before `asleep` is looked at, and a sleeper says that it sleeps
  // before it looks at the flag again (all sequentially consistent): one sees the
  // other.
  void Wake(int rank) {
    Rank& sleeper = *communicator_.ranks_[rank];
    if (!sleeper.asleep.load()) return;
    std::lock_guard lock(sleeper.mutex);
    sleeper.wake.notify_one();
  }
  friend class InProcessCommunicator;

  void WaitFor(const std::atomic<uint32_t>& flag,
               uint32_t epoch,
               const char* what,
               int peer,
               const WaitReason& reason) {
    const auto ready = [&] {
      return Reached(flag, epoch) || communicator_.poisoned_.load();
    };
    for (int i = 0; i < kSpins && !ready(); ++i) Pause();
    for (int i = 0; i < kYields && !ready(); ++i) std::this_thread::yield();
    if (!ready()) {
      Rank& me = *communicator_.ranks_[rank_];
      std::unique_lock lock(me.mutex);
      me.asleep.store(true);
      me.wake.wait_until(lock, Deadline::After(reason.timeout_s).time(), ready);
      me.asleep.store(false);
    }
    communicator_.ThrowIfPoisoned();
    if (Reached(flag, epoch)) return;
    std::ostringstream text;
    text << "CommunicatorError: jax_ub." << reason.label << ": rank " << rank_
         << " waited " << reason.timeout_s << " s for " << what << " rank " << peer
         << " (chunk " << reason.chunk << "). JAX_UB_TIMEOUT_S sets the seconds.";
    throw DeadlineError(text.str());
  }

  InProcessCommunicator& communicator_;
  const int rank_;
  std::vector<Use> uses_;  // [slot]
};

InProcessCommunicator::InProcessCommunicator(int num_ranks,
                                             int num_slots,
                                             int64_t slot_bytes,
                                             uint32_t first_epoch)
    : num_slots_(num_slots),
      slot_bytes_((slot_bytes + kAlignment - 1) / kAlignment * kAlignment) {
  for (int r = 0; r < num_ranks; ++r) {
    auto rank = std::make_unique<Rank>();
    rank->memory.reset(new std::byte[num_slots * slot_bytes_]);
    rank->flags.reset(new Flags[num_slots]);
    for (int slot = 0; slot < num_slots; ++slot) {
      rank->flags[slot].arrived.store(first_epoch);
      rank->flags[slot].released.store(first_epoch);
    }
    rank->end = std::make_unique<End>(*this, r, first_epoch);
    ranks_.push_back(std::move(rank));
  }
}

InProcessCommunicator::~InProcessCommunicator() = default;

Transport& InProcessCommunicator::rank(int rank) { return *ranks_[rank]->end; }

void InProcessCommunicator::WakeAll() {
  for (auto& rank : ranks_) rank->end->Wake(rank->end->rank());
}

void InProcessCommunicator::ThrowIfPoisoned() {
  if (!poisoned_.load()) return;
  std::lock_guard lock(poison_mutex_);
  std::rethrow_exception(poison_);
}

}  // namespace jax_ub
