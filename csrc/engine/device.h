// Where a rank computes. Its work is put on lanes: what is put on one lane is done in
// that order, lanes run beside each other. A device may do everything at once (the
// CPU's) or only enqueue it (streams); marks order the lanes of one that enqueues.
//
// The transport's steps belong to the communication lane: a put or a signal comes behind
// all that lane was given before, and what arrived may be read behind a mark recorded
// after the wait for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/call.h"
#include "gemm/gemm.h"
#include "reduce/reduce.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace jax_ub {

using Lane = int;
inline constexpr Lane kCommunicationLane = 0;  // lanes of products follow

// A point of a lane: everything that it was given until then.
using EventId = int;
inline constexpr EventId kNoEvent = -1;

class Device {
 public:
  virtual ~Device() = default;

  // Lanes 1 ... num_product_lanes().
  virtual int num_product_lanes() const = 0;
  // False where a function returns when its work is done: marks say nothing then, and
  // products that run beside the schedule are the caller's.
  virtual bool enqueues() const = 0;

  // In what partial sums are kept and sent.
  virtual DType PartialDType(const CallAttributes& attributes,
                             const RankCall& call) const = 0;
  // Pieces of a chunk where the caller leaves it to the engine.
  virtual int DefaultSplits(CollectiveKind pattern) const = 0;

  // Memory of the call, until its end.
  virtual Tensor Allocate(DType dtype,
                          int64_t batch,
                          int64_t rows,
                          int64_t features) = 0;

  // `step`: of which step of the schedule the products are.
  virtual void Multiply(Lane lane,
                        std::vector<GemmProblem> problems,
                        const Step& step) = 0;
  virtual void Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) = 0;
  // SumChunks of reduce/reduce.h.
  virtual void Sum(Lane lane,
                   std::span<const ConstMatrix> parts,
                   int64_t rows,
                   int64_t columns,
                   const Matrix& out) = 0;

  virtual EventId Record(Lane lane) = 0;
  // What `lane` is given from now on begins after the mark.
  virtual void Await(Lane lane, EventId event) = 0;
};

}  // namespace jax_ub
