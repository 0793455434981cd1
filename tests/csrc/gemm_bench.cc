// gemm_bench [M K N ...]: measures the GEMM alone, for each instruction set, layout and
// dtype.  Prints GFLOP/s of one thread's CPU time (steady on a busy machine), as the
// median of rounds in which all variants take turns; "peak" is the rate of tiles in the
// L1 cache. `python -m jax_ub bench` measures XLA and oneDNN.

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "gemm/cpu/isa.h"
#include "gemm/cpu/peak.h"
#include "gemm/gemm.h"

namespace jax_ub {

constexpr int kRounds = 9;
constexpr double kPeakSeconds = 2e-3;

struct Variant {
  std::string name;
  std::vector<std::vector<std::byte>> buffers;
  std::unique_ptr<GemmPlan> plan;
  const KernelSet* kernels = nullptr;  // of a peak, which has no plan
  std::vector<double> gflops;
};

// Returns the problem C = A B with one dtype; `layout` is named as in BLAS, with T for
// a transposed operand. C is stored `num_replicas` times, as by an all-reduce. With
// `has_blocks`, both operands have a scale for every 32 elements along K.
Variant MakeVariant(int64_t m,
                    int64_t k,
                    int64_t n,
                    const std::string& layout,
                    int num_replicas,
                    DType dtype,
                    bool has_blocks = false) {
  Variant variant;
  variant.name = std::string(CurrentIsa()) + " " + layout;
  if (has_blocks) variant.name.append(" mx");
  if (num_replicas > 1) variant.name.append("x").append(std::to_string(num_replicas));
  variant.name.append(" ").append(DTypeName(dtype));
  const DType result = InfoOf(dtype).is_result ? dtype : DType::kBF16;
  // 0x3f is the upper byte of numbers near 1, and 1.875 as e4m3.
  for (int64_t elements : {m * k, k * n}) {
    variant.buffers.emplace_back(elements * SizeOf(dtype), std::byte{0x3f});
  }
  variant.buffers.emplace_back(num_replicas * m * n * SizeOf(result));
  const bool a_transposed = layout[0] == 'T';
  const bool b_transposed = layout[1] == 'T';
  GemmProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {
      dtype,
      {0, m},
      {0, k},
      {{variant.buffers[0].data(), a_transposed ? 1 : k, a_transposed ? m : 1}}};
  problem.b = {
      dtype,
      {0, n},
      {0, k},
      {{variant.buffers[1].data(), b_transposed ? k : 1, b_transposed ? 1 : n}}};
  if (has_blocks) {
    const int64_t num_blocks = k / 32;
    for (int64_t outer : {m, n}) {
      variant.buffers.emplace_back(outer * num_blocks, std::byte{127});
    }
    const auto scales = [&](const std::byte* data, bool is_k_contiguous,
                            int64_t outer) {
      return is_k_contiguous ? ScaleSegment{data, 1, num_blocks, 32, 1}
                             : ScaleSegment{data, 1, 1, 32, outer};
    };
    problem.a.scales = {scales(variant.buffers[3].data(), !a_transposed, m)};
    problem.b.scales = {scales(variant.buffers[4].data(), b_transposed, n)};
  }
  problem.c = {result, num_replicas, {0, m}, {0, n}, {}};
  for (int i = 0; i < num_replicas; ++i) {
    problem.c.segments.push_back(
        {variant.buffers[2].data() + i * m * n * SizeOf(result), n});
  }
  variant.plan = PlanGemm(std::move(problem), 2);
  return variant;
}

Variant MakePeak(DType dtype) {
  Variant variant;
  variant.kernels = &KernelsFor(IsaInUse(), dtype, dtype);
  variant.name = std::string(CurrentIsa()) + " peak " + std::string(DTypeName(dtype));
  return variant;
}

// Measures another rate of the variant; `flops` is the number of operations of a plan.
void Time(Variant& variant, double flops, Scratch& scratch) {
  if (!variant.plan) {
    const double rate = MeasureTiles(*variant.kernels, kPeakSeconds, scratch);
    return variant.gflops.push_back(rate / 1e9);
  }
  const double start_s = ThreadCpuSeconds();
  for (int64_t u = 0; u < variant.plan->num_units(); ++u) {
    variant.plan->Run(u, scratch);
  }
  variant.gflops.push_back(flops / (ThreadCpuSeconds() - start_s) / 1e9);
}

void Measure(int64_t m, int64_t k, int64_t n) {
  std::vector<Variant> variants;
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kE4M3}) {
      for (const char* layout : {"NN", "NT", "TN"}) {
        variants.push_back(MakeVariant(m, k, n, layout, 1, dtype));
      }
      if (IsFp8(dtype) && k % 32 == 0) {
        for (const char* layout : {"NN", "NT", "TN"}) {
          variants.push_back(MakeVariant(m, k, n, layout, 1, dtype, true));
        }
      }
      variants.push_back(MakeVariant(m, k, n, "NN", 8, dtype));
      variants.push_back(MakePeak(dtype));
    }
  }
  SetIsa(in_use);
  Scratch scratch;
  for (int round = 0; round < kRounds; ++round) {
    for (Variant& variant : variants) Time(variant, 2.0 * m * k * n, scratch);
  }
  std::cout << "M=" << m << " K=" << k << " N=" << n << "\n";
  for (Variant& variant : variants) {
    std::sort(variant.gflops.begin(), variant.gflops.end());
    std::cout << "  " << std::left << std::setw(20) << variant.name << std::right
              << std::fixed << std::setprecision(1) << std::setw(8)
              << variant.gflops[kRounds / 2] << " GF/s, best " << variant.gflops.back();
    if (variant.plan) std::cout << ", " << variant.plan->num_units() << " units";
    std::cout << std::endl;
  }
}

}  // namespace jax_ub

int main(int argc, char** argv) {
  std::vector<int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  if (sizes.size() < 3) sizes = {1536, 1280, 3840, 256, 1024, 4096, 1, 2048, 4096};
  for (size_t i = 0; i + 2 < sizes.size(); i += 3) {
    jax_ub::Measure(sizes[i], sizes[i + 1], sizes[i + 2]);
  }
}
