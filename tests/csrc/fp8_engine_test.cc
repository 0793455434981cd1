// Tests the results of calls of FP8 operands with all kinds of scales.
#include <string>

#include "check.h"
#include "engine_calls.h"
#include "scaled_calls.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::NumWrong;

// Calls function(attributes) for each op with GEMMs, by each method.
template <typename Function>
void ForEachGemmCall(int num_ranks, const Function& function) {
  for (int op = 0; op < kNumOps; ++op) {
    if (InfoOf(static_cast<Op>(op)).gemm == GemmKind::kNone) continue;
    for (int method = 0; method < kNumMethods; ++method) {
      for (const CallAttributes& at :
           Variants(static_cast<Op>(op), static_cast<Method>(method), num_ranks)) {
        if (HasMethod(at.op, at.method)) function(at);
      }
    }
  }
}

void CheckIsExact(const CallAttributes& at,
                  ScaleKind kind,
                  bool is_crossed,
                  WideOperands wide,
                  int seed,
                  Engine& engine) {
  Arrays arrays(seed);
  CallSite site(at);
  const auto made = MakeScaledCalls(at, kBlockSizes, kind, is_crossed, arrays, wide);
  for (const std::string& text : RunAll(engine, site, seed, made.calls)) {
    CHECK_EQ(text, "");
  }
  made.Dequantize(at);
  CHECK_EQ(NumWrong(at, made.wide), 0);
}

TEST(EveryOpOfFp8OperandsIsExact) {
  Engine& engine = NewEngine();
  int seed = 0;
  for (int num_ranks : {1, 2, 3, 4, 5, 8}) {
    ForEachGemmCall(num_ranks, [&](const CallAttributes& like) {
      ForEachScaling(
          like, [&](const CallAttributes& at, ScaleKind kind, bool is_crossed) {
            CheckIsExact(at, kind, is_crossed, WideOperands::kNone, ++seed, engine);
          });
    });
  }
}

TEST(EveryOpOfAnFp8AndAWideOperandIsExact) {
  Engine& engine = NewEngine();
  int seed = 0;
  for (int num_ranks : {1, 2, 3}) {
    ForEachGemmCall(num_ranks, [&](CallAttributes at) {
      at.has_scales = true;
      for (const WideOperands wide : {WideOperands::kFirst, WideOperands::kOthers}) {
        CheckIsExact(at, ScaleKind::kTensor, false, wide, ++seed, engine);
      }
    });
  }
}

TEST(CallsHaveScalesExactlyIfAnOperandIsFp8) {
  Engine& engine = NewEngine();
  CallAttributes at = MakeAttributes(Op::kMatmul, Method::kDirect, 1);
  at.has_scales = true;
  Arrays arrays(1);
  RankCall call =
      MakeScaledCalls(at, kBlockSizes, ScaleKind::kTensor, false, arrays).calls[0];
  const auto error_of = [&](const CallAttributes& with, const RankCall& of) {
    CallSite site(with);
    return Submit(engine, site, 1, 100, of).Wait();
  };
  RankCall wide = call;
  for (Tensor& operand : wide.operands) operand.dtype = DType::kBF16;
  CHECK(error_of(at, wide).find("bf16[2, 5, 64], has_scales = 1") != std::string::npos);
  at.has_scales = false;
  call.scales.clear();
  CHECK(error_of(at, call).find("e4m3[2, 5, 64], has_scales = 0") != std::string::npos);
  call.operands[0].dtype = DType::kBF16;
  CHECK(error_of(at, call).find("w is e4m3[64, 32], expected bf16[64, 32]") !=
        std::string::npos);
}

TEST(ScalesThatDoNotFitTheirOperandAreRefused) {
  Engine& engine = NewEngine();
  CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, Method::kDirect, 2);
  at.has_scales = at.has_row_scales = true;
  Arrays arrays(1);
  const auto error_of = [&](const auto& change) {
    const auto made = MakeScaledCalls(at, kBlockSizes, ScaleKind::kRows, false, arrays);
    CallSite site(at);
    RankCall call = made.calls[0];
    change(call);
    return Submit(engine, site, 1, 100, call).Wait();
  };
  CHECK(error_of([](RankCall& call) {
          call.scales.pop_back();
        }).find("takes 2 scales, got 1") != std::string::npos);
  CHECK(error_of([](RankCall& call) {
          call.scales[0].rows = 1;
        }).find("scales f32[2, 1, 1] do not fit e4m3[2, 5, 64]") != std::string::npos);
  CHECK(error_of([](RankCall& call) {
          call.scales[1].rows = 2;
        }).find("scales f32[2, 32] do not fit e4m3[64, 32]") != std::string::npos);
  CHECK(error_of([](RankCall& call) {
          call.scales[0].dtype = DType::kE8M0;
        }).find("scales e8m0[2, 5, 1] do not fit") != std::string::npos);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
