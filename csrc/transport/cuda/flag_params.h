// The parameters of the flag kernels. Included by the kernels, their launcher and their
// emulation on the host (tests/csrc/cuda/emulated_kernels.h). Addresses are
// CUdeviceptr.
//
// A flag is a 64-bit word on a separate cache line, written by one store:
//
//   bits 63 ... 24   epoch: the number of the call
//   bits 23 ... 0    tag of the call site (signature_table.h); 0 before the first call
//
// A wait ends when the flag equals the expected value. The epoch may therefore wrap
// around, and a stale flag is never mistaken for a new one. A flag with the expected
// epoch but a different tag shows that the ranks make different calls.
#pragma once

#include <cstdint>

namespace jax_ub {

// Distance between two flags in a rank's heap, in bytes. Each flag has its own cache
// line.
inline constexpr int64_t kFlagLineBytes = 128;

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxResults = 16;

inline constexpr int kTagBits = 24;
inline constexpr uint64_t kTagMask = (uint64_t{1} << kTagBits) - 1;

// Format of the words RankWords::failed and RankWords::poison. Bits 15 ... 0 are 1 +
// the rank that failed first. A rank that learns of the failure from a peer passes on
// the peer's word. If ranks made different calls, the upper bits are the tags of two of
// these calls, with kTagBits each.
inline constexpr int kFailedRankBits = 16;
inline constexpr uint64_t kFailedRankMask = (1 << kFailedRankBits) - 1;

// The reason why a rank failed. It is in host memory that the rank's device has mapped,
// and is initially zero. At the first failure of the rank, the device fills all members
// except `poisoned`, and stores `code` last, with release. Only the host writes
// `poisoned`.
struct ErrorRecord {
  static constexpr uint32_t kNone = 0;
  static constexpr uint32_t kDeadline = 1;    // a wait reached its deadline
  static constexpr uint32_t kPoisoned = 2;    // the host has set `poisoned`
  static constexpr uint32_t kPeerFailed = 3;  // `peer` reported that it failed
  static constexpr uint32_t kMisplaced = 4;   // `partition` is not the expected one
  static constexpr uint32_t kOtherCall = 5;   // `peer` makes another call; see `tag`

  uint32_t code;
  uint32_t rank;  // the rank that this record belongs to
  uint32_t peer;  // the awaited rank; for kPeerFailed, the rank that failed first
  uint32_t slot;  // the awaited slot of this rank; kNoSlot for a wait for `freed`
  int32_t chunk;  // the awaited chunk; -1: none
  uint32_t call;  // CudaCommunicator::NumberOf of the call site
  uint64_t waited_ns;
  uint32_t partition;  // for kMisplaced: the partition that the rank runs
  uint32_t poisoned;   // not 0: every wait of the rank ends
  // If ranks made different calls, the tags of two of these calls; otherwise 0. One
  // rank compared its call with the call of another rank: `tag` is its call, and
  // `other_tag` is the call of the other rank. For kPeerFailed, the rank that compared
  // is `peer`.
  uint32_t tag;
  uint32_t other_tag;

  static constexpr uint32_t kNoSlot = UINT32_MAX;
};

// Addresses of a rank's state, which its flag kernels read and write. `epoch`, `failed`
// and `poison` are 64-bit words in device memory; the error record is in host memory.
struct RankWords {
  uint64_t epoch;   // the number of calls that this rank ended, and the tag of the last
  uint64_t failed;  // *failed is not 0: this rank has failed
  uint64_t poison;  // *poison is not 0: a peer has failed, and wrote it
  uint64_t error;   // the rank's ErrorRecord
};

// The addresses for a signal from a rank to a peer. The rank sets the flag or, if it
// has failed, writes the peer's `poison` instead.
struct FlagTarget {
  uint64_t flag;
  uint64_t poison;
};

// The addresses of one word for each peer. The words are the `poison` of the peers, or
// the words in which this rank announces its calls to the peers.
struct PeerWords {
  uint32_t num_peers;
  uint64_t words[kMaxRanks];  // the first num_peers are used
};

// The flags in peers' memory that a kernel sets. The new value of the flags identifies
// this call: it has the tag of the call site and the number *epoch + 1.
//
// A rank that has failed does not set the flags, because its data has not arrived. It
// copies its word `failed` to the peers' words `poison`.
struct FlagTargets {
  uint32_t num_targets;
  FlagTarget targets[kMaxRanks];  // the first num_targets are used
};

// The parameters of jax_ub_signal, which stores the flag value of this call in all
// flags of `signals`. All earlier work of the stream is visible before these stores.
struct SignalParams {
  RankWords own;
  uint32_t tag;
  FlagTargets signals;
};

struct NanFill {
  struct Result {
    uint64_t data;
    uint64_t size_bytes;
  };
  uint32_t num_results;
  Result results[kMaxResults];
};

// The parameters of jax_ub_end, the last kernel of a call. It stores the flag value of
// this call in the peers' `freed` flags, so that they may write this rank's slots
// again, and then in *epoch.
//
// If the rank has failed, it instead fills the results with bytes 0xFF (NaN in all
// dtypes). If a peer has reported a failure, this rank fails, too: it may have read
// data that the peer wrote after its failure.
struct EndParams {
  RankWords own;
  uint32_t rank;
  uint32_t call;  // ErrorRecord::call
  uint32_t tag;
  FlagTargets freed;
  NanFill nan_fill;
};

// The parameters of jax_ub_fill_nan. This kernel runs after jax_ub_end if there are
// more results than jax_ub_end can fill.
struct NanFillParams {
  RankWords own;
  NanFill nan_fill;
};

// A flag for which a rank waits. `peer`, `slot` and `chunk` are stored in the rank's
// ErrorRecord if the wait fails.
struct AwaitedFlag {
  uint64_t flag;       // address
  uint64_t announced;  // address: the word in which the peer announces its calls
  uint32_t peer;
  uint32_t slot;  // as in ErrorRecord
  int32_t chunk;
};

// The parameters that all waits of a call have in common.
struct WaitingCall {
  RankWords own;
  uint64_t timeout_ns;
  uint32_t rank;
  uint32_t call;  // ErrorRecord::call
  uint32_t tag;
  PeerWords poisons;  // the `poison` of all peers
};

// The parameters of jax_ub_wait. The kernel first sends signals like jax_ub_signal.
// Then each thread waits until one flag has the expected value. If `ahead` is 1, the
// expected value is the flag value of this call, which means that the peer has filled a
// slot. If `ahead` is 0, it is *epoch, which means that the peer has ended its previous
// call, so its slots are free.
//
// A wait fails after timeout_ns, if the host poisons this rank, if a peer reports a
// failure, or if the awaited peer announces a different call. It then fills the error
// record, and writes the `poison` of all peers before the kernel ends: later copies and
// GEMMs of the stream cannot be cancelled, and may overwrite data that a peer still
// reads. If this rank has failed earlier, the wait only ends.
//
// The first wait of a call announces the call: it stores the flag value of this call at
// the addresses in `announcements`. Without that, two ranks in different calls might
// wait for each other until the deadline.
struct WaitParams {
  WaitingCall waiting;
  uint32_t ahead;
  uint32_t num_flags;
  AwaitedFlag flags[kMaxRanks];  // the first num_flags are used
  FlagTargets signals;
  PeerWords announcements;  // empty except for the first wait of a call
};

// The parameters of jax_ub_check_partition, the first kernel of a call in an exported
// program. If the u32 at `partition` is not `expected`, the kernel makes the rank fail
// and writes the peers' `poison`. A failed rank sends no signals, so no peer uses its
// data.
struct PartitionCheckParams {
  RankWords own;
  uint64_t partition;
  uint32_t expected;
  ErrorRecord what;
  PeerWords peers;
};

inline constexpr int kEndThreads = 512;  // in the block of jax_ub_end

inline constexpr char kSignalKernel[] = "jax_ub_signal";
inline constexpr char kEndKernel[] = "jax_ub_end";
inline constexpr char kWaitKernel[] = "jax_ub_wait";
inline constexpr char kCheckPartitionKernel[] = "jax_ub_check_partition";
inline constexpr char kFillNanKernel[] = "jax_ub_fill_nan";

}  // namespace jax_ub
