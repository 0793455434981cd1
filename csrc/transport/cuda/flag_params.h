// What the flag kernels are given: read by the kernels, their launcher and their host
// twins (tests/csrc/cuda/emulated_kernels.h). Addresses are CUdeviceptr.
//
// Flags and epochs are 64-bit words, each on a line of its own, compared by signed
// difference. Not 32: a slot that no call used for 2^31 calls, a day or a month, would
// seem to be filled.
#pragma once

#include <cstdint>

namespace jax_ub {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxResults = 16;

// Why a rank failed, in host memory that is mapped into its device. Each word has one
// writer: the device fills the reason once and stores `code` last (release), the host
// stores `poisoned`. Zeros at first.
struct ErrorRecord {
  static constexpr uint32_t kNone = 0;
  static constexpr uint32_t kDeadline = 1;    // a wait reached it
  static constexpr uint32_t kPoisoned = 2;    // by the host: see `poisoned`
  static constexpr uint32_t kPeerFailed = 3;  // `peer` did, and told this rank
  static constexpr uint32_t kMisplaced = 4;   // it runs the program's `partition`

  uint32_t code;
  uint32_t rank;  // whose record this is
  uint32_t peer;  // whom it waited for
  uint32_t slot;  // of its own, or (of a wait for `freed`) kNoSlot
  int32_t chunk;  // -1: none
  uint32_t call;  // the host's number of the call site
  uint64_t waited_ns;
  uint32_t partition;
  uint32_t poisoned;  // the host's: every wait ends

  static constexpr uint32_t kNoSlot = UINT32_MAX;
};

// The words that every kernel of a rank may need.
struct RankWords {
  uint64_t epoch;   // calls that this rank has ended
  uint64_t failed;  // not 0: some wait of this rank ended without its condition
  uint64_t poison;  // peers write it: 1 + the rank of one that failed
  uint64_t error;   // ErrorRecord
};

// A peer's words that this rank writes.
struct FlagTarget {
  uint64_t flag;
  uint64_t poison;
};

// Where a rank that fails leaves its number + 1 at once, before anything else that it does.
struct PeerPoisons {
  uint32_t num_peers;
  uint64_t words[kMaxRanks];  // [peer]
};

// jax_ub_signal: every flag becomes *epoch + 1, what this stream did before becomes
// visible before that. jax_ub_end: the same, and then *epoch += 1; a rank that a peer has
// told of its failure until then fails: it may have read what that peer did afterwards.
//
// A rank that has failed writes its number + 1 into the peers' poison instead and leaves
// flags and epoch alone: nobody goes on with data that did not arrive.
struct SignalParams {
  RankWords own;
  uint32_t rank;
  uint32_t call;  // of jax_ub_end, for the record
  uint32_t num_targets;
  FlagTarget targets[kMaxRanks];
};

// jax_ub_wait: until *flag - (*epoch + ahead) >= 0, by signed difference. Ends without
// that, and fills the record from `what`, after timeout_ns, when this rank or its host or
// a peer of it failed. `ahead` is 1 for `arrived` and 0 for `freed`.
//
// A wait that fails tells the peers at once: what the stream does next, copies and
// products, cannot be called off, and may overwrite what a peer still reads.
struct WaitParams {
  RankWords own;
  uint64_t flag;
  uint64_t timeout_ns;
  uint32_t ahead;
  ErrorRecord what;
  PeerPoisons peers;
};

// jax_ub_check_place: the rank fails, and tells its peers, unless the u32 at `partition`
// is `expected`. First of a call: what a rank has failed before, it does not signal, so
// that no peer gets what it waits for.
struct PlaceParams {
  RankWords own;
  uint64_t partition;
  uint32_t expected;
  ErrorRecord what;
  PeerPoisons peers;
};

// jax_ub_spoil: 0xFF into every byte of the results (NaN in all dtypes) if the rank
// failed.
struct SpoilParams {
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
inline constexpr char kCheckPlaceKernel[] = "jax_ub_check_place";
inline constexpr char kSpoilKernel[] = "jax_ub_spoil";

}  // namespace jax_ub
