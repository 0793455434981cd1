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

// The distance in bytes between consecutive flags in a rank's heap.
inline constexpr int64_t kFlagLineBytes = 128;

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxResults = 16;

inline constexpr int kTagBits = 24;
inline constexpr uint64_t kTagMask = (uint64_t{1} << kTagBits) - 1;

// The format of RankWords::failed and RankWords::poison: bits 15 ... 0 are 1 + the rank
// that failed. The upper bits have the tags of two different calls (kTagBits each) if
// the ranks made different calls, and are zero otherwise.
inline constexpr int kFailedRankBits = 16;
inline constexpr uint64_t kFailedRankMask = (1 << kFailedRankBits) - 1;

// Why a rank failed. Located in host memory that is mapped into the rank's device, and
// initially zero. The device writes all members except `poisoned`: it fills them once,
// at the rank's first failure, and stores `code` last, with release. The host writes
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
  uint32_t peer;  // the awaited rank; for kPeerFailed, the rank that failed
  uint32_t slot;  // the awaited slot of this rank; kNoSlot for a wait for `freed`
  int32_t chunk;  // the awaited chunk; -1: none
  uint32_t call;  // CudaCommunicator::NumberOf of the call site
  uint64_t waited_ns;
  uint32_t partition;  // for kMisplaced: the partition that the rank runs
  uint32_t poisoned;   // not 0: every wait of the rank ends
  // The tags of two different calls, if that is the reason, and 0 otherwise. `tag` is
  // the call of the rank that detected the mismatch (this rank, or `peer` for
  // kPeerFailed); `other_tag` is the call of the rank that it compared with.
  uint32_t tag;
  uint32_t other_tag;

  static constexpr uint32_t kNoSlot = UINT32_MAX;
};

// The addresses of a rank's state, which its flag kernels read and write: three 64-bit
// words on the device, and the error record.
struct RankWords {
  uint64_t epoch;   // the number of calls that this rank ended, and the tag of the last
  uint64_t failed;  // *failed is not 0: this rank has failed
  uint64_t poison;  // *poison is not 0: a peer has failed, and wrote it
  uint64_t error;   // the rank's ErrorRecord
};

// Where a rank signals to a peer: the address of a flag, and the address of the peer's
// `poison`, which the rank writes instead of the flag if it has failed.
struct FlagTarget {
  uint64_t flag;
  uint64_t poison;
};

// The addresses of one word in the memory of each other rank: either its `poison` word,
// or the word in which this rank announces its calls to that rank.
struct PeerWords {
  uint32_t num_peers;
  uint64_t words[kMaxRanks];  // the first num_peers are used
};

// The flags that a rank sets. A kernel sets them to the flag value of its call, which
// has the tag of the call site and the epoch after that in *epoch.
//
// A rank that has failed writes its `failed` word to the targets' `poison` instead, so
// that no peer continues with data that did not arrive.
struct FlagTargets {
  uint32_t num_targets;
  FlagTarget targets[kMaxRanks];  // the first num_targets are used
};

// The parameters of jax_ub_signal, which stores the flag value of this call in every
// target's flag. All earlier work of the stream is visible before the store.
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
// again, and then in *epoch. If the rank has failed, it stores neither, but 0xFF in
// every byte of the results (NaN in all dtypes). If a peer has reported a failure, this
// rank fails here too, because it may have read data that the peer wrote after its
// failure.
struct EndParams {
  RankWords own;
  uint32_t rank;
  uint32_t call;  // ErrorRecord::call
  uint32_t tag;
  FlagTargets freed;
  NanFill nan_fill;
};

// The parameters of jax_ub_fill_nan, which fills more results than jax_ub_end can. It
// runs after jax_ub_end.
struct NanFillParams {
  RankWords own;
  NanFill nan_fill;
};

// A flag that a rank waits for, and what the error record says about it if the wait
// fails.
struct AwaitedFlag {
  uint64_t flag;       // address
  uint64_t announced;  // address: the word in which the peer announces its calls
  uint32_t peer;
  uint32_t slot;  // as in ErrorRecord
  int32_t chunk;
};

// The parameters that all waits of a call share: the rank that waits, its call, its
// timeout, and the peers to which it reports a failure.
struct WaitingCall {
  RankWords own;
  uint64_t timeout_ns;
  uint32_t rank;
  uint32_t call;  // ErrorRecord::call
  uint32_t tag;
  PeerWords poisons;  // the `poison` of all peers
};

// The parameters of jax_ub_wait. It first signals as jax_ub_signal does. Then each
// thread waits until one flag has the expected value. If `ahead` is 1, this is the flag
// value of this call: the peer has put data into a slot. If `ahead` is 0, it is *epoch:
// the peer has ended its previous call, so its slots are free.
//
// The wait fails, and fills the error record, after timeout_ns; if the host poisoned
// this rank; if a peer reported a failure; or if an awaited peer has announced a
// different call. The wait also ends if this rank has failed before.
//
// A wait that fails writes the `poison` of all peers before it ends. The copies and
// GEMMs that follow in the stream cannot be cancelled, and may overwrite data that a
// peer still reads.
//
// The first wait of a call also announces the call: it stores the flag value of this
// call at every address in `announcements`. Without it, a peer in a different call
// might use other slots and wait until the deadline for a flag that this rank never
// writes.
struct WaitParams {
  WaitingCall waiting;
  uint32_t ahead;
  uint32_t num_flags;
  AwaitedFlag flags[kMaxRanks];  // the first num_flags are used
  FlagTargets signals;
  PeerWords announcements;  // empty except for the first wait of a call
};

// The parameters of jax_ub_check_partition, which makes the rank fail, and writes the
// peers' `poison`, unless the u32 at `partition` is `expected`. It is the first kernel
// of a call: a failed rank sends no signals, so that no peer accepts its data.
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
