// The call of one rank: the attributes of the op, which all ranks share, and the rank's
// operands and results.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/ops.h"
#include "gemm/views.h"
#include "schedule/schedule.h"

namespace jax_ub {

// The operand of a weight gradient that is all-gathered over its tokens.
enum class Gather : uint8_t { kNone, kX, kDy };

// Options of the GPU engine: streams, copies and GEMMs. The CPU engine ignores them.
// All ranks must pass the same options.
struct KernelOptions {
  bool use_ce = true;  // copy engines move the data instead of kernels
  // Thread blocks of the copy kernels, which run if `use_ce` is false; 0: the engine
  // chooses.
  int num_sm = 0;
  int cga_size = 0;  // cluster size of the copy kernels; 0: no clusters
  // Multiprocessors that cuBLASLt leaves free when it plans the GEMMs of a call that
  // communicates. On an H100 with cuBLAS 13.1, chunks of 1024 rows took up to 1.3 times
  // as long without a margin, because cuBLASLt proposed other algorithms (docs/gpu).
  int sm_margin = 4;
  int num_lanes = 2;  // GEMMs that may run concurrently
  bool allow_tf32 = false;
  // Whether FP8 operands that are not contiguous along the contracted dimension are
  // transposed first. Devices that multiply all layouts (gemm/cuda/fp8_support.h) do
  // not need it.
  bool transposes_fp8 = true;
  // The index of the GEMM algorithm to use, among those that cuBLASLt proposes, best
  // first.
  int gemm_algorithm = 0;
  // Stream priorities in CUDA's numbering: lower values are more urgent. 0 selects the
  // most urgent priority for communication and the least urgent one for GEMMs.
  int comm_priority = 0;
  int gemm_priority = 0;

  bool operator==(const KernelOptions&) const = default;
};

// The static part of a call site. Attributes that an op does not have keep the defaults
// below.
struct CallAttributes {
  Op op = Op::kMatmul;
  Method method = Method::kDirect;
  int num_ranks = 1;
  std::vector<int64_t> ranks;  // device ids [group][rank]; empty: no communication
  // In programs that are lowered for export: the device ids, indexed by XLA's partition
  // id, which is then passed as the last operand. Otherwise empty, and each device is
  // identified by its own id.
  std::vector<int64_t> devices;
  int64_t num_splits = 0;  // splits of a chunk; 0: the engine chooses
  // Variant of the schedule; ignored if the schedule does not have it.
  Variant variant = Variant::kPlain;
  std::string label;  // prefix of every error message
  // Identifies the call site in every process. Empty if no group spans processes.
  std::string channel;
  int generation = 0;  // of the communicator that the call was lowered for; 0: any

  int num_kernels = 1;  // number of kernels, (x, w) pairs or outputs of the op
  bool rhs_transposed = false;
  bool has_bias = false;
  bool has_residual = false;
  bool return_gathered = false;
  bool accumulate = false;
  float scale = 1;  // factor of the GEMM's result, applied before anything is added
  // Whether an operand of the GEMMs is FP8. The others may be FP8 or wide.
  bool has_scales = false;
  // Whether the scales belong to rows, columns or blocks, so that the ranks' differ.
  bool has_row_scales = false;
  Gather gather = Gather::kNone;
  KernelOptions kernel_options;
};

// Returns a map from device id to group * P + rank. Throws std::invalid_argument if the
// attributes are invalid for every op.
std::unordered_map<int64_t, size_t> FlatRankOfDevice(const CallAttributes& attributes);

// A dense row-major array [batch, rows, features] of one rank. A vector has one row.
struct Tensor {
  DType dtype = DType::kF32;
  int64_t batch = 1;
  int64_t rows = 1;
  int64_t features = 0;
  std::byte* data = nullptr;

  int64_t num_elements() const { return batch * rows * features; }
  int64_t size_bytes() const { return num_elements() * SizeOf(dtype); }

  // Returns the address of row `row` of batch `b`.
  std::byte* At(int64_t b, int64_t row) const {
    return data + ((b * rows + row) * features) * SizeOf(dtype);
  }
};

// Returns dtype and shape, such as "bf16[2, 128, 512]".
std::string Describe(const Tensor& tensor);

struct RankCall {
  std::vector<Tensor> operands;
  std::vector<Tensor> results;
  // With CallAttributes::has_scales, the scales of the GEMMs' operands, in the same
  // order; the scale of a wide operand is 1. Without has_row_scales there is one per
  // tensor, f32. Several pairs (x_i, w_i) then have the same scales, and so have the
  // ranks that gather or contract a tensor. With has_row_scales there is one for each
  // row of an activation, or each row or column of a kernel, f32; or one for each block
  // of 32 features or, in a kernel, of 32 rows, e8m0. A row of an activation is sent
  // with its scales. Scales that change along the contracted dimension are powers of
  // two.
  std::vector<Tensor> scales = {};
  // XLA's partition id, in device memory. Set only if CallAttributes::devices is not
  // empty.
  const uint32_t* partition = nullptr;
  int64_t submitted_ns = 0;  // time of arrival, if tracing is enabled
};

// Returns whether the call communicates nothing.
bool IsLocalCall(const CallAttributes& attributes);

// Returns the index of the first residual operand, which follows the biases.
size_t FirstResidual(const CallAttributes& attributes);

// Returns the size that RankCall::scales must have.
size_t NumScales(const CallAttributes& attributes);

// Moves the scales, the last operands of a call as XLA passes it, to RankCall::scales.
void SplitScales(const CallAttributes& attributes, RankCall& call);

// Checks the number, shapes and dtypes of a call's operands and results, because the
// engine would write beyond the end of a result that is too small. Throws ShapeError
// with the values.
void CheckCall(const CallAttributes& attributes, const RankCall& call);

// Signature returns a hash of everything that all ranks of a call must agree on.
// DescribeCall returns the same as text: "all_gather_matmul by direct of bf16[4, 8],
// bf16[8, 16] to bf16[8, 16], num_kernels 1".
uint64_t Signature(const CallAttributes& attributes, const RankCall& call);
std::string DescribeCall(const CallAttributes& attributes, const RankCall& call);
// Returns whether the call has one FP8 scale per "tensor", "row" or "block", or "" if it
// has no scales. ScaledUnitIn reads it from a description by DescribeCall.
std::string_view ScaledUnitOf(const CallAttributes& attributes, const RankCall& call);
std::string_view ScaledUnitIn(std::string_view description);
// Returns the options that differ from the defaults: ", use_ce 0, num_sm 4".
std::string DescribeKernelOptions(const KernelOptions& kernel_options);

// Returns a description of the first difference in shape or dtype between the calls of
// two ranks, or an empty string.
std::string DescribeMismatch(const RankCall& left, const RankCall& right);

}  // namespace jax_ub
