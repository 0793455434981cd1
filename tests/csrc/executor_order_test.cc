// Tests the order of the operations that the executor enqueues on lanes: lanes and
// marks alone order every read after its write, and no wait is superfluous.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine/communicated_tensors.h"
#include "engine/executor.h"
#include "engine_calls.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;

constexpr int kEveryAwait = -1;

// A vector clock: for each lane, the number of its operations that precede a point of a
// lane.
using Clock = std::vector<int>;

// Detects memory accesses that no lane or mark orders, for each word.
class Memory {
 public:
  explicit Memory(int num_lanes) : clocks_(num_lanes, Clock(num_lanes, 0)) {}

  // Begins the next operation of a lane.
  void Begin(Lane lane) { ++clocks_[lane][lane]; }
  void Read(Lane lane, const std::byte* data, int64_t size_bytes) {
    ForEachWord(data, size_bytes, [&](Word& word) {
      Check(lane, word.write);
      word.reads[lane] = clocks_[lane][lane];
    });
  }
  void Write(Lane lane, const std::byte* data, int64_t size_bytes) {
    ForEachWord(data, size_bytes, [&](Word& word) {
      Check(lane, word.write);
      for (const auto& [reader, number] : word.reads) Check(lane, {reader, number});
      word.reads.clear();
      word.write = {lane, clocks_[lane][lane]};
    });
  }

  const Clock& clock(Lane lane) const { return clocks_[lane]; }
  void Follow(Lane lane, const Clock& other) {
    for (size_t i = 0; i < other.size(); ++i) {
      clocks_[lane][i] = std::max(clocks_[lane][i], other[i]);
    }
  }

  int64_t num_conflicts() const { return num_conflicts_; }

 private:
  struct Access {
    Lane lane = 0;
    int number = 0;  // 0: before the call
  };
  struct Word {
    Access write;
    std::map<Lane, int> reads;
  };

  // Calls `function` for each word of two bytes, the size of which divides the size of
  // every dtype.
  template <typename Function>
  void ForEachWord(const std::byte* data,
                   int64_t size_bytes,
                   const Function& function) {
    for (int64_t i = 0; i < size_bytes; i += 2) function(words_[data + i]);
  }
  void Check(Lane lane, const Access& before) {
    num_conflicts_ += clocks_[lane][before.lane] < before.number;
  }

  std::vector<Clock> clocks_;
  std::unordered_map<const std::byte*, Word> words_;
  int64_t num_conflicts_ = 0;
};

class OrderDevice : public Device {
 public:
  OrderDevice(int num_product_lanes, Memory& memory, int left_out)
      : num_product_lanes_(num_product_lanes), memory_(memory), left_out_(left_out) {}

  int num_awaits() const { return num_awaits_; }

  int num_product_lanes() const override { return num_product_lanes_; }
  bool enqueues() const override { return true; }
  DType PartialDType(const CallAttributes& at, const RankCall& call) const override {
    return DType::kBF16;
  }
  int DefaultSplits(CollectiveKind collective) const override { return 3; }

  Tensor Allocate(DType dtype, int64_t batch, int64_t rows, int64_t features) override {
    Tensor tensor{dtype, batch, rows, features, nullptr};
    memories_.push_back(std::make_unique<std::byte[]>(tensor.size_bytes()));
    tensor.data = memories_.back().get();
    return tensor;
  }
  void Multiply(Lane lane,
                std::vector<GemmProblem> problems,
                const Step& step) override {
    for (const GemmProblem& problem : problems) {
      memory_.Begin(lane);
      ReadOperand(lane, problem.a);
      ReadOperand(lane, problem.b);
      const auto& rows = problem.c.row_bounds;
      const auto& columns = problem.c.column_bounds;
      for (size_t i = 0; i < problem.c.segments.size(); ++i) {
        const size_t row = i / (columns.size() - 1);
        const size_t column = i % (columns.size() - 1);
        const int64_t num_rows = rows[row + 1] - rows[row];
        const int64_t num_columns = columns[column + 1] - columns[column];
        for (const AddendView& addend : problem.addends) {
          const AddendSegment& segment = addend.segments[i];
          ForEachRow(segment.data, segment.row_stride, num_rows, num_columns,
                     addend.dtype, [&](const std::byte* data, int64_t size_bytes) {
                       memory_.Read(lane, data, size_bytes);
                     });
        }
        const Segment& segment = problem.c.segments[i];
        ForEachRow(segment.data, segment.row_stride, num_rows, num_columns,
                   problem.c.dtype, [&](const std::byte* data, int64_t size_bytes) {
                     memory_.Write(lane, data, size_bytes);
                   });
      }
    }
  }
  void Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) override {
    memory_.Begin(lane);
    for (int64_t row = 0; row < from.num_rows; ++row) {
      memory_.Read(lane, from.data + row * from.stride_bytes, from.row_bytes);
      memory_.Write(lane, to + row * to_stride, from.row_bytes);
    }
  }
  void Sum(Lane lane,
           std::span<const ConstMatrix> parts,
           int64_t rows,
           int64_t columns,
           const Matrix& out) override {
    memory_.Begin(lane);
    for (const ConstMatrix& part : parts) {
      ForEachRow(part.data, part.row_stride, rows, columns, part.dtype,
                 [&](const std::byte* data, int64_t size_bytes) {
                   memory_.Read(lane, data, size_bytes);
                 });
    }
    ForEachRow(out.data, out.row_stride, rows, columns, out.dtype,
               [&](const std::byte* data, int64_t size_bytes) {
                 memory_.Write(lane, data, size_bytes);
               });
  }

  EventId Record(Lane lane) override {
    marks_.push_back(memory_.clock(lane));
    return static_cast<EventId>(marks_.size()) - 1;
  }
  void Await(Lane lane, EventId event) override {
    if (num_awaits_++ != left_out_) memory_.Follow(lane, marks_[event]);
  }

 private:
  template <typename Function>
  static void ForEachRow(const std::byte* data,
                         int64_t row_stride,
                         int64_t num_rows,
                         int64_t num_columns,
                         DType dtype,
                         const Function& function) {
    for (int64_t row = 0; row < num_rows; ++row) {
      function(data + row * row_stride * SizeOf(dtype), num_columns * SizeOf(dtype));
    }
  }

  void ReadOperand(Lane lane, const OperandView& view) {
    const size_t num_inner = view.inner_bounds.size() - 1;
    for (size_t i = 0; i < view.segments.size(); ++i) {
      const ConstSegment& segment = view.segments[i];
      const size_t outer = i / num_inner;
      const size_t inner = i % num_inner;
      int64_t rows = view.outer_bounds[outer + 1] - view.outer_bounds[outer];
      int64_t columns = view.inner_bounds[inner + 1] - view.inner_bounds[inner];
      const bool is_row_major = segment.inner_stride == 1;
      if (!is_row_major) std::swap(rows, columns);
      ForEachRow(segment.data,
                 is_row_major ? segment.outer_stride : segment.inner_stride, rows,
                 columns, view.dtype, [&](const std::byte* data, int64_t size_bytes) {
                   memory_.Read(lane, data, size_bytes);
                 });
    }
  }

  const int num_product_lanes_;
  Memory& memory_;
  const int left_out_;
  int num_awaits_ = 0;
  std::vector<Clock> marks_;
  std::vector<std::unique_ptr<std::byte[]>> memories_;
};

// The transport on the communication lane. A wait writes the data that arrive; at the
// end of a call the peers may write all slots.
class OrderTransport : public Transport {
 public:
  OrderTransport(int rank, int num_ranks, const SlotRequirements& plan, Memory& memory)
      : rank_(rank),
        num_ranks_(num_ranks),
        slot_bytes_(plan.slot_bytes),
        slots_(plan.num_slots * plan.slot_bytes),
        memory_(memory) {}

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  const std::byte* slot(int index) const override {
    return slots_.data() + index * slot_bytes_;
  }

  void Write(int peer, int slot, const Rows& rows) override {
    memory_.Begin(kCommunicationLane);
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      memory_.Read(kCommunicationLane, rows.data + row * rows.stride_bytes,
                   rows.row_bytes);
    }
  }
  void Signal(int peer, int slot) override {}
  void Wait(int peer, int index, const WaitReason& reason) override {
    memory_.Begin(kCommunicationLane);
    memory_.Write(kCommunicationLane, slot(index), slot_bytes_);
  }
  void Release(int slot) override {}
  void WaitFree(int peer, int slot, const WaitReason& reason) override {}
  void EndCall() override {
    memory_.Begin(kCommunicationLane);
    memory_.Write(kCommunicationLane, slots_.data(), slots_.size());
  }

 private:
  const int rank_;
  const int num_ranks_;
  const int64_t slot_bytes_;
  std::vector<std::byte> slots_;
  Memory& memory_;
};

struct Outcome {
  int64_t num_conflicts = 0;
  int num_awaits = 0;
};

Outcome Run(
    const CallAttributes& at, const RankCall& call, int rank, int lanes, int left_out) {
  Memory memory(1 + lanes);
  OrderDevice device(lanes, memory, left_out);
  const SlotRequirements plan = ComputeSlotRequirements(at, call, device);
  OrderTransport transport(rank, at.num_ranks, plan, memory);
  ExecuteRank(at, call, plan, 0, transport, device, {});
  return {memory.num_conflicts(), device.num_awaits()};
}

template <typename Function>
void ForEachCall(const std::vector<int>& sizes, const Function& function) {
  for (const int num_ranks : sizes) {
    for (int op = 0; op < kNumOps; ++op) {
      for (const Method method : {Method::kRingExchange, Method::kPipeline,
                                  Method::kBulk, Method::kExternal}) {
        for (const CallAttributes& at :
             Variants(static_cast<Op>(op), method, num_ranks)) {
          if (!HasMethod(at.op, at.method) || !UsesSlots(at)) continue;
          Arrays arrays(1);
          const auto calls = MakeCalls(at, {2, 5, 3, 2}, arrays);
          for (const int lanes : {1, 2, 3}) {
            // Checks an even and an odd rank, since the schedules of neighbours differ.
            function(at, calls, num_ranks / 2, lanes);
            if (num_ranks > 1) function(at, calls, num_ranks / 2 - 1, lanes);
          }
        }
      }
    }
  }
}

std::string NameOf(const CallAttributes& at, int lanes) {
  return std::string(OpName(at.op)) + " by " + std::string(MethodName(at.method)) +
         ", " + std::string(VariantName(at.variant)) +
         ", P = " + std::to_string(at.num_ranks) + ", " + std::to_string(lanes) +
         " lanes";
}

TEST(EveryReadRunsAfterItsWrite) {
  ForEachCall({1, 2, 3, 4, 8},
              [](const CallAttributes& at, const std::vector<RankCall>& calls, int rank,
                 int lanes) {
                const Outcome outcome = Run(at, calls[rank], rank, lanes, kEveryAwait);
                if (outcome.num_conflicts == 0) return;
                check::Fail(__FILE__, __LINE__, NameOf(at, lanes), ": ",
                            outcome.num_conflicts, " conflicts");
              });
}

TEST(NoWaitOfALaneCanBeLeftOut) {
  int num_tried = 0;
  ForEachCall({2, 4}, [&](const CallAttributes& at, const std::vector<RankCall>& calls,
                          int rank, int lanes) {
    const int num_awaits = Run(at, calls[rank], rank, lanes, kEveryAwait).num_awaits;
    for (int left_out = 0; left_out < num_awaits; ++left_out, ++num_tried) {
      if (Run(at, calls[rank], rank, lanes, left_out).num_conflicts > 0) continue;
      check::Fail(__FILE__, __LINE__, NameOf(at, lanes), ": wait ", left_out, " of ",
                  num_awaits, " orders nothing");
    }
  });
  CHECK(num_tried > 500);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
