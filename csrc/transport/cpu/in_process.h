// Ranks that are threads of one process: slots are plain memory, flags are atomics.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace jax_ub {

class InProcessCommunicator {
 public:
  // `first_epoch` is where the epochs begin; tests let them wrap around.
  InProcessCommunicator(int num_ranks,
                        int num_slots,
                        int64_t slot_bytes,
                        uint32_t first_epoch = 0);
  ~InProcessCommunicator();

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  int num_slots() const { return num_slots_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t size_bytes() const { return num_ranks() * num_slots_ * slot_bytes_; }

  // The end of a rank; lives as long as the communicator.
  Transport& rank(int rank);

 private:
  class End;

  // On a cache line of its own: a rank spins on it while another one writes its own.
  struct alignas(64) Flags {
    std::atomic<uint32_t> arrived{0};
    std::atomic<uint32_t> released{0};
  };

  struct Rank {
    std::unique_ptr<std::byte[]> memory;  // [slot][slot_bytes]
    std::unique_ptr<Flags[]> flags;       // [slot]
    std::unique_ptr<End> end;
    // Where the rank's thread sleeps when what it waits for takes long.
    std::atomic<bool> asleep{false};
    std::mutex mutex;
    std::condition_variable wake;
  };

  void WakeAll();
  void ThrowIfPoisoned();

  const int num_slots_;
  const int64_t slot_bytes_;
  std::vector<std::unique_ptr<Rank>> ranks_;

  std::atomic<bool> poisoned_{false};
  std::mutex poison_mutex_;
  std::exception_ptr poison_;  // guarded by poison_mutex_
};

}  // namespace jax_ub
