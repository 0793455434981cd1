// The layout of a rank's heap. The flags, which mostly peers write, precede the slots.
//
//   arrived[kMaxSlots] | freed[kMaxRanks] | announced[kMaxRanks] |
//   epoch | failed | poison | padding | slots
//
// Each flag is the first word of a separate cache line. All flags are zero before a
// peer can access them. The offsets are the same on every rank.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "transport/cuda/cuda_slots.h"

namespace jax_ub {

class HeapLayout {
 public:
  // Maximum number of slots (receive buffers) of one rank in one call.
  static constexpr int kMaxSlots = 4096;

  explicit HeapLayout(int64_t slots_bytes) : slots_bytes_(Align(slots_bytes)) {}

  // Returns the size of the memory for slots: the requested size, rounded up to pages
  // of 4096 bytes.
  int64_t slots_bytes() const { return slots_bytes_; }
  int64_t size_bytes() const { return flags_bytes() + slots_bytes_; }
  static constexpr int64_t flags_bytes() {
    return Align((kMaxSlots + 2 * kMaxRanks + 3) * kFlagLineBytes);
  }

  // Returns the addresses of the slots, flags and words of a heap that is mapped at
  // `base`.
  static RankSlotAddress AddressAt(CUdeviceptr base) {
    const auto line = [base](int64_t n) { return base + n * kFlagLineBytes; };
    constexpr int64_t kWords = kMaxSlots + 2 * kMaxRanks;
    return {.slots = base + flags_bytes(),
            .arrived = line(0),
            .freed = line(kMaxSlots),
            .announced = line(kMaxSlots + kMaxRanks),
            .epoch = line(kWords),
            .failed = line(kWords + 1),
            .poison = line(kWords + 2)};
  }

 private:
  static constexpr int64_t Align(int64_t bytes) {
    constexpr int64_t kPage = 4096;
    return (bytes + kPage - 1) / kPage * kPage;
  }

  int64_t slots_bytes_;
};

}  // namespace jax_ub
