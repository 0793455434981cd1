#include "engine/cuda/multicast_reduce.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "engine/communicated_tensors.h"
#include "engine/gemm_builders.h"
#include "engine/lane_dependencies.h"

namespace jax_ub {

namespace {

// Returns the maximum number of splits of the rows. The number of slots limits it,
// because each split needs a slot per peer in each of two stages.
int MaxSplits(const SlotRequirements& plan, int num_ranks) {
  return std::min(plan.num_splits, plan.num_slots / (2 * (num_ranks - 1)));
}

class MulticastReduction {
 public:
  MulticastReduction(const CallAttributes& at,
                     const RankCall& call,
                     const SlotRequirements& plan,
                     double timeout_s,
                     const std::function<void(const MulticastRange&)>& sum,
                     Transport& transport,
                     Device& device)
      : at_(at),
        call_(call),
        communicated_(CommunicatedTensorsOf(at, call).front()),
        has_product_(HasProduct(plan.collective)),
        timeout_s_(timeout_s),
        sum_(sum),
        transport_(transport),
        device_(device),
        lanes_(device),
        partial_{plan.partial_dtype, communicated_.result.batch, communicated_.num_rows,
                 communicated_.result.features,
                 const_cast<std::byte*>(transport.slot(0))} {
    if (!has_product_) partial_.dtype = communicated_.operand.dtype;
    // A split must begin at a multiple of kMulticastBytes, the size of a multicast
    // access. Therefore, all rows form one split if the size of a row is not a multiple
    // of kMulticastBytes.
    const bool can_split = RowSlice{partial_}.row_bytes() % kMulticastBytes == 0;
    num_splits_ = can_split ? MaxSplits(plan, transport.num_ranks()) : 1;
  }

  void Run() {
    std::vector<Dependency> produced;
    for (int split = 0; split < num_splits_; ++split)
      produced.push_back(ComputePartialSums(split));
    for (int split = 0; split < num_splits_; ++split) {
      lanes_.Await(kCommunicationLane, produced[split]);
      Barrier(0, split);
      Sum(split);
      SignalAll(1, split);
      // The rank finishes the previous split while the peers compute their sums of the
      // current split.
      if (split > 0) Finish(split - 1);
    }
    Finish(num_splits_ - 1);
    transport_.EndCall();
  }

 private:
  RowRange RowsOf(int split) const {
    return SplitRows(communicated_.num_rows, 1, num_splits_, 0, split);
  }

  // Computes the rank's partial sums for a split (part of the rows), and stores them in
  // its slots. No wait is needed, because the previous call has ended only after the
  // peers had accessed these slots.
  Dependency ComputePartialSums(int split) {
    const RowRange rows = RowsOf(split);
    if (!has_product_) {
      const Rows from = RowSlice{communicated_.operand, rows.begin, rows.end}.rows();
      const Rows to = RowSlice{partial_, rows.begin, rows.end}.rows();
      device_.Copy(kCommunicationLane, from, const_cast<std::byte*>(to.data),
                   to.stride_bytes);
      return {};
    }
    const Lane lane = lanes_.NextProduct();
    auto products = PartialProducts(at_, call_, partial_, rows.begin, rows.end);
    if (!products.empty()) device_.Multiply(lane, std::move(products), {});
    return lanes_.Record(lane);
  }

  // Returns one slot (receive buffer) per peer. The flag of the slot means that its
  // sender has finished `stage` of this split of the rows. With `direction` 1, this
  // rank signals slots in the peers' memory. With -1, the peers signal slots in this
  // rank's memory.
  std::vector<PeerSlot> PeerSlotsOf(int stage, int split, int direction) const {
    const int num_ranks = transport_.num_ranks();
    std::vector<PeerSlot> slots;
    for (int distance = 1; distance < num_ranks; ++distance) {
      const int peer =
          (transport_.rank() + num_ranks + direction * distance) % num_ranks;
      const int slot = (stage * (num_ranks - 1) + distance - 1) * num_splits_ + split;
      slots.push_back({peer, slot, peer});
    }
    return slots;
  }
  // Signals all peers, after they have ended their previous call. In that call, another
  // rank may have used the same flags, and its late signal would overwrite the new
  // signal.
  void SignalAll(int stage, int split) {
    const std::vector<PeerSlot> slots = PeerSlotsOf(stage, split, 1);
    transport_.WaitAllFree(slots, {at_.label, -1, timeout_s_});
    for (const PeerSlot& slot : slots) transport_.Signal(slot.peer, slot.slot);
  }
  void AwaitAll(int stage, int split) {
    transport_.WaitAll(PeerSlotsOf(stage, split, -1), {at_.label, -1, timeout_s_});
  }
  void Barrier(int stage, int split) {
    SignalAll(stage, split);
    AwaitAll(stage, split);
  }

  // Sums `rows` of the batch elements [batch, batch + num_batches) over all ranks, by
  // multicast.
  void SumRows(int64_t batch, int64_t num_batches, const RowRange& rows) {
    MulticastRange range;
    range.offset = partial_.At(batch, rows.begin) - partial_.data;
    range.num_elements = num_batches * rows.size() * partial_.features;
    range.dtype = partial_.dtype;
    if (range.num_elements == 0) return;
    AddAddends(batch, rows, range);
    sum_(range);
  }
  void AddAddends(int64_t batch, const RowRange& rows, MulticastRange& range) {
    const auto add = [&](const std::byte* data, int64_t period, DType dtype) {
      range.addends.push_back({reinterpret_cast<CUdeviceptr>(data), period, dtype});
    };
    if (at_.has_bias) {
      const Tensor& bias = call_.operands[FirstResidual(at_) - 1];
      add(bias.data, partial_.features, bias.dtype);
    }
    if (at_.has_residual) {
      const Tensor& residual = call_.operands[FirstResidual(at_)];
      add(residual.At(batch, rows.begin), range.num_elements, residual.dtype);
    }
  }
  void Sum(int split) {
    if (num_splits_ == 1) {
      return SumRows(0, partial_.batch, {0, communicated_.num_rows});
    }
    for (int64_t batch = 0; batch < partial_.batch; ++batch) {
      SumRows(batch, 1, RowsOf(split));
    }
  }

  // Waits until all ranks have stored their sums of this split in the slots, and copies
  // the sums from the slots to the result.
  void Finish(int split) {
    AwaitAll(1, split);
    const RowRange rows = RowsOf(split);
    const Tensor& out = communicated_.result;
    if (rows.size() == 0) return;
    for (int64_t batch = 0; batch < out.batch; ++batch) {
      const ConstMatrix sums = {partial_.At(batch, rows.begin), partial_.features,
                                partial_.dtype};
      device_.Sum(kCommunicationLane, {&sums, 1}, rows.size(), out.features,
                  {out.At(batch, rows.begin), out.features, out.dtype});
    }
  }

  const CallAttributes& at_;
  const RankCall& call_;
  const CommunicatedTensor communicated_;
  const bool has_product_;
  const double timeout_s_;
  const std::function<void(const MulticastRange&)>& sum_;
  Transport& transport_;
  Device& device_;
  LaneDependencies lanes_;
  Tensor partial_;  // this rank's partial sums of all rows, in its slots
  int num_splits_ = 1;
};

}  // namespace

bool ReducesByMulticast(const CallAttributes& at,
                        const RankCall& call,
                        const SlotRequirements& plan) {
  if (at.num_ranks == 1) return false;
  if (!IsAllReduce(plan.collective)) return false;
  const Tensor& result = call.results[0];
  const DType partial =
      HasProduct(plan.collective) ? plan.partial_dtype : call.operands[0].dtype;
  // The NVLink switch rounds sums of 16-bit numbers to 16 bits, so the result must have
  // the same dtype as 16-bit partial sums.
  if (partial != DType::kF32 && partial != result.dtype) return false;
  const int64_t bytes = result.num_elements() * SizeOf(partial);
  return MaxSplits(plan, at.num_ranks) > 0 &&
         bytes <= plan.num_slots * CudaSlots::StrideOf(plan.slot_bytes);
}

void ReduceByMulticast(const CallAttributes& at,
                       const RankCall& call,
                       const SlotRequirements& plan,
                       double timeout_s,
                       const std::function<void(const MulticastRange&)>& sum,
                       Transport& transport,
                       Device& device) {
  MulticastReduction(at, call, plan, timeout_s, sum, transport, device).Run();
}

}  // namespace jax_ub
