// A schedule is data: the list of steps that one rank executes. It is a pure function
// of (collective, method, rank, P, splits), where P is the number of ranks. The
// executor runs it, the checker verifies it for all ranks together, and Python draws
// it.
//
// A *chunk* is the rows of one rank. A *split* is a part of a chunk: what one put
// moves. Every rank has the same slots, buffers into which peers put splits. A slot is
// used at most once per call, and either on every rank or on none, so all ranks know
// its epoch without communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace jax_ub {

enum class Method : uint8_t { kDirect, kRingExchange, kPipeline, kBulk, kExternal };
inline constexpr int kNumMethods = 5;
// Number of splits of a chunk, if the call does not specify it: four, as in Transformer
// Engine's pipelined reduce-scatter. The communication of three splits is hidden behind
// GEMMs.
inline constexpr int kDefaultSplits = 4;

std::string_view MethodName(Method method);

// Modifications of a method's schedule that a caller may select. kPlain modifies
// nothing. Each other variant applies only to the collectives and methods that its
// comment lists.
enum class Variant : uint8_t {
  kPlain,
  kAggregate,         // AG+GEMM by ring_exchange, even P: GEMMs over two chunks
  kOverlapFirstGemm,  // GEMM+RS and +AR by pipeline: each put after the next GEMM
  kOneShot,  // AR by ring_exchange: all rows are sent to and added by every rank
};
inline constexpr int kNumVariants = 4;

std::string_view VariantName(Variant variant);

// The collective of an op. A collective with "Matmul" in its name overlaps with a GEMM
// of the data that it communicates. The other collectives are independent of GEMMs.
enum class CollectiveKind : uint8_t {
  kAllGatherMatmul,
  kMatmulReduceScatter,
  kMatmulAllReduce,
  kAllGather,
  kReduceScatter,
  kAllReduce,
};
inline constexpr int kNumCollectiveKinds = 6;

std::string_view CollectiveKindName(CollectiveKind collective);

// Returns whether ranks send operands, as in an all-gather. In all other collectives,
// ranks send partial sums.
bool IsGather(CollectiveKind collective);
// Returns whether every rank receives the sums of all rows, not only of its own rows.
bool IsAllReduce(CollectiveKind collective);
bool HasProduct(CollectiveKind collective);

enum class StepKind : uint8_t {
  kMultiply,  // runs the GEMM of a split, or of all rows (chunk kAllChunks)
  kCopy,      // copies a split, local or from a slot, into the gathered result
  kReduce,    // adds this rank's and received partial sums, in rank order
  kPut,       // writes a split into the peer's slot
  kPublish,   // allows the peer to read this rank's operands in place; moves no data
  kWait,      // waits for the peer's put or publish into this rank's slot
  kRelease,   // allows peers to overwrite this rank's slot
  kWaitFree,  // waits until the peer has released its slot
};
inline constexpr int kNumStepKinds = 8;

std::string_view StepKindName(StepKind kind);

// What a split (part of a chunk) contains: rows of an operand, of a partial sum, or of
// the sum over all ranks.
enum class Payload : uint8_t { kOperand, kPartial, kSum };

std::string_view PayloadName(Payload payload);

inline constexpr int kAllChunks = -1;
inline constexpr int kNone = -1;

struct Step {
  StepKind kind = StepKind::kMultiply;
  Payload payload = Payload::kOperand;
  int chunk = kAllChunks;
  int split = 0;
  int peer = kNone;
  int slot = kNone;
  // The number of consecutive chunks, in consecutive slots, that the GEMM of kMultiply
  // reads.
  int num_chunks = 1;

  bool operator==(const Step&) const = default;
};

// Returns the step for chunk number `index` of a step that covers several chunks.
inline Step ChunkOf(Step step, int index) {
  step.chunk += index;
  if (step.slot != kNone) step.slot += index;
  step.num_chunks = 1;
  return step;
}

struct Schedule {
  CollectiveKind collective = CollectiveKind::kAllGather;
  Method method = Method::kDirect;
  Variant variant = Variant::kPlain;
  int rank = 0;
  int num_ranks = 1;
  // Number of splits (parts) of a chunk. 1 if the method does not split chunks.
  int num_splits = 1;
  int num_slots = 0;  // number of slots on every rank
  std::vector<Step> steps;
};

// Returns the number of consecutive steps of kind `kind`, counted from steps[begin].
size_t CountSteps(const std::vector<Step>& steps, size_t begin, StepKind kind);
// Returns, for each peer, the first of the steps of kind `kind`.
std::vector<Step> FirstOfEachPeer(const std::vector<Step>& steps, StepKind kind);

// Returns whether MakeSchedule supports the method for the collective. kBulk runs a
// collective and an independent GEMM concurrently, so the collective must not contain a
// GEMM.
// kDirect sends nothing, because its GEMM reads the peers' memory, so the collective
// must contain a GEMM.
bool HasSchedule(CollectiveKind collective, Method method);
// Returns whether MakeSchedule supports the variant for `num_ranks` ranks.
// HasSchedule(collective, method) must be true.
bool HasVariant(CollectiveKind collective,
                Method method,
                int num_ranks,
                Variant variant);

// Calls function(collective, method, variant) for all combinations for which
// MakeSchedule has a schedule of `num_ranks` ranks.
template <typename Function>
void ForEachSchedule(int num_ranks, const Function& function) {
  for (int p = 0; p < kNumCollectiveKinds; ++p) {
    for (int m = 0; m < kNumMethods; ++m) {
      for (int v = 0; v < kNumVariants; ++v) {
        const auto collective = static_cast<CollectiveKind>(p);
        const auto method = static_cast<Method>(m);
        const auto variant = static_cast<Variant>(v);
        if (HasSchedule(collective, method) &&
            HasVariant(collective, method, num_ranks, variant)) {
          function(collective, method, variant);
        }
      }
    }
  }
}

// Returns the schedule of one rank: the list of steps that it executes. Throws
// std::invalid_argument if there is no such schedule, or if a number is out of range.
Schedule MakeSchedule(CollectiveKind collective,
                      Method method,
                      int rank,
                      int num_ranks,
                      int num_splits,
                      Variant variant = Variant::kPlain);

// The range of rows [begin, end). SplitRows returns the rows of one split: `num_rows`
// rows are divided among the ranks, and the rows of each rank into splits. Sizes differ
// by at most one if the division has a remainder; a split may be empty.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
RowRange SplitRows(
    int64_t num_rows, int num_ranks, int num_splits, int chunk, int split);

}  // namespace jax_ub
