// The table of ops. Code that depends on the op reads the op's row of this table. No
// other code lists all ops.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

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

// The GEMMs that an op computes. The index i counts the kernels w_i, the pairs (x_i,
// w_i) or the outputs dw_i of the op. CallAttributes::num_kernels is their number.
enum class GemmKind : uint8_t {
  kNone,
  kGatheredRows,  // y_i = gathered x w_i
  kPairSum,       // y = sum of x_i w_i over the pairs and, if reduced, over the ranks
  kWgrad,         // dw_i = x^T dy_i
  kDgrad,         // dx = sum of dy_i w_i^T
};

// The array that an op communicates: an operand, or the result of its GEMM.
enum class Communicated : uint8_t {
  kNothing,
  kFirstOperand,     // gathered for the GEMMs
  kSelectedOperand,  // gathered for the GEMMs, if the attribute `gather` selects one
  kPartialSum,       // the GEMM's result
  // An operand that no GEMM reads. Its collective writes the last result. An op without
  // GEMMs is a plain collective of its first operand. An op with GEMMs (a "bulk" op)
  // communicates its last operand, and runs the GEMMs concurrently.
  kSeparateOperand,
};

// One bit for each attribute that only some ops have. OpInfo::attributes combines them.
enum OpAttribute : uint32_t {
  kRhsTransposed = 1 << 0,
  kBias = 1 << 1,
  kResidual = 1 << 2,
  kReturnGathered = 1 << 3,
  kAccumulate = 1 << 4,
  kGather = 1 << 5,
  kScale = 1 << 6,
  kScales = 1 << 7,
  // Bias and residual of an op that had neither in an earlier version of the library.
  // Programs that were exported by that version lack these attributes, so the
  // attributes are optional.
  kAddends = 1 << 8,
};

struct OpInfo {
  Op op;
  std::string_view name;  // The FFI target is "jax_ub$" plus this name.
  GemmKind gemm;
  CollectiveKind collective;  // selects the schedule, unless nothing is communicated
  Communicated communicated;
  const char* count;    // attribute that CallAttributes::num_kernels holds, or null
  uint32_t attributes;  // set of OpAttribute

  // Returns whether GEMMs run concurrently with a collective that does not depend on
  // them.
  constexpr bool is_bulk() const {
    return gemm != GemmKind::kNone && communicated == Communicated::kSeparateOperand;
  }
};

// The rows of the table of ops, indexed by the value of Op.
inline constexpr std::array<OpInfo, kNumOps> kOps = {{
    {Op::kAllGatherMatmul, "all_gather_matmul", GemmKind::kGatheredRows,
     CollectiveKind::kAllGatherMatmul, Communicated::kFirstOperand, "num_kernels",
     kRhsTransposed | kBias | kResidual | kReturnGathered | kScale | kScales},
    {Op::kMatmulReduceScatter, "matmul_reduce_scatter", GemmKind::kPairSum,
     CollectiveKind::kMatmulReduceScatter, Communicated::kPartialSum, "num_pairs",
     kRhsTransposed | kBias | kResidual | kScale | kScales},
    {Op::kMatmulAllReduce, "matmul_all_reduce", GemmKind::kPairSum,
     CollectiveKind::kMatmulAllReduce, Communicated::kPartialSum, "num_pairs",
     kRhsTransposed | kBias | kResidual | kScale | kScales},
    {Op::kMatmul, "matmul", GemmKind::kPairSum, CollectiveKind::kMatmulAllReduce,
     Communicated::kNothing, "num_pairs",
     kRhsTransposed | kBias | kResidual | kScale | kScales},
    {Op::kWgrad, "wgrad", GemmKind::kWgrad, CollectiveKind::kAllGather,
     Communicated::kSelectedOperand, "num_outputs",
     kAccumulate | kGather | kScale | kScales},
    {Op::kAllGather, "all_gather", GemmKind::kNone, CollectiveKind::kAllGather,
     Communicated::kSeparateOperand, nullptr, 0},
    {Op::kReduceScatter, "reduce_scatter", GemmKind::kNone,
     CollectiveKind::kReduceScatter, Communicated::kSeparateOperand, nullptr, 0},
    {Op::kAllReduce, "all_reduce", GemmKind::kNone, CollectiveKind::kAllReduce,
     Communicated::kSeparateOperand, nullptr, kAddends},
    {Op::kBulkAllGather, "bulk_all_gather", GemmKind::kDgrad,
     CollectiveKind::kAllGather, Communicated::kSeparateOperand, "num_pairs", kScales},
    {Op::kBulkReduceScatter, "bulk_reduce_scatter", GemmKind::kWgrad,
     CollectiveKind::kReduceScatter, Communicated::kSeparateOperand, "num_outputs",
     kAccumulate | kScales},
}};

static_assert([] {
  for (int i = 0; i < kNumOps; ++i) {
    if (kOps[i].op != static_cast<Op>(i)) return false;
  }
  return true;
}());

constexpr const OpInfo& InfoOf(Op op) { return kOps[static_cast<size_t>(op)]; }

constexpr std::string_view OpName(Op op) { return InfoOf(op).name; }

}  // namespace jax_ub
