#include "engine/cuda/multicast_reduce.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "engine/communicated_tensors.h"
#include "engine/lane_dependencies.h"

namespace jax_ub {

namespace {

// Returns the maximum number of splits: the slots provide one flag per peer, split and
// stage.
int MostPieces(const SlotRequirements& plan, int num_ranks) {
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
        exchange_(CommunicatedTensorsOf(at, call).front()),
        has_product_(HasProduct(plan.pattern)),
        timeout_s_(timeout_s),
        sum_(sum),
        transport_(transport),
        device_(device),
        lanes_(device),
        partial_{plan.partial_dtype, exchange_.result.batch, exchange_.num_rows,
                 exchange_.result.features, const_cast<std::byte*>(transport.slot(0))} {
    if (!has_product_) partial_.dtype = exchange_.operand.dtype;
    // Splits must start at a multiple of the vector size. If rows do not, there is one
    // split.
    const bool has_pieces = RowSlice{partial_}.row_bytes() % kMulticastBytes == 0;
    num_pieces_ = has_pieces ? MostPieces(plan, transport.num_ranks()) : 1;
  }

  void Run() {
    std::vector<Dependency> made;
    for (int piece = 0; piece < num_pieces_; ++piece) made.push_back(Make(piece));
    for (int piece = 0; piece < num_pieces_; ++piece) {
      lanes_.Await(kCommunicationLane, made[piece]);
      MeetAll(0, piece);
      Sum(piece);
      SignalAll(1, piece);
      // Finish the previous split while the peers compute the sums of this one.
      if (piece > 0) Finish(piece - 1);
    }
    Finish(num_pieces_ - 1);
    transport_.EndCall();
  }

 private:
  RowRange RowsOf(int piece) const {
    return SplitRows(exchange_.num_rows, 1, num_pieces_, 0, piece);
  }

  // Computes the rank's partial sums of a split into its slots.
  Dependency Make(int piece) {
    const RowRange rows = RowsOf(piece);
    if (!has_product_) {
      const Rows from = RowSlice{exchange_.operand, rows.begin, rows.end}.rows();
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

  // Returns the slot whose flag is used, in the order of the schedule's slots.
  int SlotOf(int stage, int distance, int piece) const {
    return (stage * (transport_.num_ranks() - 1) + distance - 1) * num_pieces_ + piece;
  }
  void SignalAll(int stage, int piece) {
    const int num_ranks = transport_.num_ranks();
    for (int distance = 1; distance < num_ranks; ++distance) {
      const int peer = (transport_.rank() + distance) % num_ranks;
      const int slot = SlotOf(stage, distance, piece);
      transport_.WaitFree(peer, slot, {at_.label, peer, timeout_s_});
      transport_.Signal(peer, slot);
    }
  }
  void AwaitAll(int stage, int piece) {
    const int num_ranks = transport_.num_ranks();
    for (int distance = 1; distance < num_ranks; ++distance) {
      const int peer = (transport_.rank() + num_ranks - distance) % num_ranks;
      transport_.Wait(peer, SlotOf(stage, distance, piece),
                      {at_.label, peer, timeout_s_});
    }
  }
  void MeetAll(int stage, int piece) {
    SignalAll(stage, piece);
    AwaitAll(stage, piece);
  }

  // Sums rows [begin, end) of contiguous batches.
  void SumRows(int64_t batch, int64_t num_batches, const RowRange& rows) {
    MulticastRange range;
    range.offset = partial_.At(batch, rows.begin) - partial_.data;
    range.num_elements = num_batches * rows.size() * partial_.features;
    range.dtype = partial_.dtype;
    if (range.num_elements == 0) return;
    if (has_product_) AddAddends(batch, rows, range);
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
  void Sum(int piece) {
    if (num_pieces_ == 1) {
      return SumRows(0, partial_.batch, {0, exchange_.num_rows});
    }
    for (int64_t batch = 0; batch < partial_.batch; ++batch) {
      SumRows(batch, 1, RowsOf(piece));
    }
  }

  // Waits for the sums of all ranks and copies them into the result.
  void Finish(int piece) {
    AwaitAll(1, piece);
    const RowRange rows = RowsOf(piece);
    const Tensor& out = exchange_.result;
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
  const CommunicatedTensor exchange_;
  const bool has_product_;
  const double timeout_s_;
  const std::function<void(const MulticastRange&)>& sum_;
  Transport& transport_;
  Device& device_;
  LaneDependencies lanes_;
  Tensor partial_;  // this rank's partial sums of all rows, in its slots
  int num_pieces_ = 1;
};

}  // namespace

bool ReducesByMulticast(const CallAttributes& at,
                        const RankCall& call,
                        const SlotRequirements& plan) {
  if (at.num_ranks == 1) return false;
  if (!IsAllReduce(plan.pattern)) return false;
  const Tensor& result = call.results[0];
  const DType partial =
      HasProduct(plan.pattern) ? plan.partial_dtype : call.operands[0].dtype;
  // The switch rounds 16-bit sums, so a result of higher precision is not possible.
  if (partial != DType::kF32 && partial != result.dtype) return false;
  const int64_t bytes = result.num_elements() * SizeOf(partial);
  return MostPieces(plan, at.num_ranks) > 0 &&
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
