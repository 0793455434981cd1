// A schedule is data: the list of steps that one rank takes, computed by a pure
// function of (pattern, method, rank, P, splits). The executor runs it, the checker
// proves it for all ranks together, Python draws it.
//
// A *chunk* is one rank's share of the rows; `split` is a piece of it. Every rank has
// the same slots, buffers that peers put chunks into. A slot is used at most once per
// call, and on every rank or on none: so all ranks know its epoch without being told.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace jax_ub {

enum class Method : uint8_t { kDirect, kRingExchange, kPipeline, kBulk, kExternal };
inline constexpr int kNumMethods = 5;

std::string_view MethodName(Method method);

// What a method does in another way, where it is asked for.
enum class Variant : uint8_t {
  kPlain,
  kAggregate,         // AG+GEMM by ring_exchange, even P: products of two ranks' chunks
  kOverlapFirstGemm,  // GEMM+RS and +AR by pipeline: puts behind the next product
  kOneShot,  // AR by ring_exchange: all rows to all ranks, each of which adds them
};
inline constexpr int kNumVariants = 4;

std::string_view VariantName(Variant variant);

// What the ranks do together. Those without "Matmul" only communicate: on their own, or
// beside a GEMM that has nothing to do with it (bulk).
enum class CollectiveKind : uint8_t {
  kAllGatherMatmul,
  kMatmulReduceScatter,
  kMatmulAllReduce,
  kAllGather,
  kReduceScatter,
  kAllReduce,
};
inline constexpr int kNumCollectiveKinds = 6;

std::string_view CollectiveKindName(CollectiveKind pattern);

// Operands travel; partial sums do otherwise.
bool IsGather(CollectiveKind pattern);
// All ranks get all sums, not each those of its rows.
bool IsAllReduce(CollectiveKind pattern);
bool HasProduct(CollectiveKind pattern);

enum class StepKind : uint8_t {
  kMultiply,  // the GEMM of a piece, or of everything (chunk kAllChunks)
  kCopy,      // a piece, own or from a slot, into the gathered result
  kReduce,    // own partial sum and those in slots, in rank order, into the result
  kPut,       // a piece into the peer's slot
  kPublish,   // the peer may read this rank's operands in place; no bytes move
  kWait,      // until the peer's put or publish into the own slot is there
  kRelease,   // the own slot may be overwritten
  kWaitFree,  // until the peer has released its slot
};
inline constexpr int kNumStepKinds = 8;

std::string_view StepKindName(StepKind kind);

// What a piece is made of.
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
  // Of a product: so many chunks, out of as many slots, one behind the other.
  int num_chunks = 1;

  bool operator==(const Step&) const = default;
};

// The same step for one of its chunks.
inline Step ChunkOf(Step step, int index) {
  step.chunk += index;
  if (step.slot != kNone) step.slot += index;
  step.num_chunks = 1;
  return step;
}

struct Schedule {
  CollectiveKind pattern = CollectiveKind::kAllGather;
  Method method = Method::kDirect;
  Variant variant = Variant::kPlain;
  int rank = 0;
  int num_ranks = 1;
  int num_splits =
      1;  // pieces of a chunk: what was asked for, or 1 if the method has none
  int num_slots = 0;  // on every rank
  std::vector<Step> steps;
};

// False for the methods that a pattern does not have: a product cannot run beside
// itself (bulk), and direct has nothing to send without one.
bool HasSchedule(CollectiveKind pattern, Method method);
// Of a schedule that there is.
bool HasVariant(CollectiveKind pattern, Method method, int num_ranks, Variant variant);

// Calls function(pattern, method, variant) for every schedule of so many ranks.
template <typename Function>
void ForEachSchedule(int num_ranks, const Function& function) {
  for (int p = 0; p < kNumCollectiveKinds; ++p) {
    for (int m = 0; m < kNumMethods; ++m) {
      for (int v = 0; v < kNumVariants; ++v) {
        const auto pattern = static_cast<CollectiveKind>(p);
        const auto method = static_cast<Method>(m);
        const auto variant = static_cast<Variant>(v);
        if (HasSchedule(pattern, method) &&
            HasVariant(pattern, method, num_ranks, variant)) {
          function(pattern, method, variant);
        }
      }
    }
  }
}

// Throws std::invalid_argument when there is no such schedule or a number is out of
// range.
Schedule MakeSchedule(CollectiveKind pattern,
                      Method method,
                      int rank,
                      int num_ranks,
                      int num_splits,
                      Variant variant = Variant::kPlain);

// Rows [begin, end) of a piece, of `num_rows` rows that all ranks share; uneven where P
// or the splits do not divide them, possibly empty.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
RowRange SplitRows(
    int64_t num_rows, int num_ranks, int num_splits, int chunk, int split);

}  // namespace jax_ub
