#include "schedule/builder.h"

namespace jax_ub {

namespace {

// Appends the waits for the peers' partial sums of these rows, their sum, and the
// releases.
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

// ring_exchange (one split) and pipeline. Partial sums do not travel around a ring,
// where they would be rounded at every step or be added in a different order on every
// rank. Instead each partial sum is sent directly to the rank that owns its rows. The
// next rank's is computed first and the rank's own last, so that all sent ones are in
// flight by then. The owner adds them in f32, in rank order. P = 4:
//
//   step         0     1     2     3
//   rank 0       1     2     3     0      chunk of the GEMM
//   rank 1       2     3     0     1
//   rank 2       3     0     1     2
//   rank 3       0     1     2     3
//   put to      r+1   r+2   r+3    -
//   into slot    0     1     2     -      d - 1 if the owner is d ranks ahead
//
// With several splits, all of this is done per split, and split s - 1 is reduced after
// the GEMMs of split s have been enqueued.
//
// overlap_first_gemm: each put is enqueued after the GEMM that follows its own GEMM. A
// put waits for its GEMM; if streams share a hardware queue, this wait would delay a
// GEMM that is enqueued behind it.
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
      const int owner = builder.Ahead(distance);  // finally this rank
      if (multiply) builder.Add(StepKind::kMultiply, Payload::kPartial, owner, split);
      put(overlap_first_gemm ? distance - 1 : distance, split);
    }
    if (split > 0) AppendReduce(builder, rank, split - 1);
  }
  AppendReduce(builder, rank, builder.num_splits() - 1);
}

// one_shot, for few rows. Every rank puts its whole partial sum into a slot of each
// peer, and adds all of them itself, in rank order. This takes one exchange instead of
// two, but sends P / 2 times the bytes. P = 4, rank 0:
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
