#include "schedule/builder.h"

namespace jax_ub {

namespace {

// ring_exchange. Rank r starts with its own chunk. In each step it forwards the chunk
// that it received from r - 1 to r + 1, so it processes chunk r - d in step d while the
// next chunk is in flight. Slot d - 1 holds the chunk of the rank d behind. P = 4:
//
//   step         0     1     2     3
//   rank 0       0     3     2     1      chunk of the GEMM
//   rank 1       1     0     3     2
//   rank 2       2     1     0     3
//   rank 3       3     2     1     0
//   sent to r+1  r    r-1   r-2    -
//   from slot    -     0     1     2
void AppendRing(ScheduleBuilder& builder,
                Payload payload,
                StepKind consume,
                bool consume_own) {
  const int num_ranks = builder.num_ranks();
  const int next = builder.Ahead(1);
  const auto pass_on = [&](int distance) {
    if (distance == num_ranks - 1) return;
    builder.Send(StepKind::kPut, payload, builder.Behind(distance), 0, next,
                 builder.SlotOf(distance + 1, 0));
  };
  pass_on(0);
  if (consume_own) builder.Add(consume, payload, builder.rank(), 0);
  for (int distance = 1; distance < num_ranks; ++distance) {
    const int chunk = builder.Behind(distance);
    const int slot = builder.SlotOf(distance, 0);
    builder.Add(StepKind::kWait, payload, chunk, 0, builder.Behind(1), slot);
    pass_on(distance);
    builder.Add(consume, payload, chunk, 0, kNone, slot);
    builder.Add(StepKind::kRelease, payload, chunk, 0, kNone, slot);
  }
}

// pipeline; with one split also bulk and external. Every rank puts its own chunk into a
// slot of each peer, split by split and nearest peer first, so that the ranks do not
// all write to the same peer at once. P = 4, two splits, rank 0 (chunk.split):
//
//   put       0.0 to 1, 2, 3   0.1 to 1, 2, 3
//   multiply           0.0              0.1      3.0   2.0   1.0   3.1   2.1   1.1
//   wait                                         3.0   2.0   1.0   3.1   2.1   1.1
void AppendSplits(ScheduleBuilder& builder,
                  Payload payload,
                  StepKind consume,
                  bool consume_own) {
  const int num_ranks = builder.num_ranks();
  for (int split = 0; split < builder.num_splits(); ++split) {
    for (int distance = 1; distance < num_ranks; ++distance) {
      builder.Send(StepKind::kPut, payload, builder.rank(), split,
                   builder.Ahead(distance), builder.SlotOf(distance, split));
    }
    if (consume_own) builder.Add(consume, payload, builder.rank(), split);
  }
  for (int split = 0; split < builder.num_splits(); ++split) {
    for (int distance = 1; distance < num_ranks; ++distance) {
      const int chunk = builder.Behind(distance);
      const int slot = builder.SlotOf(distance, split);
      builder.Add(StepKind::kWait, payload, chunk, split, chunk, slot);
      builder.Add(consume, payload, chunk, split, kNone, slot);
      builder.Add(StepKind::kRelease, payload, chunk, split, kNone, slot);
    }
  }
}

}  // namespace

// aggregate, P even. Neighbours 2i and 2i + 1 exchange their chunks. Then each rank r
// sends the chunks that it has to r + 2, two per step. Each GEMM except the first two
// is over the two chunks of a pair. The own chunk needs no communication and is not
// adjacent to the neighbour's in memory, so these two get separate GEMMs: the first
// runs while the neighbour's chunk is in flight. P = 6:
//
//   step               0      1      2      3
//   rank 0             0      1     4 5    2 3     chunks of the GEMM
//   rank 1             1      0     4 5    2 3
//   rank 2             2      3     0 1    4 5
//   from slots         -      0     1 2    3 4
//   sent to r xor 1    r
//   sent to r + 2      r    r xor 1  received from r - 2, except in the last step
//
// Slots 2d - 1 and 2d hold the pair that is d pairs behind, the even chunk first.
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
    // The chunks are received in the order in which the rank behind sends them.
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

void AppendAllGather(ScheduleBuilder& builder,
                     Method method,
                     Payload payload,
                     StepKind consume,
                     bool consume_own) {
  builder.BeginStage();
  if (method == Method::kRingExchange) {
    AppendRing(builder, payload, consume, consume_own);
  } else {
    AppendSplits(builder, payload, consume, consume_own);
  }
}

}  // namespace jax_ub
