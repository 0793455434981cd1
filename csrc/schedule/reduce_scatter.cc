#include "schedule/builder.h"

namespace jax_ub {

namespace {

// Adds what all ranks have of these rows.
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

// ring_exchange (one piece) and pipeline. Not a ring of partial sums: those would be
// rounded or added in another order on every rank. Each partial sum goes to the rank
// that owns its rows, the next rank's first and the own one last, so that all but that
// are on their way when it is done; the owner adds them in f32, in rank order. P = 4:
//
//   step         0     1     2     3
//   rank 0       1     2     3     0      chunk that is multiplied
//   rank 1       2     3     0     1
//   rank 2       3     0     1     2
//   rank 3       0     1     2     3
//   put to      r+1   r+2   r+3    -
//   into slot    0     1     2     -      d - 1 where the owner is d ranks ahead
//
// With pieces, all of this is done piece by piece, and piece s - 1 is reduced after the
// products of piece s are on their way.
//
// overlap_first_gemm: each put is asked for behind the product that follows its own. A
// put waits for its product; where streams share a queue of the hardware, that wait
// would keep a product behind it from beginning.
void AppendReduceScatter(ScheduleBuilder& builder,
                         bool multiply,
                         bool overlap_first_gemm) {
  builder.BeginStage();
  const int num_ranks = builder.num_ranks();
  const int rank = builder.rank();
  const auto put = [&](int distance, int split) {
    if (distance == 0 || distance == num_ranks) return;  // no one, or itself
    const int owner = builder.Ahead(distance);
    builder.Send(StepKind::kPut, Payload::kPartial, owner, split, owner,
                 builder.SlotOf(distance, split));
  };
  for (int split = 0; split < builder.num_splits(); ++split) {
    for (int distance = 1; distance <= num_ranks; ++distance) {
      const int owner = builder.Ahead(distance);  // at last the rank itself
      if (multiply) builder.Add(StepKind::kMultiply, Payload::kPartial, owner, split);
      put(overlap_first_gemm ? distance - 1 : distance, split);
    }
    if (split > 0) AppendReduce(builder, rank, split - 1);
  }
  AppendReduce(builder, rank, builder.num_splits() - 1);
}

// one_shot, for few rows. Every rank puts all of its partial sum into a slot of each
// peer and adds all of them itself, in rank order: one exchange instead of two, for P / 2
// times the bytes. P = 4, rank 0:
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
