#include <algorithm>

#include "schedule/builder.h"

namespace jax_ub {

namespace {

// Appends the steps that multiply or copy this rank's own chunk.
void AppendOwn(ScheduleBuilder& builder, StepKind consume) {
  for (int split = 0; split < builder.num_splits(); ++split) {
    builder.Add(consume, Payload::kOperand, builder.rank(), split);
  }
}

// Appends the steps of the method ring_exchange. Rank r starts with its own chunk. In
// each step it forwards the chunk that it has received from r - 1 to r + 1, so it
// processes chunk r - d in step d while the next chunk is in flight. Slot d - 1
// contains chunk r - d. For P = 4 ranks:
//
//   step         0     1     2     3
//   rank 0       0     3     2     1      chunk of the GEMM
//   rank 1       1     0     3     2
//   rank 2       2     1     0     3
//   rank 3       3     2     1     0
//   sent to r+1  r    r-1   r-2    -
//   from slot    -     0     1     2
void AppendRing(ScheduleBuilder& builder, StepKind consume) {
  const int num_ranks = builder.num_ranks();
  const int next = builder.Ahead(1);
  const auto pass_on = [&](int distance) {
    if (distance == num_ranks - 1) return;
    builder.Send(StepKind::kPut, Payload::kOperand, builder.Behind(distance), 0, next,
                 builder.SlotOf(distance + 1, 0));
  };
  pass_on(0);
  builder.Add(consume, Payload::kOperand, builder.rank(), 0);
  for (int distance = 1; distance < num_ranks; ++distance) {
    const int chunk = builder.Behind(distance);
    const int slot = builder.SlotOf(distance, 0);
    builder.Add(StepKind::kWait, Payload::kOperand, chunk, 0, builder.Behind(1), slot);
    pass_on(distance);
    builder.Add(consume, Payload::kOperand, chunk, 0, kNone, slot);
    builder.Add(StepKind::kRelease, Payload::kOperand, chunk, 0, kNone, slot);
  }
}

// Appends the steps of the method pipeline or, with one split, of bulk and external.
// Every rank puts its own chunk into a slot of each peer, split by split. A rank begins
// with its nearest peer, so that the ranks do not all write to the same peer. All ranks
// put and wait in the same order, so a split arrives when this rank's put of the same
// step is about done. The next put precedes the wait, so it runs during the wait. For P
// = 4 ranks and two splits, rank 0 (chunk.split):
//
//   put       0.0 to 1, 2       to 3     0.1 to 1   to 2      to 3
//   multiply           0.0 0.1       3.0        2.0       1.0      3.1   2.1   1.1
//   wait                        3.0      2.0        1.0       3.1        2.1   1.1
void AppendSplits(ScheduleBuilder& builder, StepKind consume) {
  const int num_peers = builder.num_ranks() - 1;
  const int num_puts = num_peers * builder.num_splits();
  const auto put = [&](int index) {
    const int split = index / num_peers;
    const int distance = 1 + index % num_peers;
    builder.Send(StepKind::kPut, Payload::kOperand, builder.rank(), split,
                 builder.Ahead(distance), builder.SlotOf(distance, split));
  };
  if (num_puts > 0) put(0);
  for (int index = 0; index < num_puts; ++index) {
    if (index + 1 < num_puts) put(index + 1);
    if (index == 0) AppendOwn(builder, consume);
    const int split = index / num_peers;
    const int distance = 1 + index % num_peers;
    const int chunk = builder.Behind(distance);
    const int slot = builder.SlotOf(distance, split);
    builder.Add(StepKind::kWait, Payload::kOperand, chunk, split, chunk, slot);
    builder.Add(consume, Payload::kOperand, chunk, split, kNone, slot);
    builder.Add(StepKind::kRelease, Payload::kOperand, chunk, split, kNone, slot);
  }
  if (num_puts == 0) AppendOwn(builder, consume);
}

}  // namespace

// Appends the steps of the variant kAggregate, in which a GEMM multiplies up to two
// chunks. The number of ranks P must be even. Ranks 2i and 2i + 1 exchange their
// chunks. Then each rank r sends two chunks per step to rank r + 2: first the chunks of
// its pair, later the chunks that it has received. Each later GEMM is over the two
// chunks of a pair of ranks. The first two GEMMs are over one chunk each: the rank's
// own chunk needs no communication, and is not adjacent to the other one in memory. For
// P = 6:
//
//   step               0      1      2      3
//   rank 0             0      1     4 5    2 3     chunks of the GEMM
//   rank 1             1      0     4 5    2 3
//   rank 2             2      3     0 1    4 5
//   from slots         -      0     1 2    3 4
//   sent to r xor 1    r
//   sent to r + 2      r    r xor 1  received from r - 2, except in the last step
//
// Slots 2d - 1 and 2d contain the chunks of the pair that is d pairs behind, the even
// chunk first.
void AppendRingOfPairs(ScheduleBuilder& builder) {
  builder.BeginStage();
  const int own = builder.rank();
  const int neighbour = own ^ 1;
  const int num_pairs = builder.num_ranks() / 2;
  const auto slot_of = [](int distance, int chunk) {
    return 2 * distance - 1 + chunk % 2;
  };
  const auto put = [&](int chunk, int peer, int slot) {
    builder.Send(StepKind::kPut, Payload::kOperand, chunk, 0, peer, slot);
  };
  const auto pass_on = [&](int distance, int chunk) {
    if (distance == num_pairs - 1) return;
    put(chunk, builder.Ahead(2), slot_of(distance + 1, chunk));
  };
  const auto release = [&](int chunk, int slot) {
    builder.Add(StepKind::kRelease, Payload::kOperand, chunk, 0, kNone, slot);
  };
  put(own, neighbour, 0);
  pass_on(0, own);
  builder.Multiply(own, kNone, 1);
  builder.Add(StepKind::kWait, Payload::kOperand, neighbour, 0, neighbour, 0);
  pass_on(0, neighbour);
  builder.Multiply(neighbour, 0, 1);
  release(neighbour, 0);
  for (int distance = 1; distance < num_pairs; ++distance) {
    // Waits for the two chunks in the order in which rank r - 2 sends them.
    const int first = builder.Behind(2 * distance);
    for (const int chunk : {first, first ^ 1}) {
      builder.Add(StepKind::kWait, Payload::kOperand, chunk, 0, builder.Behind(2),
                  slot_of(distance, chunk));
      pass_on(distance, chunk);
    }
    const int even = first - first % 2;
    builder.Multiply(even, slot_of(distance, even), 2);
    for (const int chunk : {even, even + 1}) release(chunk, slot_of(distance, chunk));
  }
}

void AppendAllGather(ScheduleBuilder& builder, Method method, StepKind consume) {
  builder.BeginStage();
  if (method == Method::kRingExchange) {
    AppendRing(builder, consume);
  } else {
    AppendSplits(builder, consume);
  }
}

// Appends the second exchange of an all-reduce. Every rank puts the sums of its rows,
// which are in its result, into a slot of each peer, and copies the sums that arrive.
// Peers are divided into at most kMaxGroups groups. The copies of one group overlap
// with the puts of the next one. For P = 8 ranks, rank 0:
//
//   put to 1 2 3 | wait for 7 6 5 | copy 7 6 5 | put to 4 5 6 | wait ... | copy 1
void AppendAllGatherOfSums(ScheduleBuilder& builder) {
  constexpr int kMaxGroups = 3;
  builder.BeginStage();
  const int num_ranks = builder.num_ranks();
  const int group = (num_ranks - 1 + kMaxGroups - 1) / kMaxGroups;
  for (int split = 0; split < builder.num_splits(); ++split) {
    for (int begin = 1; begin < num_ranks; begin += group) {
      const int end = std::min(begin + group, num_ranks);
      for (int distance = begin; distance < end; ++distance) {
        builder.Send(StepKind::kPut, Payload::kSum, builder.rank(), split,
                     builder.Ahead(distance), builder.SlotOf(distance, split));
      }
      const auto for_each_peer = [&](StepKind kind) {
        for (int distance = begin; distance < end; ++distance) {
          const int chunk = builder.Behind(distance);
          builder.Add(kind, Payload::kSum, chunk, split,
                      kind == StepKind::kWait ? chunk : kNone,
                      builder.SlotOf(distance, split));
        }
      };
      for_each_peer(StepKind::kWait);
      for_each_peer(StepKind::kCopy);
      for_each_peer(StepKind::kRelease);
    }
  }
}

}  // namespace jax_ub
