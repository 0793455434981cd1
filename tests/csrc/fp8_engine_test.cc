// Tests the results of calls of FP8 operands with all kinds of scales.
#include <string>

#include "check.h"
#include "engine_calls.h"
#include "scaled_calls.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::NumWrong;

TEST(EveryOpOfFp8OperandsIsExact) {
  Engine& engine = NewEngine();
  int seed = 0;
  for (int num_ranks : {1, 2, 3, 5}) {
    for (int op = 0; op < kNumOps; ++op) {
      if (InfoOf(static_cast<Op>(op)).gemm == GemmKind::kNone) continue;
      for (int method = 0; method < kNumMethods; ++method) {
        for (const CallAttributes& like :
             Variants(static_cast<Op>(op), static_cast<Method>(method), num_ranks)) {
          if (!HasMethod(like.op, like.method)) continue;
          ForEachScaling(
              like, [&](const CallAttributes& at, ScaleKind kind, bool is_crossed) {
                Arrays arrays(++seed);
                CallSite site(at);
                const auto made =
                    MakeScaledCalls(at, kBlockSizes, kind, is_crossed, arrays);
                for (const std::string& text : RunAll(engine, site, seed, made.calls)) {
                  CHECK_EQ(text, "");
                }
                made.Dequantize(at);
                CHECK_EQ(NumWrong(at, made.wide), 0);
              });
        }
      }
    }
  }
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
