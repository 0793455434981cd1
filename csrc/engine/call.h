// What one rank asks for: the op's attributes, which every rank shares, and its own
// operands and results.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gemm/views.h"
#include "schedule/schedule.h"

namespace jax_ub {

enum class Op : uint8_t {
  kAllGatherMatmul,
  kMatmulReduceScatter,
  kMatmulAllReduce,
  kMatmul,
  kWgrad,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBulkAllGather,
  kBulkReduceScatter,
};
inline constexpr int kNumOps = 10;

// "all_gather_matmul"; the FFI target is "jax_ub$" and this.
std::string_view OpName(Op op);

// Which operand of a weight gradient is gathered over its tokens.
enum class Gather : uint8_t { kNone, kX, kDy };

// How a device that has streams runs a call; the CPU ignores it. The same on every rank.
struct KernelOptions {
  bool use_ce = true;  // copy engines move what is sent, not kernels
  int num_sm = 0;      // of the kernels that move it otherwise; 0: the engine chooses
  int cga_size = 0;    // their cluster size; 0: none
  int sm_margin = 0;   // multiprocessors that products leave free
  int num_lanes = 2;   // products that may run beside each other
  bool allow_tf32 = false;
  int gemm_algorithm = 0;  // of those that cuBLASLt proposes for a product, best first
  // Of streams, in CUDA's numbers (less is more urgent); 0: the most urgent for
  // communication, the least for products.
  int comm_priority = 0;
  int gemm_priority = 0;

  bool operator==(const KernelOptions&) const = default;
};

// The static part of a call site. Counts that an op does not have are as below.
struct CallAttributes {
  Op op = Op::kMatmul;
  Method method = Method::kDirect;
  int num_ranks = 1;
  std::vector<int64_t> ranks;  // device ids, [group][rank]; empty: no communication
  // The same ids by XLA's number of the partition, where the last operand is that, of
  // programs that were lowered for export; empty: there is no such operand, and a device
  // is the one that has its id.
  std::vector<int64_t> devices;
  int64_t num_splits = 0;             // pieces of a shard; 0: the engine chooses
  Variant variant = Variant::kPlain;  // of the schedule, where that has it
  std::string label;                  // begins every error text
  // Names the call site in every process; empty where no group spans processes.
  std::string channel;
  int generation = 0;  // of the communicator that it was lowered for; 0: of any

  int num_kernels = 1;  // kernels, pairs or outputs of the op
  bool rhs_transposed = false;
  bool has_bias = false;
  bool has_residual = false;
  bool return_gathered = false;
  bool accumulate = false;
  float scale = 1;  // of the product, before anything is added to it
  Gather gather = Gather::kNone;
  KernelOptions kernel_options;
};

// Where each device is: its id -> group * P + rank. Throws std::invalid_argument for
// attributes that no op has.
std::unordered_map<int64_t, size_t> FlatRankOfDevice(const CallAttributes& attributes);

// A dense row-major array [batch, rows, features] of a rank. A vector is one row.
struct Tensor {
  DType dtype = DType::kF32;
  int64_t batch = 1;
  int64_t rows = 1;
  int64_t features = 0;
  std::byte* data = nullptr;

  int64_t num_elements() const { return batch * rows * features; }
  int64_t size_bytes() const { return num_elements() * SizeOf(dtype); }

  // Row `row` of batch `b`.
  std::byte* At(int64_t b, int64_t row) const {
    return data + ((b * rows + row) * features) * SizeOf(dtype);
  }
};

// "bf16[2, 128, 512]"
std::string Describe(const Tensor& tensor);

struct RankCall {
  std::vector<Tensor> operands;
  std::vector<Tensor> results;
  // XLA's number of the partition that runs it, in the memory of the device, where
  // Attributes::devices are given.
  const uint32_t* partition = nullptr;
  int64_t submitted_ns = 0;  // when it arrived, where that is traced
};

// Where the residuals begin: behind the biases.
size_t FirstResidual(const CallAttributes& attributes);

// Checks that operands and results are those of the op and fit each other; throws
// ShapeError with the numbers, since a result of another size would be overrun.
void CheckCall(const CallAttributes& attributes, const RankCall& call);

// What all ranks must have in common, as a number and in words: "all_gather_matmul by
// direct of bf16[4, 8], bf16[8, 16] to bf16[8, 16], num_kernels 1".
uint64_t Signature(const CallAttributes& attributes, const RankCall& call);
std::string DescribeCall(const CallAttributes& attributes, const RankCall& call);
// What is not as it is by default: ", use_ce 0, num_sm 4".
std::string DescribeKernelOptions(const KernelOptions& kernel_options);

// The same shapes and dtypes on two ranks; describes the first difference, or is empty.
std::string DescribeMismatch(const RankCall& left, const RankCall& right);

}  // namespace jax_ub
