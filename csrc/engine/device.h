// A device executes the work of one rank. Work is enqueued on lanes. Each lane executes
// its work in order, and lanes run concurrently. A function of the CPU device returns
// after its work is done. A function of a stream device only enqueues the work, and
// events order the lanes.
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

// Identifies an event: a point in the queue of a lane (a stream, on a GPU). The event
// occurs when all work that was enqueued on the lane before it is done.
using EventId = int;
inline constexpr EventId kNoEvent = -1;

class Device {
 public:
  virtual ~Device() = default;

  // Returns the number of lanes for GEMMs. They are numbered from 1, after the
  // communication lane 0.
  virtual int num_product_lanes() const = 0;
  // Returns whether functions return before their work is done, as on a GPU. If false,
  // events have no effect, and the caller must run concurrent GEMMs itself.
  virtual bool enqueues() const = 0;

  // Returns the dtype in which the partial sums of a GEMM are stored and sent.
  virtual DType PartialDType(const CallAttributes& attributes,
                             const RankCall& call) const = 0;
  // Returns the number of splits into which a chunk (the rows of one rank) is divided
  // for the transfer. Used if the call does not specify the number.
  virtual int DefaultSplits(CollectiveKind collective) const = 0;

  // Allocates a tensor in memory that remains valid until the end of the call.
  virtual Tensor Allocate(DType dtype,
                          int64_t batch,
                          int64_t rows,
                          int64_t features) = 0;

  // Computes GEMMs on a lane. A trace records them under schedule step `step`.
  virtual void Multiply(Lane lane,
                        std::vector<GemmProblem> problems,
                        const Step& step) = 0;
  virtual void Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) = 0;
  // Adds matrices in f32, in the order of `parts`, and rounds once (SumChunks in
  // reduce/reduce.h).
  virtual void Sum(Lane lane,
                   std::span<const ConstMatrix> parts,
                   int64_t rows,
                   int64_t columns,
                   const Matrix& out) = 0;

  virtual EventId Record(Lane lane) = 0;
  // Makes later work on `lane` start after `event`.
  virtual void Await(Lane lane, EventId event) = 0;
};

}  // namespace jax_ub
