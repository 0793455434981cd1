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

// The operand of a weight gradient x^T dy that is all-gathered, because its tokens are
// sharded.
enum class Gather : uint8_t { kNone, kX, kDy };

// Options of the GPU engine: streams, copies and GEMMs. The CPU engine ignores them.
// All ranks must pass the same options.
struct KernelOptions {
  bool use_ce = true;  // copy engines move the data instead of kernels
  // Number of thread blocks of the copy kernels. 0: the engine chooses. Copy kernels
  // run only if `use_ce` is false.
  int num_sm = 0;
  int cga_size = 0;  // cluster size of the copy kernels; 0: no clusters
  // Number of multiprocessors that cuBLASLt leaves free when it plans the GEMMs of a
  // call that communicates. On an H100 with cuBLAS 13.1, GEMMs of 1024 rows took up to
  // 1.3 times as long with a margin of 0, because cuBLASLt proposed other algorithms
  // (docs/gpu).
  int sm_margin = 4;
  int num_lanes = 2;  // GEMMs that may run concurrently
  bool allow_tf32 = false;
  // Whether an FP8 operand that is not contiguous along the contracted dimension is
  // transposed before its GEMM. GPUs that multiply all layouts
  // (gemm/cuda/fp8_support.h) ignore this option.
  bool transposes_fp8 = true;
  // Index of the GEMM algorithm in the list that cuBLASLt proposes. The list begins
  // with the best algorithm.
  int gemm_algorithm = 0;
  // Stream priorities as in CUDA: lower values are more urgent. 0 selects the most
  // urgent priority for communication, and the least urgent one for GEMMs.
  int comm_priority = 0;
  int gemm_priority = 0;

  bool operator==(const KernelOptions&) const = default;
};

// The attributes of a custom call. All executions of the call have the same attributes.
// An attribute that the op does not use keeps its default.
struct CallAttributes {
  Op op = Op::kMatmul;
  Method method = Method::kDirect;
  int num_ranks = 1;
  std::vector<int64_t> ranks;  // device ids [group][rank]; empty: no communication
  // Set only in a program that was lowered for export, which may run on devices with
  // other ids. Contains the device ids of the lowering, indexed by XLA's partition id.
  // The partition id is the last operand of the call.
  std::vector<int64_t> devices;
  int64_t num_splits = 0;  // splits of a chunk; 0: the engine chooses
  // Variant of the communication schedule. Schedules that have no variants ignore it.
  Variant variant = Variant::kPlain;
  std::string label;  // prefix of every error message
  // Identifies the call site across processes. Empty if each group of ranks is within
  // one process.
  std::string channel;
  // The number, counted from 1, of the communicator that was the newest of the call's
  // groups when the call was lowered. With 0, the call may use any communicator.
  int generation = 0;

  int num_kernels = 1;  // number of kernels, (x, w) pairs or outputs of the op
  bool rhs_transposed = false;
  bool has_bias = false;
  bool has_residual = false;
  bool return_gathered = false;
  bool accumulate = false;
  float scale = 1;  // factor of the GEMM's result, applied before anything is added
  // Whether a GEMM operand is FP8. All GEMM operands of such a call have scales.
  bool has_scales = false;
  // Whether the scales belong to rows, columns or blocks of an operand instead of the
  // whole operand. Only scales of rows, columns or blocks differ between ranks.
  bool has_row_scales = false;
  Gather gather = Gather::kNone;
  KernelOptions kernel_options;
};

// Returns group * num_ranks + rank of each device, keyed by device id
// (CallAttributes::ranks). Throws std::invalid_argument if the attributes are invalid
// for every op.
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

  // Returns the address of row `row` in batch element `b`.
  std::byte* At(int64_t b, int64_t row) const {
    return data + ((b * rows + row) * features) * SizeOf(dtype);
  }
};

// Returns dtype and shape, such as "bf16[2, 128, 512]".
std::string Describe(const Tensor& tensor);

struct RankCall {
  std::vector<Tensor> operands;
  std::vector<Tensor> results;
  // Scales of the GEMM operands, in the order of the operands. Empty unless
  // CallAttributes::has_scales. An operand that is not FP8 has scale 1.
  //
  // Without has_row_scales, each operand has one f32 scale. The scale of a tensor that
  // is gathered or contracted over ranks is equal on all of them.
  //
  // With has_row_scales, an activation has an f32 scale per row, or an e8m0 scale per
  // block of 32 features. A kernel has an f32 scale per row, per column or for all of
  // it, or an e8m0 scale per block of 32 features or rows. Rows of activations are sent
  // with their scales. Scales that vary along the contracted dimension are powers of
  // two.
  std::vector<Tensor> scales = {};
  // XLA's partition id, in device memory. Set only if CallAttributes::devices is not
  // empty.
  const uint32_t* partition = nullptr;
  int64_t submitted_ns = 0;  // time of arrival, if tracing is enabled
};

// Returns whether the call communicates nothing: it has no device groups, or its op and
// attributes select no array to communicate.
bool IsLocalCall(const CallAttributes& attributes);

// Returns whether the GEMMs contract the second dimension of the kernels. They do so
// with rhs_transposed, and in dx = dy w^T.
bool HasTransposedKernels(const CallAttributes& attributes);

// Returns the index of the first residual, an operand that is added to a result. The
// residuals follow the biases.
size_t FirstResidual(const CallAttributes& attributes);

// Returns the number of scale arrays that the call takes: one per GEMM operand, or 0
// unless CallAttributes::has_scales.
size_t NumScales(const CallAttributes& attributes);

// Moves the scales from the end of RankCall::operands, where XLA passes them, to
// RankCall::scales.
void SplitScales(const CallAttributes& attributes, RankCall& call);

// Checks the number, shapes and dtypes of a call's operands and results. Without this
// check, the engine would write beyond the end of a result that is too small. Throws
// ShapeError.
void CheckCall(const CallAttributes& attributes, const RankCall& call);

// Returns a hash of everything on which all ranks of a call must agree.
uint64_t Signature(const CallAttributes& attributes, const RankCall& call);
// Returns a description of the call for error messages, such as "qkv:
// all_gather_matmul by direct of bf16[4, 8], bf16[8, 16] to bf16[8, 16], num_ranks 2,
// num_kernels 1".
std::string DescribeCall(const CallAttributes& attributes, const RankCall& call);
// Returns what each FP8 scale applies to: "tensor", "row" or "block". Returns "" if the
// call has no scales.
std::string_view ScaledUnitOf(const CallAttributes& attributes, const RankCall& call);
// Parses the unit that ScaledUnitOf returns from `description`, the text that
// DescribeCall returns for a call.
std::string_view ScaledUnitIn(std::string_view description);
// Returns the options that differ from their defaults as text, such as ", use_ce 0,
// num_sm 4". Returns an empty string if all options have their defaults.
std::string DescribeKernelOptions(const KernelOptions& kernel_options);

// Returns a description of the first difference in number, shape or dtype between the
// arrays of two ranks' calls. Returns an empty string if there is none.
std::string DescribeMismatch(const RankCall& left, const RankCall& right);

}  // namespace jax_ub
