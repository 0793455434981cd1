// Records the accesses of a reduction by multicast, except flags: the cells that it reads
// and writes. P = 2, two pieces; cells of the own slots, of rank r:
//
//   cell                    0          1          2          3
//   product of a piece    part r.0   part r.0   part r.1   part r.1
//   its sum, all ranks'   rank 0's   rank 1's   rank 0's   rank 1's share
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "cuda/recorded_operations.h"
#include "engine/cuda/cuda_device.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/cuda/multicast_params.h"

namespace jax_ub {

// A multicast address that represents the first slot of every rank. There is no memory
// at it.
inline constexpr CUdeviceptr kRecordedMulticast = CUdeviceptr{1} << 62;

// Records a reduction by multicast, whose GEMMs write slots concurrently with the
// communication lane.
class MulticastRecorder : public CudaDevice {
 public:
  // Returns the id of a rank's partial of a piece, or of a rank's share of the piece's
  // sums, in this call.
  using IdOf = std::function<PieceId(Payload payload, int owner, int piece)>;

  MulticastRecorder(RankProgram& program,
                    std::span<const RankSlotAddress> addresses,
                    int rank,
                    IdOf id_of)
      : program_(program),
        begin_(program.lane.size()),
        places_(addresses),
        rank_(rank),
        id_of_(std::move(id_of)),
        given_(1 + num_product_lanes()) {}

  // Returns a call whose pieces have one cell per rank; each rank sums one of them.
  static RankCall CallOf(const CallAttributes& at) {
    constexpr int64_t kFeatures = kSlotAlignment / sizeof(float);
    const int64_t rows = at.num_ranks * at.num_splits;
    const Tensor sums = {DType::kF32, 1, rows, kFeatures, nullptr};
    if (at.op == Op::kAllReduce) return {{sums}, {sums}};
    return {
        {{DType::kF32, 1, rows, 1, nullptr}, {DType::kF32, 1, 1, kFeatures, nullptr}},
        {sums}};
  }

  int num_product_lanes() const override { return 2; }
  Tensor Allocate(DType, int64_t, int64_t, int64_t) override { return {}; }
  void Multiply(Lane lane, std::vector<GemmProblem> problems, const Step&) override {
    for (const GemmProblem& problem : problems) {
      given_[lane] |= 1u << program_.concurrent.size();
      const int64_t size_bytes = problem.m * problem.n * SizeOf(problem.c.dtype);
      program_.concurrent.push_back(
          {begin_, {}, {Part(problem.c.segments.front().data, size_bytes)}});
    }
  }
  void Copy(Lane, const Rows& from, std::byte* to, int64_t) override {
    program_.lane.emplace_back().writes = {Part(to, from.num_rows * from.row_bytes)};
  }
  void Sum(Lane,
           std::span<const ConstMatrix> parts,
           int64_t rows,
           int64_t columns,
           const Matrix&) override {
    const auto from = reinterpret_cast<CUdeviceptr>(parts[0].data);
    const int piece = PieceAt(from - places_[rank_].slots);
    const int64_t share_bytes =
        rows * columns * SizeOf(parts[0].dtype) / static_cast<int64_t>(places_.size());
    std::vector<Content> reads;
    for (size_t owner = 0; owner < places_.size(); ++owner) {
      reads.push_back({from + owner * share_bytes, share_bytes,
                       id_of_(Payload::kSum, static_cast<int>(owner), piece)});
    }
    program_.lane.emplace_back().reads = reads;
  }
  EventId Record(Lane lane) override {
    marks_.push_back(given_[lane]);
    return static_cast<EventId>(marks_.size()) - 1;
  }
  void Await(Lane, EventId mark) override {
    needs_.push_back({program_.lane.size(), marks_[mark]});
  }

  // Records the cells that the last launched kernel reads and writes.
  void NoteSum() {
    Operation& sum = program_.lane.back();
    const auto& params =
        *reinterpret_cast<const MulticastSumParams*>(sum.params.data());
    const CUdeviceptr offset = params.data - kRecordedMulticast;
    const CUdeviceptr first = offset + params.begin * kMulticastBytes;
    const int64_t size_bytes = (params.end - params.begin) * kMulticastBytes;
    const PieceId made = id_of_(Payload::kSum, rank_, PieceAt(offset));
    for (size_t rank = 0; rank < places_.size(); ++rank) {
      const PieceId part =
          id_of_(Payload::kPartial, static_cast<int>(rank), PieceAt(offset));
      sum.reads.push_back({places_[rank].slots + first, size_bytes, part});
      sum.writes.push_back({places_[rank].slots + first, size_bytes, made});
    }
  }
  // Makes each operation that follows a wait depend on the awaited operations.
  void NoteNeeds() {
    for (const auto& [operation, bits] : needs_) program_.lane[operation].needs |= bits;
  }

 private:
  int PieceAt(CUdeviceptr offset) const {
    return static_cast<int>(offset / (places_.size() * kSlotAlignment));
  }
  Content Part(const std::byte* data, int64_t size_bytes) const {
    const auto address = reinterpret_cast<CUdeviceptr>(data);
    const int piece = PieceAt(address - places_[rank_].slots);
    return {address, size_bytes, id_of_(Payload::kPartial, rank_, piece)};
  }

  RankProgram& program_;
  const size_t begin_;  // of the call: lanes begin there
  const std::span<const RankSlotAddress> places_;
  const int rank_;
  const IdOf id_of_;
  std::vector<uint32_t> given_;                     // [lane]: concurrent, as bits
  std::vector<uint32_t> marks_;                     // [mark]
  std::vector<std::pair<size_t, uint32_t>> needs_;  // of an operation of the lane
};

}  // namespace jax_ub
