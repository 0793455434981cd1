#include "engine/executor.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "engine/direct.h"
#include "engine/exchange.h"
#include "engine/segments.h"
#include "platform/error.h"
#include "reduce/reduce.h"

namespace jax_ub {

namespace {

// Pieces of a shard when the caller leaves it to the engine: enough that all but a
// quarter of the communication can hide.
constexpr int kDefaultSplits = 4;

// Below this a job is not worth waking others for.
constexpr double kInlineUs = 50;

Pattern PatternOf(const Attributes& at) {
  switch (at.op) {
    case Op::kAllGatherMatmul:
      return Pattern::kAllGatherMatmul;
    case Op::kMatmulReduceScatter:
      return Pattern::kMatmulReduceScatter;
    case Op::kMatmulAllReduce:
      return Pattern::kMatmulAllReduce;
    case Op::kReduceScatter:
    case Op::kBulkReduceScatter:
      return Pattern::kReduceScatter;
    case Op::kAllReduce:
      return Pattern::kAllReduce;
    case Op::kMatmul:
    case Op::kWgrad:
    case Op::kAllGather:
    case Op::kBulkAllGather:
      break;
  }
  return Pattern::kAllGather;
}

bool IsGather(Pattern pattern) {
  return pattern == Pattern::kAllGatherMatmul || pattern == Pattern::kAllGather;
}

bool HasProduct(Pattern pattern) {
  return pattern != Pattern::kAllGather && pattern != Pattern::kReduceScatter &&
         pattern != Pattern::kAllReduce;
}

// Elements of any shape are rows of one feature, so that they can be cut anywhere.
Tensor AsRows(const Attributes& at, Tensor tensor) {
  if (at.op == Op::kAllReduce) {
    tensor.rows = tensor.num_elements();
    tensor.batch = tensor.features = 1;
  }
  return tensor;
}

// The tensors of one pass of a schedule.
struct Exchange {
  Tensor operand;        // the own shard; or what is summed, when there is no product
  Tensor gathered;       // where copies go; no data: nowhere
  Tensor result;         // where sums go
  int64_t num_rows = 0;  // that the chunks share
};

Tensor Gathered(const Attributes& at, Tensor shard) {
  shard.rows *= at.num_ranks;
  shard.data = nullptr;
  return shard;
}

// One per tensor that is communicated: several only for the gradients of a wgrad.
std::vector<Exchange> ExchangesOf(const Attributes& at, const RankCall& call) {
  const size_t n = at.num_kernels;
  std::vector<Exchange> exchanges;
  const auto gather = [&](const Tensor& shard, std::byte* to) {
    Exchange exchange{shard, Gathered(at, shard), {}, shard.rows * at.num_ranks};
    exchange.gathered.data = to;
    exchanges.push_back(exchange);
  };
  const auto reduce = [&](const Tensor& partial, const Tensor& result) {
    exchanges.push_back({partial, result, result, partial.rows});
  };
  switch (at.op) {
    case Op::kAllGatherMatmul:
      gather(call.operands[0], at.return_gathered ? call.results[n].data : nullptr);
      break;
    case Op::kAllGather:
      gather(call.operands[0], call.results[0].data);
      break;
    case Op::kBulkAllGather:
      gather(call.operands[2 * n], call.results[1].data);
      break;
    case Op::kWgrad:
      if (at.gather == Gather::kX) gather(call.operands[0], nullptr);
      if (at.gather == Gather::kDy) {
        for (size_t i = 0; i < n; ++i) gather(call.operands[1 + i], nullptr);
      }
      break;
    case Op::kMatmul:
    case Op::kMatmulReduceScatter:
    case Op::kMatmulAllReduce:
    case Op::kReduceScatter:
    case Op::kAllReduce:
      reduce(AsRows(at, call.operands[0]), AsRows(at, call.results[0]));
      break;
    case Op::kBulkReduceScatter:
      reduce(call.operands.back(), call.results.back());
      break;
  }
  return exchanges;
}

// One rank, one pass.
class RankExecution {
 public:
  RankExecution(const Attributes& at,
                const RankCall& call,
                const Exchange& exchange,
                const Schedule& schedule,
                double timeout_s,
                Transport& transport,
                Crew& crew,
                const TraceContext& trace)
      : at_(at),
        call_(call),
        exchange_(exchange),
        schedule_(schedule),
        timeout_s_(timeout_s),
        transport_(transport),
        crew_(crew),
        trace_(trace),
        held_(3 * schedule.num_ranks * schedule.num_splits, kNone) {
    if (HasProduct(schedule.pattern) && !IsGather(schedule.pattern)) {
      partial_memory_.emplace(DType::kF32, exchange.operand.batch, exchange.num_rows,
                              exchange.result.features);
    }
    partial_ = partial_memory_ ? partial_memory_->tensor() : exchange.operand;
  }

  void Run() {
    for (const Step& step : schedule_.steps) Take(step);
    transport_.EndCall();
  }

 private:
  void Take(const Step& step) {
    const WaitReason reason{at_.label, step.chunk, timeout_s_};
    // Kinds of steps and of spans have the same numbers.
    const TraceScope scope(trace_, static_cast<TraceKind>(step.kind), step);
    switch (step.kind) {
      case StepKind::kMultiply:
        return Multiply(step);
      case StepKind::kCopy:
        return CopyPiece(step);
      case StepKind::kReduce:
        return Reduce(step);
      case StepKind::kPut:
        return Put(step);
      case StepKind::kPublish:
        return transport_.Signal(step.peer, step.slot);
      case StepKind::kWait:
        transport_.Wait(step.peer, step.slot, reason);
        // Parts to be added are found by who sent them, the others by what they are.
        Held(step.payload, step.payload == Payload::kPartial ? step.peer : step.chunk,
             step.split) = step.slot;
        return;
      case StepKind::kRelease:
        return transport_.Release(step.slot);
      case StepKind::kWaitFree:
        return transport_.WaitFree(step.peer, step.slot, reason);
    }
  }

  int& Held(Payload payload, int chunk, int split) {
    return held_[(static_cast<size_t>(payload) * schedule_.num_ranks + chunk) *
                     schedule_.num_splits +
                 split];
  }

  RowRange RowsOfChunk(int chunk, int split) const {
    return PieceRows(exchange_.num_rows, schedule_.num_ranks, schedule_.num_splits,
                     chunk, split);
  }
  RowRange RowsOfChunk(const Step& step) const {
    return RowsOfChunk(step.chunk, step.split);
  }

  // Rows of the own shard begin at its chunk, those of scattered results too.
  int64_t FirstRow(const Tensor& tensor, int chunk) const {
    return tensor.rows == exchange_.num_rows ? 0 : RowsOfChunk(chunk, 0).begin;
  }

  Piece PieceOf(const Tensor& tensor, const Step& step) const {
    const RowRange rows = RowsOfChunk(step);
    const int64_t first = FirstRow(tensor, step.chunk);
    return {tensor, rows.begin - first, rows.end - first};
  }

  // The piece where this rank has it: in its own tensors, or in a slot.
  Piece Source(const Step& step) {
    const bool own = step.chunk == schedule_.rank;
    if (step.payload == Payload::kPartial) return PieceOf(partial_, step);
    const Tensor& tensor =
        step.payload == Payload::kSum ? exchange_.result : exchange_.operand;
    if (own) return PieceOf(tensor, step);
    const RowRange rows = RowsOfChunk(step);
    return PackedPiece({tensor, rows.begin, rows.end},
                       transport_.slot(Held(step.payload, step.chunk, step.split)));
  }

  void Put(const Step& step) {
    transport_.Write(step.peer, step.slot, 0, Source(step).rows());
    transport_.Signal(step.peer, step.slot);
  }

  void CopyPiece(const Step& step) {
    if (exchange_.gathered.data == nullptr) return;
    const Rows from = Source(step).rows();
    const Rows to = PieceOf(exchange_.gathered, step).rows();
    CopyRows(from.data, from.stride_bytes, const_cast<std::byte*>(to.data),
             to.stride_bytes, from.num_rows, from.row_bytes);
  }

  void Multiply(const Step& step) {
    Work work;
    if (IsGather(schedule_.pattern)) {
      if (step.chunk == kAllChunks) {
        const Tensor& x = exchange_.gathered;
        AddGatherProducts({x, 0, x.rows}, 0, work);
      } else {
        AddGatherProducts(Source(step), RowsOfChunk(step).begin, work);
        CopyPiece(step);
      }
    } else if (step.chunk == kAllChunks) {
      AddPartialProduct(0, exchange_.num_rows, work);
    } else {
      const RowRange rows = RowsOfChunk(step);
      AddPartialProduct(rows.begin, rows.end, work);
    }
    work.set_trace(trace_, step);
    RunWork(std::move(work), crew_);
  }

  // y_i[b, row + r] = scale * x[b, r] w_i + bias_i + residual_i[b, row + r] for the rows r
  // of the piece.
  void AddGatherProducts(const Piece& x, int64_t row, Work& work) {
    if (x.num_rows() == 0) return;
    const int n = at_.num_kernels;
    for (int i = 0; i < n; ++i) {
      const Tensor& y = call_.results[i];
      OperandSegments a(x.tensor.dtype);
      OperandSegments w(x.tensor.dtype);
      ResultSegments c(y.dtype);
      a.AddInner(x.tensor.features);
      c.AddColumns(y.features);
      for (int64_t b = 0; b < y.batch; ++b) {
        a.AddOuter(x.num_rows());
        a.Append(RowsOf(x.tensor, b, x.begin));
        c.AddRows(x.num_rows());
        c.Append(RowsOf(y, b, row));
      }
      w.AddInner(x.tensor.features);
      w.AddOuter(y.features);
      w.Append(KernelOf(call_.operands[1 + i], at_.rhs_transposed));
      GemmProblem problem =
          Problem(at_.scale, std::move(a), std::move(w), std::move(c));
      if (at_.has_bias) {
        const Tensor& bias = call_.operands[1 + n + i];
        problem.addends.push_back({bias.dtype, {}});
        problem.addends.back().segments.assign(y.batch, {bias.data, 0});
      }
      if (at_.has_residual) {
        const Tensor& residual = call_.operands[FirstResidual(at_) + i];
        problem.addends.push_back({residual.dtype, {}});
        for (int64_t b = 0; b < y.batch; ++b) {
          problem.addends.back().segments.push_back(
              {residual.At(b, row), residual.features});
        }
      }
      work.Add(std::move(problem), crew_.num_threads());
    }
  }

  // Rows [begin, end) of this rank's partial sum, in f32.
  void AddPartialProduct(int64_t begin, int64_t end, Work& work) {
    if (begin == end) return;
    const int n = at_.num_kernels;
    OperandSegments a(call_.operands[0].dtype);
    OperandSegments w(call_.operands[0].dtype);
    ResultSegments c(DType::kF32);
    w.AddOuter(partial_.features);
    c.AddColumns(partial_.features);
    for (int i = 0; i < n; ++i) {
      a.AddInner(call_.operands[i].features);
      w.AddInner(call_.operands[i].features);
      w.Append(KernelOf(call_.operands[n + i], at_.rhs_transposed));
    }
    for (int64_t b = 0; b < partial_.batch; ++b) {
      a.AddOuter(end - begin);
      for (int i = 0; i < n; ++i) a.Append(RowsOf(call_.operands[i], b, begin));
      c.AddRows(end - begin);
      c.Append(RowsOf(partial_, b, begin));
    }
    work.Add(Problem(at_.scale, std::move(a), std::move(w), std::move(c)),
             crew_.num_threads());
  }

  // The parts of all ranks, in their order, then bias and residual; rounded once.
  void Reduce(const Step& step) {
    const Piece own = PieceOf(partial_, step);
    const Piece out = PieceOf(exchange_.result, step);
    if (out.num_rows() == 0) return;
    for (int64_t b = 0; b < out.tensor.batch; ++b) {
      std::vector<ConstMatrix> parts;
      for (int r = 0; r < schedule_.num_ranks; ++r) {
        const Piece part =
            r == schedule_.rank
                ? own
                : PackedPiece(own,
                              transport_.slot(Held(Payload::kPartial, r, step.split)));
        parts.push_back(
            {part.tensor.At(b, part.begin), part.tensor.features, part.tensor.dtype});
      }
      if (HasProduct(schedule_.pattern)) AddBiasAndResidual(b, out.begin, parts);
      SumChunks(parts, out.num_rows(), out.tensor.features,
                {out.tensor.At(b, out.begin), out.tensor.features, out.tensor.dtype});
    }
  }

  void AddBiasAndResidual(int64_t b, int64_t row, std::vector<ConstMatrix>& parts) {
    size_t next = 2 * static_cast<size_t>(at_.num_kernels);
    if (at_.has_bias) {
      const Tensor& bias = call_.operands[next++];
      parts.push_back({bias.data, 0, bias.dtype});
    }
    if (at_.has_residual) {
      const Tensor& residual = call_.operands[next];
      parts.push_back({residual.At(b, row), residual.features, residual.dtype});
    }
  }

  const Attributes& at_;
  const RankCall& call_;
  const Exchange& exchange_;
  const Schedule& schedule_;
  const double timeout_s_;
  Transport& transport_;
  Crew& crew_;
  const TraceContext& trace_;
  std::vector<int> held_;  // [payload][chunk, or sender of a part][split] -> slot
  std::optional<OwnedTensor> partial_memory_;
  Tensor partial_;
};

}  // namespace

void RunWork(Work work, Crew& crew) {
  const bool small = work.estimated_us() < kInlineUs;
  const auto job = std::make_shared<WorkJob>(std::move(work));
  if (small) {
    crew.RunInline(*job);
    job->Wait();
  } else {
    crew.RunAndWait(job);
  }
}

bool UsesSlots(const Attributes& at) {
  if (at.method == Method::kDirect || at.ranks.empty()) return false;
  return at.op != Op::kMatmul && (at.op != Op::kWgrad || at.gather != Gather::kNone);
}

SlotPlan PlanSlots(const Attributes& at, const RankCall& call) {
  SlotPlan plan;
  plan.pattern = PatternOf(at);
  if (!HasSchedule(plan.pattern, at.method)) {
    throw UnsupportedError("jax_ub." + at.label + ": " + std::string(OpName(at.op)) +
                           " has no method " + std::string(MethodName(at.method)) +
                           ": use direct, ring_exchange, pipeline or external");
  }
  const int splits =
      at.num_splits == 0 ? kDefaultSplits : static_cast<int>(at.num_splits);
  const Schedule schedule =
      MakeSchedule(plan.pattern, at.method, 0, at.num_ranks, splits);
  plan.num_splits = schedule.num_splits;
  plan.num_slots = schedule.num_slots;
  for (const Exchange& exchange : ExchangesOf(at, call)) {
    const int64_t chunk_rows = (exchange.num_rows + at.num_ranks - 1) / at.num_ranks;
    const int64_t piece_rows = (chunk_rows + plan.num_splits - 1) / plan.num_splits;
    const bool gather = IsGather(plan.pattern);
    const Tensor& sent = gather ? exchange.operand : exchange.result;
    int64_t element_bytes = SizeOf(exchange.operand.dtype);
    if (!gather) element_bytes = std::max(element_bytes, SizeOf(exchange.result.dtype));
    if (!gather && HasProduct(plan.pattern)) element_bytes = SizeOf(DType::kF32);
    plan.slot_bytes = std::max(plan.slot_bytes,
                               sent.batch * piece_rows * sent.features * element_bytes);
  }
  return plan;
}

void ExecuteRank(const Attributes& at,
                 const RankCall& call,
                 const SlotPlan& plan,
                 double timeout_s,
                 Transport& transport,
                 Crew& crew,
                 const TraceContext& trace) {
  const Schedule schedule = MakeSchedule(plan.pattern, at.method, transport.rank(),
                                         transport.num_ranks(), plan.num_splits);
  const bool whole = at.op == Op::kWgrad ||
                     (at.op == Op::kAllGatherMatmul && at.method == Method::kExternal);
  std::vector<OwnedTensor> gathered;
  for (Exchange exchange : ExchangesOf(at, call)) {
    if (whole && exchange.gathered.data == nullptr) {
      const Tensor& like = exchange.gathered;
      gathered.emplace_back(like.dtype, like.batch, like.rows, like.features);
      exchange.gathered = gathered.back().tensor();
    }
    RankExecution(at, call, exchange, schedule, timeout_s, transport, crew, trace)
        .Run();
  }
  if (at.op != Op::kWgrad) return;
  RankCall local = call;
  const size_t first = at.gather == Gather::kX ? 0 : 1;
  for (size_t i = 0; i < gathered.size(); ++i) {
    local.operands[first + i] = gathered[i].tensor();
  }
  Work work = PlanProducts(at, {local}, crew.num_threads());
  work.set_trace(trace, {});
  const TraceScope scope(trace, TraceKind::kMultiply, {});
  RunWork(std::move(work), crew);
}

}  // namespace jax_ub
