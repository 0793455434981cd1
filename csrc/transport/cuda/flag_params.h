// What the flag kernels are given: read by the kernels, their launcher and their host
// twins (tests/csrc/cuda/emulated_kernels.h). Addresses are CUdeviceptr.
//
// A flag is a 64-bit word on a cache line of its own, written by one store:
//
//   bits 63 ... 24   epoch: the number of the call
//   bits 23 ... 0    tag of the call site (call_agreement.h), 0 before the first call
//
// A wait ends when the flag equals the word that it expects, so wrap-around is harmless,
// and a stale flag is never taken for a new one. A flag of the expected epoch with another
// tag shows that the ranks make different calls.
#pragma once

#include <cstdint>

namespace jax_ub {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxResults = 16;

inline constexpr int kTagBits = 24;
inline constexpr uint64_t kTagMask = (uint64_t{1} << kTagBits) - 1;

// RankWords::failed and ::poison: bits 15 ... 0 are 1 + the rank that failed. The tags of
// two different calls follow where these are the reason, else zeros.
inline constexpr int kFailedRankBits = 16;
inline constexpr uint64_t kFailedRankMask = (1 << kFailedRankBits) - 1;

// Why a rank failed, in host memory that is mapped into its device. Each word has one
// writer: the device fills the reason once and stores `code` last (release), the host
// stores `poisoned`. Zeros at first.
struct ErrorRecord {
  static constexpr uint32_t kNone = 0;
  static constexpr uint32_t kDeadline = 1;    // a wait reached it
  static constexpr uint32_t kPoisoned = 2;    // by the host: see `poisoned`
  static constexpr uint32_t kPeerFailed = 3;  // `peer` did, and told this rank
  static constexpr uint32_t kMisplaced = 4;   // it runs the program's `partition`
  static constexpr uint32_t kOtherCall = 5;   // `peer` makes another call: see `tag`

  uint32_t code;
  uint32_t rank;  // whose record this is
  uint32_t peer;  // whom it waited for
  uint32_t slot;  // of its own, or (of a wait for `freed`) kNoSlot
  int32_t chunk;  // -1: none
  uint32_t call;  // the host's number of the call site
  uint64_t waited_ns;
  uint32_t partition;
  uint32_t poisoned;  // the host's: every wait ends
  // Of the calls of this rank (kPeerFailed: of the rank that found it) and of the rank that
  // makes another one. 0: the failure has another reason.
  uint32_t tag;
  uint32_t other_tag;

  static constexpr uint32_t kNoSlot = UINT32_MAX;
};

// The words that every kernel of a rank may need.
struct RankWords {
  uint64_t epoch;   // calls that this rank has ended, and the tag of the last one
  uint64_t failed;  // not 0: this rank failed
  uint64_t poison;  // not 0: a peer failed, and wrote this
  uint64_t error;   // ErrorRecord
};

// A peer's words that this rank writes.
struct FlagTarget {
  uint64_t flag;
  uint64_t poison;
};

// A word of every peer: its poison, which a rank that fails writes before anything else, or
// the word in which this rank announces its call.
struct PeerWords {
  uint32_t num_peers;
  uint64_t words[kMaxRanks];  // [peer]
};

// The word of this call is that of *epoch with the next epoch and the call's tag.
//
// jax_ub_signal: every flag becomes the word of this call, what this stream did before
// becomes visible before that. jax_ub_end: the same, and then *epoch becomes this word; a
// rank that a peer has told of its failure until then fails: it may have read what that
// peer did afterwards.
//
// A rank that has failed writes `failed` into the peers' poison instead and leaves flags
// and epoch alone: nobody goes on with data that did not arrive.
struct SignalParams {
  RankWords own;
  uint32_t rank;
  uint32_t call;  // of jax_ub_end, for the record
  uint32_t tag;
  uint32_t num_targets;
  FlagTarget targets[kMaxRanks];
};

// jax_ub_wait: until *flag is the word of this call (`ahead` 1, for `arrived`) or *epoch
// (`ahead` 0, for `freed`). Ends without that, and fills the record from `what`, after
// timeout_ns, when this rank or its host or a peer of it failed, and when the flag or
// *announced, where the awaited peer announces its calls, shows that it makes another call.
//
// A wait that fails tells the peers at once: what the stream does next, copies and
// products, cannot be called off, and may overwrite what a peer still reads.
//
// The first wait of a call also announces the call: it stores the word of this call at
// every address of `announcements`. A peer in another call may use other slots, and would
// wait for a flag that this rank never writes.
struct WaitParams {
  RankWords own;
  uint64_t flag;
  uint64_t announced;
  uint64_t timeout_ns;
  uint32_t ahead;
  uint32_t tag;
  ErrorRecord what;
  PeerWords peers;
  PeerWords signatures;  // of no peer, but for the first wait of a call
};

// jax_ub_check_partition: the rank fails, and tells its peers, unless the u32 at `partition`
// is `expected`. First of a call: what a rank has failed before, it does not signal, so
// that no peer gets what it waits for.
struct PartitionCheckParams {
  RankWords own;
  uint64_t partition;
  uint32_t expected;
  ErrorRecord what;
  PeerWords peers;
};

// jax_ub_fill_nan: 0xFF into every byte of the results (NaN in all dtypes) if the rank
// failed.
struct NanFillParams {
  struct Result {
    uint64_t data;
    uint64_t size_bytes;
  };
  RankWords own;
  uint32_t num_results;
  Result results[kMaxResults];
};

inline constexpr char kSignalKernel[] = "jax_ub_signal";
inline constexpr char kEndKernel[] = "jax_ub_end";
inline constexpr char kWaitKernel[] = "jax_ub_wait";
inline constexpr char kCheckPartitionKernel[] = "jax_ub_check_partition";
inline constexpr char kFillNanKernel[] = "jax_ub_fill_nan";

}  // namespace jax_ub
