// A device executes the work of one rank. Work is enqueued on lanes: each lane executes
// its work in order, and lanes run concurrently. The CPU device executes work before
// the function returns. Stream devices only enqueue it, and events order their lanes.
//
// The transport's operations run on the communication lane: a put or a signal executes
// after all work that was enqueued on that lane before. Received data may be read after
// an event that was recorded after the wait for it.
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
inline constexpr Lane kCommunicationLane = 0;  // lanes 1, 2, ... run GEMMs

// Identifies a recorded point of a lane, which is reached when all work that was
// enqueued before it is done.
using EventId = int;
inline constexpr EventId kNoEvent = -1;

class Device {
 public:
  virtual ~Device() = default;

  // Returns the number of lanes for GEMMs, which are the lanes 1 to
  // num_product_lanes().
  virtual int num_product_lanes() const = 0;
  // Returns whether functions only enqueue work. If false, they return when the work is
  // done, events have no effect, and the caller runs GEMMs that overlap with the
  // schedule.
  virtual bool enqueues() const = 0;

  // Returns the dtype in which partial sums are stored and sent.
  virtual DType PartialDType(const CallAttributes& attributes,
                             const RankCall& call) const = 0;
  // Returns the number of splits per chunk if the caller does not choose one.
  virtual int DefaultSplits(CollectiveKind collective) const = 0;

  // Allocates memory that is valid until the end of the call.
  virtual Tensor Allocate(DType dtype,
                          int64_t batch,
                          int64_t rows,
                          int64_t features) = 0;

  // Computes GEMMs on a lane. `step` is the schedule's step that they belong to, for
  // the trace.
  virtual void Multiply(Lane lane,
                        std::vector<GemmProblem> problems,
                        const Step& step) = 0;
  virtual void Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) = 0;
  // Sums the parts as SumChunks of reduce/reduce.h does.
  virtual void Sum(Lane lane,
                   std::span<const ConstMatrix> parts,
                   int64_t rows,
                   int64_t columns,
                   const Matrix& out) = 0;

  virtual EventId Record(Lane lane) = 0;
  // Makes all work that is enqueued on `lane` from now on start after `event`.
  virtual void Await(Lane lane, EventId event) = 0;
};

}  // namespace jax_ub
