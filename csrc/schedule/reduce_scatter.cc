#include "schedule/builder.h"

namespace jax_ub {

namespace {

// Appends the steps that reduce a split: the waits for the peers' partial sums, their
// addition, and the releases of their slots.
void AppendReduce(ScheduleBuilder& builder, int chunk, int split) {
  const int num_ranks = builder.num_ranks();
  for (int distance = 1; distance < num_ranks; ++distance) {
    builder.Add(StepKind::kWait, Payload::kPartial, chunk, split,
                builder.Behind(distance), builder.SlotOf(distance, split));
  }
  builder.Add(StepKind::kReduce, Payload::kSum, chunk, split);
  for (int distance = 1; distance < num_ranks; ++distance) {
    builder.Add(StepKind::kRelease, Payload::kPartial, chunk, split, kNone,
                builder.SlotOf(distance, split));
  }
}

}  // namespace

// Appends the steps of the methods ring_exchange (one split) and pipeline. Each partial
// sum is sent directly to the rank that owns its rows. The owner adds all partial sums
// in f32, in rank order. On a ring, partial sums would be rounded at every step, or be
// added in a different order on every rank. A rank first computes the partial sums for
// the next rank, and last its own ones, while the others are in flight. For P = 4
// ranks:
//
//   step         0     1     2     3
//   rank 0       1     2     3     0      chunk of the GEMM
//   rank 1       2     3     0     1
//   rank 2       3     0     1     2
//   rank 3       0     1     2     3
//   put to      r+1   r+2   r+3    -
//   into slot    0     1     2     -      d - 1 if the owner is d ranks ahead
//
// These steps are repeated for each split. Split s - 1 is reduced after the GEMMs of
// split s have been enqueued.
//
// In the variant kOverlapFirstGemm, the put of a GEMM's result is enqueued after the
// next GEMM, because a put waits for its GEMM. If streams share a hardware queue, a
// GEMM behind the put would have to wait, too.
void AppendReduceScatter(ScheduleBuilder& builder,
                         bool multiply,
                         bool overlap_first_gemm) {
  builder.BeginStage();
  const int num_ranks = builder.num_ranks();
  const int rank = builder.rank();
  const auto put = [&](int distance, int split) {
    if (distance == 0 || distance == num_ranks) return;  // no peer, or this rank
    const int owner = builder.Ahead(distance);
    builder.Send(StepKind::kPut, Payload::kPartial, owner, split, owner,
                 builder.SlotOf(distance, split));
  };
  for (int split = 0; split < builder.num_splits(); ++split) {
    for (int distance = 1; distance <= num_ranks; ++distance) {
      const int owner = builder.Ahead(distance);  // the last one is this rank
      if (multiply) builder.Add(StepKind::kMultiply, Payload::kPartial, owner, split);
      put(overlap_first_gemm ? distance - 1 : distance, split);
    }
    if (split > 0) AppendReduce(builder, rank, split - 1);
  }
  AppendReduce(builder, rank, builder.num_splits() - 1);
}

// Appends the steps of the variant kOneShot, for few rows. Every rank sends its whole
// partial sum to all peers, and adds the partial sums of all ranks in rank order. This
// takes one exchange instead of two, but sends P / 2 times the bytes (P = number of
// ranks). For P = 4, rank 0:
//
//   multiply all | put all to 1 2 3 | wait for 3 2 1 | reduce all | release
void AppendOneShot(ScheduleBuilder& builder, bool multiply) {
  builder.BeginStage();
  const int num_ranks = builder.num_ranks();
  if (multiply) builder.MultiplyAll();
  for (int distance = 1; distance < num_ranks; ++distance) {
    builder.Send(StepKind::kPut, Payload::kPartial, kAllChunks, 0,
                 builder.Ahead(distance), builder.SlotOf(distance, 0));
  }
  AppendReduce(builder, kAllChunks, 0);
}

}  // namespace jax_ub
