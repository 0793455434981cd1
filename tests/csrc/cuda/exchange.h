// Tests a communicator of ranks on GPUs: each rank writes distinct words into a slot of
// each peer, and reads the words that it received.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/emulated_driver.h"
#include "platform/cuda/owners.h"
#include "reduce/cuda/sum_kernels.h"
#include "transport/cuda/communicator.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/cuda/flag_kernels.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

inline const std::string kExchangeLabel = "exchange (ub_name 'qkv')";

// Returns the seconds in an error text "... waited 0.0534 s for ...", or 0 if it has
// none. They are at least the timeout, and more on a busy machine.
inline double SecondsWaited(const std::string& text) {
  const std::string before = " waited ";
  const size_t at = text.find(before);
  return at == std::string::npos ? 0 : std::atof(text.c_str() + at + before.size());
}

// Writes the error record of a local rank, as its device does: stores `code` last.
inline void FillRecord(CudaCommunicator& communicator,
                       int rank,
                       const ErrorRecord& record) {
  auto& filled = *reinterpret_cast<ErrorRecord*>(communicator.error(rank));
  constexpr size_t kCodeBytes = offsetof(ErrorRecord, rank);
  std::memcpy(&filled.rank, &record.rank, sizeof(record) - kCodeBytes);
  std::atomic_ref(filled.code).store(record.code, std::memory_order_release);
}

// Fills the record of a local rank whose device was notified that `peer` failed.
inline void Notify(CudaCommunicator& communicator, int rank, int peer) {
  ErrorRecord record = {};
  record.code = ErrorRecord::kPeerFailed;
  record.rank = static_cast<uint32_t>(rank);
  record.peer = static_cast<uint32_t>(peer);
  FillRecord(communicator, rank, record);
}

class RankOnGpu {
 public:
  static constexpr int kNumWords = 600;
  static constexpr int64_t kSlotBytes = kNumWords * sizeof(uint32_t);
  static constexpr int64_t kSlotsBytes = 64 * 1024;  // for 16 ranks

  RankOnGpu(std::shared_ptr<CudaCommunicator> communicator, int rank)
      : communicator_(std::move(communicator)),
        rank_(rank),
        context_(driver_, communicator_->ordinal(rank)),
        scoped_(std::make_unique<ScopedContext>(driver_, context_.get())),
        flags_(driver_),
        sums_(driver_, context_.device()),
        stream_(driver_),
        own_(driver_, kSlotBytes),
        received_(driver_, communicator_->num_ranks() * kSlotBytes) {
    scoped_.reset();
  }
  ~RankOnGpu() {
    const ScopedContext scoped(driver_, context_.get());
    driver_.StreamSynchronize(stream_.get());
  }

  // Enqueues exchange number n > 0. A different number requires that the previous
  // exchange is done.
  void Enqueue(uint32_t n, double timeout_s = 60) {
    const ScopedContext scoped(driver_, context_.get());
    CudaSlots slots(rank_, communicator_->addresses(rank_), communicator_->error(rank_),
                    {communicator_->NumberOf({kExchangeLabel, {}})},
                    communicator_->AddressSlots(communicator_->num_ranks(), kSlotBytes),
                    {&driver_, &flags_, &sums_, stream_.get(), {}});
    FillOwn(n);
    const int num_ranks = communicator_->num_ranks();
    for (int d = 1; d < num_ranks; ++d) {
      const int peer = (rank_ + d) % num_ranks;
      slots.WaitFree(peer, rank_, {kExchangeLabel, -1, timeout_s});
      slots.Write(peer, rank_,
                  {reinterpret_cast<const std::byte*>(own_.device()), 1, kSlotBytes,
                   kSlotBytes});
      slots.Signal(peer, rank_);
    }
    std::vector<NanFill::Result> results;
    for (int d = 1; d < num_ranks; ++d) {
      const int peer = (rank_ + d) % num_ranks;
      slots.Wait(peer, peer, {kExchangeLabel, peer, timeout_s});
      const CUdeviceptr to = received_.device() + peer * kSlotBytes;
      Check(driver_,
            driver_.MemcpyAsync(to, reinterpret_cast<CUdeviceptr>(slots.slot(peer)),
                                kSlotBytes, stream_.get()),
            "cuMemcpyAsync");
      results.push_back({to, kSlotBytes});
    }
    slots.EndCall();
    slots.Finish(results);
  }

  // Waits for exchange number n, and returns the number of received words that differ
  // from those that the peers sent.
  int NumWrong(uint32_t n) {
    Wait();
    int num_wrong = 0;
    for (int peer = 0; peer < communicator_->num_ranks(); ++peer) {
      if (peer == rank_) continue;
      for (int i = 0; i < kNumWords; ++i) {
        num_wrong += Received(peer)[i] != WordOf(peer, n, i);
      }
    }
    return num_wrong;
  }
  bool IsFilledWithNan() {
    Wait();
    for (int peer = 0; peer < communicator_->num_ranks(); ++peer) {
      if (peer == rank_) continue;
      for (int i = 0; i < kNumWords; ++i) {
        if (Received(peer)[i] != 0xffffffffu) return false;
      }
    }
    return true;
  }
  void Wait() {
    const ScopedContext scoped(driver_, context_.get());
    Check(driver_, driver_.StreamSynchronize(stream_.get()), "cuStreamSynchronize");
  }

 private:
  static uint32_t WordOf(int rank, uint32_t n, int i) {
    return n * 1000000u + static_cast<uint32_t>(rank) * 10000u +
           static_cast<uint32_t>(i);
  }
  // Keeps the words if the exchange has the same number, since a previous exchange may
  // still read them.
  void FillOwn(uint32_t n) {
    if (n == filled_) return;
    auto* const words = static_cast<uint32_t*>(own_.get());
    for (int i = 0; i < kNumWords; ++i) words[i] = WordOf(rank_, n, i);
    filled_ = n;
  }
  const uint32_t* Received(int peer) {
    return static_cast<const uint32_t*>(received_.get()) + peer * kNumWords;
  }

  const Driver& driver_ = EmulatedDriver();
  const std::shared_ptr<CudaCommunicator> communicator_;
  const int rank_;
  const Context context_;
  std::unique_ptr<ScopedContext> scoped_;  // what follows is made in it
  const FlagKernels flags_;
  const SumKernels sums_;
  const Stream stream_;
  const HostMemory own_;
  uint32_t filled_ = 0;  // with the words of which exchange
  const HostMemory received_;
};

// The local ranks of a communicator, with functions that exchange words between them.
class RanksOnGpus {
 public:
  explicit RanksOnGpus(const std::shared_ptr<CudaCommunicator>& communicator) {
    for (const int rank : communicator->local_ranks()) {
      ranks_.push_back(std::make_unique<RankOnGpu>(communicator, rank));
    }
  }
  RankOnGpu& operator[](int n) { return *ranks_[n]; }

  void Enqueue(uint32_t n, double timeout_s = 60) {
    for (const auto& rank : ranks_) rank->Enqueue(n, timeout_s);
  }
  int NumWrong(uint32_t n) {
    int num_wrong = 0;
    for (const auto& rank : ranks_) num_wrong += rank->NumWrong(n);
    return num_wrong;
  }
  // Runs `count` exchanges in sequence; returns the total number of wrong words.
  int NumWrongOf(int count) {
    int num_wrong = 0;
    for (int n = 1; n <= count; ++n) {
      Enqueue(static_cast<uint32_t>(n));
      num_wrong += NumWrong(static_cast<uint32_t>(n));
    }
    return num_wrong;
  }

 private:
  std::vector<std::unique_ptr<RankOnGpu>> ranks_;
};

}  // namespace jax_ub
