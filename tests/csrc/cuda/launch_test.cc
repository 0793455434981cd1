// Tests which kernels and copies are enqueued, and with which parameters.

#include <string>
#include <vector>

#include "check.h"
#include "cuda/recorded_program.h"
#include "platform/error.h"
#include "random_gemm.h"
#include "reduce/cuda/sum_kernels.h"
#include "reduce/reduce.h"
#include "transport/cuda/cuda_slots.h"

namespace jax_ub {

const Driver& Recording() {
  static const Driver driver = RecordingDriver();
  return driver;
}

CUstream StreamInto(std::vector<Operation>& operations) {
  return reinterpret_cast<CUstream>(&operations);
}

template <typename Params>
const Params& ParamsOf(const Operation& operation) {
  CHECK_EQ(operation.params.size(), sizeof(Params));
  return *reinterpret_cast<const Params*>(operation.params.data());
}

SumPart PartOf(const void* data, int64_t row_stride, DType dtype) {
  return {reinterpret_cast<uint64_t>(data), row_stride, dtype};
}

Operation LaunchSum(const SumParams& params) {
  const SumKernels kernels(Recording(), kHopper);
  std::vector<Operation> launched;
  kernels.Sum(StreamInto(launched), params);
  CHECK_EQ(launched.size(), 1u);
  CHECK_EQ(launched[0].kernel->name, kSumKernel);
  return launched[0];
}

TEST(a_sum_is_cut_into_blocks_that_reach_every_element) {
  const std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {3, 7},    {16, 64}, {5, 33},
                                                 {4, 8}, {1000, 1}, {7, 5000}};
  for (const auto& [rows, columns] : kShapes) {
    for (int64_t gap : {0, 3, 8}) {
      const int64_t stride = columns + gap;
      Random random(rows * columns);
      std::vector<float> own(rows * stride), other(rows * stride), bias(columns);
      for (auto* part : {&own, &other, &bias}) {
        for (float& x : *part) x = RandomValue(random, Values::kNormal);
      }
      std::vector<float> found(rows * stride), expected(rows * stride);
      SumParams params = {};
      params.num_parts = 3;
      params.rows = rows;
      params.columns = columns;
      params.out = PartOf(found.data(), stride, DType::kF32);
      params.parts[0] = PartOf(own.data(), stride, DType::kF32);
      params.parts[1] = PartOf(other.data(), stride, DType::kF32);
      params.parts[2] = PartOf(bias.data(), 0, DType::kF32);
      const Operation sum = LaunchSum(params);
      CHECK(sum.num_blocks >= 1 && sum.num_blocks <= 7u * kRecordedSms);
      sum.kernel->run(sum.params.data(), sum.num_blocks, sum.num_threads);
      const auto bytes = [](auto& v) { return reinterpret_cast<std::byte*>(v.data()); };
      const ConstMatrix chunks[] = {{bytes(own), stride, DType::kF32},
                                    {bytes(other), stride, DType::kF32},
                                    {bytes(bias), 0, DType::kF32}};
      SumChunks(chunks, rows, columns, {bytes(expected), stride, DType::kF32});
      CHECK(found == expected);
    }
  }
}

TEST(vectors_are_used_where_everything_is_aligned) {
  alignas(16) static float memory[256];
  const auto aligned = [](int64_t rows, int64_t columns, int64_t stride, int shift) {
    SumParams params = {};
    params.num_parts = 2;
    params.rows = rows;
    params.columns = columns;
    params.out = PartOf(memory, stride, DType::kF32);
    params.parts[0] = PartOf(memory, stride, DType::kF32);
    params.parts[1] = PartOf(memory + shift, stride, DType::kF32);
    return ParamsOf<SumParams>(LaunchSum(params));
  };
  CHECK_EQ(aligned(4, 8, 12, 0).is_aligned, 1u);
  CHECK_EQ(aligned(4, 8, 12, 1).is_aligned, 0u);
  CHECK_EQ(aligned(4, 8, 11, 0).is_aligned, 0u);
  CHECK_EQ(aligned(1, 8, 11, 0).is_aligned, 1u);  // no second row
  // Rows without gaps are treated as one row, also if they are short.
  const SumParams dense = aligned(32, 1, 1, 0);
  CHECK_EQ(dense.rows, 1);
  CHECK_EQ(dense.columns, 32);
  CHECK_EQ(dense.is_aligned, 1u);
}

TEST(a_sum_of_nothing_or_too_much_is_refused) {
  const SumKernels kernels(Recording(), kHopper);
  std::vector<Operation> launched;
  SumParams params = {};
  params.rows = params.columns = 1;
  CHECK_THROWS(kernels.Sum(StreamInto(launched), params), "0 parts to sum");
  params.num_parts = kMaxParts + 1;
  CHECK_THROWS(kernels.Sum(StreamInto(launched), params), "21 parts to sum");
  params.num_parts = 1;
  params.rows = 0;
  kernels.Sum(StreamInto(launched), params);
  CHECK(launched.empty());
}

TEST(a_copy_moves_the_largest_units_that_fit) {
  const SumKernels kernels(Recording(), kHopper);
  const auto unit = [&](uint64_t from, int64_t rows, int64_t bytes, int64_t stride) {
    std::vector<Operation> launched;
    kernels.Copy(StreamInto(launched), {from, 4096, rows, bytes, stride, bytes, 0}, 0,
                 0);
    return ParamsOf<CopyParams>(launched.at(0)).unit_bytes;
  };
  CHECK_EQ(unit(0, 4, 64, 96), 16u);
  CHECK_EQ(unit(0, 4, 64, 72), 8u);
  CHECK_EQ(unit(4, 4, 64, 96), 4u);
  CHECK_EQ(unit(0, 4, 6, 16), 2u);
  CHECK_EQ(unit(1, 4, 64, 96), 1u);
  CHECK_EQ(unit(0, 1, 64, 72), 16u);  // no second row
  CHECK_EQ(unit(0, 16, 2, 2), 16u);   // one row
}

TEST(a_copy_takes_as_many_sms_as_it_may_in_clusters_where_there_are_any) {
  const auto launch = [](CUdevice device, int num_blocks, int cluster_size) {
    const SumKernels kernels(Recording(), device);
    std::vector<Operation> launched;
    kernels.Copy(StreamInto(launched), {0, 4096, 1, 64, 64, 64, 0}, num_blocks,
                 cluster_size);
    return std::pair(launched.at(0).num_blocks, launched.at(0).cluster_size);
  };
  CHECK(launch(kHopper, 5, 2) == std::pair(6u, 2u));
  CHECK(launch(kHopper, 5, 1) == std::pair(5u, 0u));
  CHECK(launch(kHopper, 0, 0) == std::pair(16u, 0u));
  CHECK(launch(kAmpere, 5, 2) == std::pair(5u, 0u));
}

// The CudaSlots of rank 1 of three, with slots of 40 bytes at a distance of 256 bytes.
struct End {
  explicit End(bool use_ce = true)
      : flags(Recording()),
        sums(Recording(), kHopper),
        all_reduce(Recording()),
        slots(1,
              addresses,
              7,
              {5, 77},
              {4, 40},
              {.driver = &Recording(),
               .flags = &flags,
               .sums = &sums,
               .stream = StreamInto(operations),
               .copies = {use_ce, 3, 0},
               .all_reduce = &all_reduce}) {}

  static RankSlotAddress Place(CUdeviceptr base) {
    return {base,         base + 4096,  base + 8192, base + 10240,
            base + 12288, base + 12544, base + 12800};
  }

  const std::vector<RankSlotAddress> addresses = {Place(1 << 20), Place(2 << 20),
                                                  Place(3 << 20)};
  std::vector<Operation> operations;
  FlagKernels flags;
  SumKernels sums;
  AllReduceKernel all_reduce;
  CudaSlots slots;
};

const std::string kLabel = "call";
const WaitReason kReason{kLabel, 9, 1.5};

TEST(splits_are_copied_to_the_peers_slot_by_copy_engine) {
  End end;
  end.slots.Write(2, 3, {nullptr, 1, 32, 0});
  end.slots.Write(2, 3, {nullptr, 4, 8, 8});
  end.slots.Write(2, 3, {nullptr, 2, 8, 24});
  end.slots.Write(2, 3, {nullptr, 2, 0, 24});  // nothing
  CHECK_EQ(end.operations.size(), 4u);
  const CUdeviceptr slot = end.addresses[2].slots + 3 * 256;
  CHECK_EQ(end.operations[0].writes[0].slots, slot);
  CHECK_EQ(end.operations[0].writes[0].size_bytes, 32);
  CHECK_EQ(end.operations[1].writes[0].size_bytes, 32);  // rows without gaps
  // Rows with gaps are copied one by one, since copies in a graph have one dimension.
  for (const int row : {0, 1}) {
    CHECK_EQ(end.operations[2 + row].writes[0].slots, slot + 8 * row);
    CHECK_EQ(end.operations[2 + row].writes[0].size_bytes, 8);
  }
  CHECK_THROWS(end.slots.Write(2, 3, {nullptr, 1, 48, 0}),
               "a split of 48 bytes does not fit into a slot of 40");
}

TEST(many_rows_with_gaps_are_copied_by_a_kernel) {
  End end;
  end.slots.Write(2, 3, {nullptr, 65, 0, 24});
  CHECK(end.operations.empty());
  std::vector<Operation> operations;
  const SumKernels sums(Recording(), kHopper);
  EnqueueCopy(Recording(), sums, StreamInto(operations), {256, 512, 65, 8, 24, 8, 0},
              {});
  CHECK_EQ(operations.size(), 1u);
  CHECK_EQ(operations[0].kernel->name, kCopyKernel);
  CHECK_EQ(ParamsOf<CopyParams>(operations[0]).num_rows, 65);
}

TEST(splits_are_copied_by_a_kernel_if_copy_engines_are_disabled) {
  End end(/*use_ce=*/false);
  end.slots.Write(0, 1, {nullptr, 2, 8, 24});
  const Operation& copy = end.operations.at(0);
  CHECK_EQ(copy.kernel->name, kCopyKernel);
  CHECK_EQ(copy.num_blocks, 3u);
  CHECK_EQ(ParamsOf<CopyParams>(copy).to, end.addresses[0].slots + 256);
  CHECK_EQ(ParamsOf<CopyParams>(copy).from_stride, 24);
  CHECK_EQ(ParamsOf<CopyParams>(copy).to_stride, 8);
}

TEST(waits_say_what_they_wait_for) {
  End end;
  end.slots.Wait(2, 3, kReason);
  const WaitParams& wait = ParamsOf<WaitParams>(end.operations.at(0));
  const WaitingCall& waiting = wait.waiting;
  CHECK_EQ(wait.num_flags, 1u);
  CHECK_EQ(wait.ahead, 1u);
  CHECK_EQ(wait.flags[0].flag, end.addresses[1].arrived + 3 * kFlagLineBytes);
  CHECK_EQ(wait.flags[0].announced, end.addresses[1].announced + 2 * kFlagLineBytes);
  CHECK_EQ(wait.flags[0].peer, 2u);
  CHECK_EQ(wait.flags[0].slot, 3u);
  CHECK_EQ(wait.flags[0].chunk, 9);
  CHECK_EQ(waiting.timeout_ns, 1'500'000'000u);
  CHECK_EQ(waiting.rank, 1u);
  CHECK_EQ(waiting.call, 5u);
  CHECK_EQ(waiting.tag, 77u);
  CHECK_EQ(waiting.own.error, 7u);
  CHECK_EQ(waiting.poisons.num_peers, 2u);
  CHECK_EQ(waiting.poisons.words[0], end.addresses[0].poison);
  CHECK_EQ(waiting.poisons.words[1], end.addresses[2].poison);
  CHECK_EQ(wait.signals.num_targets, 0u);
}

// The kernel of a wait sends the signals before it, if they are not too many.
TEST(signals_are_sent_with_the_next_wait) {
  End end;
  end.slots.Signal(0, 1);
  end.slots.Signal(2, 3);
  CHECK(end.operations.empty());
  const PeerSlot awaited[] = {{0, 1, 4}, {2, 3, 5}};
  end.slots.WaitAll(awaited, kReason);
  CHECK_EQ(end.operations.size(), 1u);
  const WaitParams wait = ParamsOf<WaitParams>(end.operations[0]);
  CHECK_EQ(wait.num_flags, 2u);
  CHECK_EQ(wait.flags[1].peer, 2u);
  CHECK_EQ(wait.flags[1].chunk, 5);
  CHECK_EQ(wait.signals.num_targets, 2u);
  CHECK_EQ(wait.signals.targets[0].flag, end.addresses[0].arrived + kFlagLineBytes);
  CHECK_EQ(wait.signals.targets[1].flag, end.addresses[2].arrived + 3 * kFlagLineBytes);
  CHECK_EQ(wait.signals.targets[1].poison, end.addresses[2].poison);
  for (int i = 0; i <= kMaxRanks; ++i) end.slots.Signal(0, 1);
  const std::vector<PeerSlot> many(kMaxRanks + 1, awaited[0]);
  end.slots.WaitAll(many, kReason);
  CHECK_EQ(end.operations.size(), 4u);
  CHECK_EQ(end.operations[1].kernel->name, kSignalKernel);
  CHECK_EQ(ParamsOf<SignalParams>(end.operations[1]).signals.num_targets, 16u);
  CHECK_EQ(ParamsOf<WaitParams>(end.operations[2]).signals.num_targets, 1u);
  CHECK_EQ(ParamsOf<WaitParams>(end.operations[2]).num_flags, 16u);
  CHECK_EQ(ParamsOf<WaitParams>(end.operations[3]).signals.num_targets, 0u);
  CHECK_EQ(ParamsOf<WaitParams>(end.operations[3]).num_flags, 1u);
  end.slots.Signal(0, 1);
  end.slots.EndCall();
  CHECK_EQ(end.operations.at(4).kernel->name, kSignalKernel);
}

TEST(a_partition_check_names_the_rank) {
  End end;
  end.slots.CheckPartition(64, 3);
  CHECK_EQ(end.operations.size(), 1u);
  CHECK_EQ(end.operations[0].kernel->name, kCheckPartitionKernel);
  const PartitionCheckParams& place = ParamsOf<PartitionCheckParams>(end.operations[0]);
  CHECK_EQ(place.partition, 64u);
  CHECK_EQ(place.expected, 3u);
  CHECK_EQ(place.what.rank, 1u);
  CHECK_EQ(place.what.call, 5u);
  CHECK_EQ(place.own.error, 7u);
  CHECK_EQ(place.peers.num_peers, 2u);
  CHECK_EQ(place.peers.words[0], end.addresses[0].poison);
  CHECK_EQ(place.peers.words[1], end.addresses[2].poison);
}

TEST(a_peer_is_awaited_once_a_call_before_it_is_written_to) {
  End end;
  end.slots.WaitFree(2, 3, kReason);
  end.slots.WaitFree(2, 1, kReason);
  end.slots.WaitFree(0, 1, kReason);
  CHECK_EQ(end.operations.size(), 2u);
  const WaitParams wait = ParamsOf<WaitParams>(end.operations[0]);
  CHECK_EQ(wait.flags[0].flag, end.addresses[1].freed + 2 * kFlagLineBytes);
  CHECK_EQ(wait.ahead, 0u);
  CHECK_EQ(wait.flags[0].slot, ErrorRecord::kNoSlot);
  // The first wait of a call announces it to all peers.
  CHECK_EQ(wait.announcements.num_peers, 2u);
  CHECK_EQ(wait.announcements.words[0], end.addresses[0].announced + kFlagLineBytes);
  CHECK_EQ(wait.announcements.words[1], end.addresses[2].announced + kFlagLineBytes);
  CHECK_EQ(ParamsOf<WaitParams>(end.operations[1]).announcements.num_peers, 0u);
  // The end is enqueued before the next call's first wait, or by Finish.
  end.slots.EndCall();
  CHECK_EQ(end.operations.size(), 2u);
  const PeerSlot both[] = {{2, 3, 0}, {0, 1, 0}, {2, 1, 0}};
  end.slots.WaitAllFree(both, kReason);
  CHECK_EQ(end.operations.size(), 4u);
  const EndParams& ended = ParamsOf<EndParams>(end.operations[2]);
  CHECK_EQ(end.operations[2].kernel->name, kEndKernel);
  CHECK_EQ(ended.call, 5u);
  CHECK_EQ(ended.tag, 77u);
  CHECK_EQ(ended.freed.num_targets, 2u);
  CHECK_EQ(ended.freed.targets[0].flag, end.addresses[0].freed + kFlagLineBytes);
  CHECK_EQ(ended.freed.targets[1].flag, end.addresses[2].freed + kFlagLineBytes);
  CHECK_EQ(ended.freed.targets[1].poison, end.addresses[2].poison);
  CHECK_EQ(ended.nan_fill.num_results, 0u);
  CHECK_EQ(ParamsOf<WaitParams>(end.operations[3]).num_flags, 2u);
  CHECK_EQ(ParamsOf<WaitParams>(end.operations[3]).announcements.num_peers, 2u);
}

// Slot d - 1 is for the rank that is d behind the slot's owner.
TEST(an_all_reduce_by_one_kernel_exchanges_with_all_peers) {
  End end;
  end.slots.AllReduce({.partial = reinterpret_cast<const std::byte*>(4096),
                       .dtype = DType::kBF16,
                       .num_elements = 20,
                       .addends = {{64, 5, DType::kF32}},
                       .out = reinterpret_cast<std::byte*>(8192),
                       .out_dtype = DType::kF32},
                      {kLabel, -1, 1.5});
  const Operation& launch = end.operations.at(0);
  CHECK_EQ(launch.kernel->name, kAllReduceKernel);
  CHECK_EQ(launch.num_blocks, 1u);
  CHECK_EQ(launch.num_threads, static_cast<unsigned>(kAllReduceThreads));
  const AllReduceParams& params = ParamsOf<AllReduceParams>(launch);
  CHECK_EQ(params.waiting.timeout_ns, 1'500'000'000u);
  CHECK_EQ(params.waiting.rank, 1u);
  CHECK_EQ(params.waiting.tag, 77u);
  CHECK_EQ(params.waiting.poisons.num_peers, 2u);
  CHECK_EQ(params.is_aligned, 1u);
  CHECK_EQ(params.num_elements, 20);
  CHECK_EQ(params.partial, 4096u);
  CHECK_EQ(params.out, 8192u);
  CHECK(params.out_dtype == DType::kF32);
  CHECK_EQ(params.num_addends, 1u);
  CHECK_EQ(params.num_peers, 2u);
  for (const int peer : {0, 2}) {
    const AllReducePeer& with = params.peers[peer / 2];
    const int from = peer == 0 ? 0 : 1;
    const int to = 1 - from;
    const RankSlotAddress& own = end.addresses[1];
    const RankSlotAddress& other = end.addresses[peer];
    const auto flag = [](CUdeviceptr flags, int slot) {
      return flags + slot * kFlagLineBytes;
    };
    CHECK_EQ(with.announcement, other.announced + kFlagLineBytes);
    CHECK_EQ(with.to, other.slots + to * 256);
    CHECK_EQ(with.signal, flag(other.arrived, to));
    CHECK_EQ(with.from, own.slots + from * 256);
    CHECK_EQ(with.arrived.flag, flag(own.arrived, from));
    CHECK_EQ(with.arrived.slot, static_cast<uint32_t>(from));
    CHECK_EQ(with.arrived.peer, static_cast<uint32_t>(peer));
    CHECK_EQ(with.arrived.chunk, -1);
    CHECK_EQ(with.freed.flag, own.freed + peer * kFlagLineBytes);
    CHECK_EQ(with.freed.slot, ErrorRecord::kNoSlot);
    CHECK_EQ(with.freed.announced, own.announced + peer * kFlagLineBytes);
  }
  AllReduceSum large;
  large.num_elements = 11;
  CHECK_THROWS(end.slots.AllReduce(large, {kLabel, -1, 1.5}),
               "partial sums of 44 bytes do not fit into a slot of 40");
}

TEST(any_number_of_results_can_be_filled_with_nan) {
  End end;
  const std::vector<NanFill::Result> results(kMaxResults + 1, {16, 4});
  end.slots.Finish(results);
  CHECK_EQ(end.operations.size(), 2u);
  CHECK_EQ(ParamsOf<EndParams>(end.operations[0]).nan_fill.num_results, 16u);
  CHECK_EQ(ParamsOf<NanFillParams>(end.operations[1]).nan_fill.num_results, 1u);
}

TEST(more_ranks_than_there_are_flags_for_are_refused) {
  const std::vector<RankSlotAddress> addresses(kMaxRanks + 1);
  CHECK_THROWS(CudaSlots(0, addresses, 0, {}, {}, {}), "17 ranks, expected at most");
}

}  // namespace jax_ub

CHECK_MAIN()
