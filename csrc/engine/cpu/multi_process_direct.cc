#include "engine/cpu/multi_process_direct.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/communicated_tensors.h"
#include "engine/cpu/cpu_device.h"
#include "engine/cpu/direct_planner.h"
#include "engine/cpu/work_list.h"
#include "engine/segments.h"

namespace jax_ub {

namespace {

constexpr int64_t kAlignment = 64;

// Size of the largest all-reduce result (in f32) that uses a single barrier. Up to this
// size, a second barrier takes longer than adding all elements in every process.
constexpr int64_t kSmallBytes = 64 << 10;

int64_t Aligned(int64_t size_bytes) {
  return (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Divides `size` rows among the processes. Returns the contiguous range of rows that
// process number `process` reduces.
RowRange RowsOfProcess(int64_t size, int process, int num_processes) {
  return {size * process / num_processes, size * (process + 1) / num_processes};
}

int64_t MaxRowsOfProcess(int64_t size, int num_processes) {
  return (size + num_processes - 1) / num_processes;
}

int64_t PartialSumBytes(int64_t rows, int64_t columns) {
  return Aligned(rows * columns * SizeOf(DType::kF32));
}

bool IsSmall(const Tensor& result) {
  return result.num_elements() * SizeOf(DType::kF32) <= kSmallBytes;
}

// The state of one call of ExecuteMultiProcess, with a function for each step.
class Execution {
 public:
  Execution(const MultiProcessCall& call,
            SharedMemoryCommunicator& communicator,
            ThreadPool& pool,
            const std::function<void()>& compare_signatures)
      : at_(call.attributes),
        info_(InfoOf(at_.op)),
        local_(call.local),
        number_(call.number),
        timeout_s_(call.timeout_s),
        trace_(call.trace),
        communicator_(communicator),
        local_ranks_(communicator.local_ranks()),
        pool_(pool),
        compare_signatures_(compare_signatures) {}

  void Run() {
    if (info_.communicated == Communicated::kPartialSum) {
      return IsAllReduce(info_.collective) ? AllReduceProduct()
                                           : ReduceScatterProduct();
    }
    if (IsAllReduce(info_.collective) && !IsSmall(local_[0].results[0])) {
      return AllReduce();
    }
    ReadInPlace();
  }

 private:
  std::byte* buffer(int rank) const { return communicator_.buffer(rank, number_); }

  // Returns the buffer in which a process stores results for its peers: the buffer of
  // its lowest rank.
  std::byte* BufferOfProcess(int process) const { return buffer(LowestRank(process)); }

  int LowestRank(int process) const {
    int rank = 0;
    while (communicator_.process_of_rank(rank) != process) ++rank;
    return rank;
  }

  int num_processes() const { return communicator_.num_processes(); }
  int process() const { return communicator_.process(); }
  bool IsLocal(int rank) const {
    return communicator_.process_of_rank(rank) == process();
  }

  void Run(WorkList work) {
    work.set_trace(trace_, {});
    RunWork(work, pool_);
  }

  // Waits until all processes have stored their sums, so that this process can read
  // them.
  void SecondBarrier() {
    const TraceScope scope(trace_, TraceKind::kBarrier);
    communicator_.Barrier(number_, 1, WaitReason{at_.label, 0, timeout_s_});
  }

  // Returns the calls of all ranks. The operands of ranks in other processes are in the
  // shared buffers of these ranks.
  std::vector<RankCall> AllCalls() const {
    std::vector<RankCall> all(at_.num_ranks);
    const std::vector<size_t> communicated = CommunicatedOperands(at_, local_[0]);
    for (size_t i = 0; i < local_ranks_.size(); ++i) all[local_ranks_[i]] = local_[i];
    for (int rank = 0; rank < at_.num_ranks; ++rank) {
      if (IsLocal(rank)) continue;
      all[rank].operands = local_[0].operands;
      all[rank].scales = local_[0].scales;
      std::byte* at = buffer(rank);
      for (size_t operand : communicated) {
        Tensor& tensor = all[rank].operands[operand];
        tensor.data = at;
        at += Aligned(tensor.size_bytes());
        if (CommunicatedScales(at_, local_[0], operand) == nullptr) continue;
        all[rank].scales[operand].data = at;
        at += Aligned(all[rank].scales[operand].size_bytes());
      }
    }
    return all;
  }

  // Copies operands to the shared buffers, where the peers in other processes read
  // them. In a reduce-scatter, the blocks that local ranks receive are not copied.
  void Stage() {
    WorkList work;
    const bool scattered = info_.collective == CollectiveKind::kReduceScatter;
    for (size_t i = 0; i < local_.size(); ++i) {
      std::byte* to = buffer(local_ranks_[i]);
      for (size_t operand : CommunicatedOperands(at_, local_[i])) {
        const Tensor& from = local_[i].operands[operand];
        if (scattered) {
          StageBlocks(from, to, work);
        } else {
          work.Add(Copy{from.data, to, from.size_bytes()});
        }
        to += Aligned(from.size_bytes());
        const Tensor* scales = CommunicatedScales(at_, local_[i], operand);
        if (scales == nullptr) continue;
        work.Add(Copy{scales->data, to, scales->size_bytes()});
        to += Aligned(scales->size_bytes());
      }
    }
    Run(std::move(work));
  }

  void StageBlocks(const Tensor& from, std::byte* to, WorkList& work) {
    const int64_t rows = from.rows / at_.num_ranks;
    const int64_t size_bytes = rows * from.features * SizeOf(from.dtype);
    for (int64_t b = 0; b < from.batch; ++b) {
      for (int rank = 0; rank < at_.num_ranks; ++rank) {
        if (IsLocal(rank)) continue;
        const std::byte* block = from.At(b, rank * rows);
        work.Add(Copy{block, to + (block - from.data), size_bytes});
      }
    }
  }

  // Executes the op as in a single process, but reads the shards of other processes
  // from their shared buffers. Used for all ops that Run does not treat separately.
  void ReadInPlace() {
    Stage();
    std::optional<ConcurrentWork> products;
    if (info_.is_bulk()) {
      WorkList work = PlanProducts(at_, local_, pool_.workers());
      work.set_trace(trace_, {});
      products.emplace(std::move(work), pool_);
      products->Start();
    }
    compare_signatures_();
    const std::vector<RankCall> all = AllCalls();
    const RankCalls calls{all, local_, &local_ranks_};
    Run(products ? PlanCommunication(at_, calls)
                 : PlanDirect(at_, calls, pool_.workers()));
    if (products) products->Wait();
  }

  void ReduceScatterProduct() {
    const Tensor& like = local_[0].results[0];
    const int64_t part_bytes = PartialSumBytes(like.batch * like.rows, like.features);
    const auto part = [&](int rank, int process, int64_t b) {
      Tensor tensor = like;
      tensor.dtype = DType::kF32;
      tensor.data = buffer(rank) + process * part_bytes;
      return RowsOf(tensor, b, 0);
    };
    ResultSegments y(DType::kF32);
    y.AddColumns(like.features);
    for (int64_t b = 0; b < like.batch; ++b) {
      for (int rank = 0; rank < at_.num_ranks; ++rank) {
        y.AddRows(like.rows);
        y.Append(part(rank, process(), b));
      }
    }
    Multiply(std::move(y));
    compare_signatures_();
    WorkList work;
    for (size_t i = 0; i < local_.size(); ++i) {
      const Tensor& to = local_[i].results[0];
      for (int64_t b = 0; b < like.batch; ++b) {
        Sum sum{{}, {{to.At(b, 0), to.features, to.dtype}}, to.rows, to.features};
        for (int p = 0; p < num_processes(); ++p) {
          sum.parts.push_back(
              {part(local_ranks_[i], p, b).data, to.features, DType::kF32});
        }
        AddBiasAndResidual(at_, local_[i], b, 0, sum.parts);
        work.Add(sum);
      }
    }
    Run(std::move(work));
  }

  // Computes the sum of x w over the local ranks, and stores it in `to`.
  void Multiply(ResultSegments to) {
    WorkList work;
    work.Add(PartialProduct(at_, local_, std::move(to)), pool_.workers());
    Run(std::move(work));
  }

  // All-reduces the product x w. Each process sums a part of the rows, and stores the
  // sums in its buffer, after the partial sums. A second barrier makes the sums visible
  // to the other processes. Buffer of process p:
  //
  //   rows of p by process 0 | rows of p by process 1 | ... | sums of the rows of p
  void AllReduceProduct() {
    const Tensor& to = local_[0].results[0];
    if (IsSmall(to)) return AllReduceSmallProduct();
    const int64_t max_rows = MaxRowsOfProcess(to.batch * to.rows, num_processes());
    const int64_t part_bytes = PartialSumBytes(max_rows, to.features);
    ResultSegments y(DType::kF32);
    y.AddColumns(to.features);
    for (int p = 0; p < num_processes(); ++p) {
      const int64_t rows = RowsOfResult(p).size();
      if (rows == 0) continue;
      y.AddRows(rows);
      y.Append({BufferOfProcess(p) + process() * part_bytes, to.features, 1});
    }
    Multiply(std::move(y));
    compare_signatures_();
    std::vector<ConstMatrix> parts;
    for (int p = 0; p < num_processes(); ++p) {
      parts.push_back(
          {BufferOfProcess(process()) + p * part_bytes, to.features, DType::kF32});
    }
    SumRows(std::move(parts), num_processes() * part_bytes);
  }

  // All-reduces the product x w if the result is small. Every process adds the partial
  // sums of all rows, so no second barrier is needed.
  void AllReduceSmallProduct() {
    const Tensor& to = local_[0].results[0];
    ResultSegments y(DType::kF32);
    y.AddRows(to.batch * to.rows);
    y.AddColumns(to.features);
    y.Append({BufferOfProcess(process()), to.features, 1});
    Multiply(std::move(y));
    compare_signatures_();
    Sum sum{{}, {}, to.batch * to.rows, to.features};
    for (int p = 0; p < num_processes(); ++p) {
      sum.parts.push_back({BufferOfProcess(p), to.features, DType::kF32});
    }
    // The result is computed once for all local ranks, since bias and residual are
    // equal on all ranks. A computation for each rank would be wrong: if the residual
    // shares memory with the result of its rank, the first computation would overwrite
    // the residual.
    AddBiasAndResidual(at_, local_[0], 0, 0, sum.parts);
    for (const RankCall& call : local_) {
      sum.to.push_back({call.results[0].data, to.features, to.dtype});
    }
    WorkList work;
    work.Add(sum);
    Run(std::move(work));
  }

  // Runs an all-reduce without a GEMM. Each process sums a part of the rows.
  void AllReduce() {
    Stage();
    compare_signatures_();
    std::vector<ConstMatrix> parts;
    for (const RankCall& call : AllCalls()) {
      const Tensor& from = call.operands[0];
      parts.push_back(
          {from.At(0, RowsOfResult(process()).begin), from.features, from.dtype});
    }
    SumRows(std::move(parts), Aligned(local_[0].operands[0].size_bytes()));
  }

  // Returns the rows of an all-reduced result that a process sums. Rows are counted
  // through all batch elements.
  RowRange RowsOfResult(int process) const {
    const Tensor& to = local_[0].results[0];
    return RowsOfProcess(to.batch * to.rows, process, num_processes());
  }

  // Adds `parts`, bias and residual for this process's rows of an all-reduced result.
  // Stores the sums at `offset` in the buffer of this process. Then copies the sums of
  // all processes to the results of the local ranks.
  void SumRows(std::vector<ConstMatrix> parts, int64_t offset) {
    const Tensor& to = local_[0].results[0];
    const RowRange own = RowsOfResult(process());
    Sum sum{std::move(parts), {}, own.size(), to.features};
    AddBiasAndResidual(at_, local_[0], 0, own.begin, sum.parts);
    sum.to.push_back({BufferOfProcess(process()) + offset, to.features, to.dtype});
    WorkList work;
    work.Add(sum);
    Run(std::move(work));
    SecondBarrier();
    WorkList copies;
    for (int p = 0; p < num_processes(); ++p) {
      const RowRange rows = RowsOfResult(p);
      for (const RankCall& call : local_) {
        copies.Add(Copy{BufferOfProcess(p) + offset, call.results[0].At(0, rows.begin),
                        rows.size() * to.features * SizeOf(to.dtype)});
      }
    }
    Run(std::move(copies));
  }

  const CallAttributes& at_;
  const OpInfo& info_;
  const std::vector<RankCall>& local_;
  const int64_t number_;
  const double timeout_s_;
  const TraceContext trace_;
  SharedMemoryCommunicator& communicator_;
  const std::vector<int>& local_ranks_;
  ThreadPool& pool_;
  const std::function<void()>& compare_signatures_;
};

}  // namespace

int64_t DirectBufferBytes(const CallAttributes& at,
                          const RankCall& call,
                          int num_processes) {
  const OpInfo& info = InfoOf(at.op);
  const Tensor& to = call.results[0];
  if (info.communicated == Communicated::kPartialSum) {
    if (!IsAllReduce(info.collective)) {
      return num_processes * PartialSumBytes(to.batch * to.rows, to.features);
    }
    if (IsSmall(to)) return PartialSumBytes(to.batch * to.rows, to.features);
    const int64_t rows = MaxRowsOfProcess(to.batch * to.rows, num_processes);
    return num_processes * PartialSumBytes(rows, to.features) +
           rows * to.features * SizeOf(to.dtype);
  }
  int64_t size_bytes = 0;
  for (size_t operand : CommunicatedOperands(at, call)) {
    size_bytes += Aligned(call.operands[operand].size_bytes());
    const Tensor* scales = CommunicatedScales(at, call, operand);
    if (scales != nullptr) size_bytes += Aligned(scales->size_bytes());
  }
  if (IsAllReduce(info.collective) && !IsSmall(to)) {
    size_bytes += MaxRowsOfProcess(to.batch * to.rows, num_processes) * to.features *
                  SizeOf(to.dtype);
  }
  return size_bytes;
}

void ExecuteMultiProcess(const MultiProcessCall& call,
                         SharedMemoryCommunicator& communicator,
                         ThreadPool& pool,
                         const std::function<void()>& compare_signatures) {
  Execution(call, communicator, pool, compare_signatures).Run();
}

}  // namespace jax_ub
