#include "schedule/builder.h"

namespace jax_ub {

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
  const auto reduce = [&](int split) {
    for (int distance = 1; distance < num_ranks; ++distance) {
      builder.Add(StepKind::kWait, Payload::kPartial, rank, split,
                  builder.Behind(distance), builder.SlotOf(distance, split));
    }
    builder.Add(StepKind::kReduce, Payload::kSum, rank, split);
    for (int distance = 1; distance < num_ranks; ++distance) {
      builder.Add(StepKind::kRelease, Payload::kPartial, rank, split, kNone,
                  builder.SlotOf(distance, split));
    }
  };
  for (int split = 0; split < builder.num_splits(); ++split) {
    for (int distance = 1; distance <= num_ranks; ++distance) {
      const int owner = builder.Ahead(distance);  // at last the rank itself
      if (multiply) builder.Add(StepKind::kMultiply, Payload::kPartial, owner, split);
      put(overlap_first_gemm ? distance - 1 : distance, split);
    }
    if (split > 0) reduce(split - 1);
  }
  reduce(builder.num_splits() - 1);
}

}  // namespace jax_ub
