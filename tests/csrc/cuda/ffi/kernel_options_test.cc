// Tests the effect of each option of a call on the requests to the driver and cuBLASLt,
// from the name of the attribute in XLA.
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/cuda_calls.h"
#include "ffi/attributes.h"
#include "reduce/cuda/sum_params.h"

namespace jax_ub {
namespace {

// The requests of this thread while the calls of all ranks were initialized and
// executed.
struct Asked {
  std::multiset<int> priorities;                   // of streams
  std::set<std::pair<unsigned, unsigned>> copies;  // by kernels: blocks, cluster size
  int num_copies = 0;                              // by copy engines
  std::set<int32_t> sm_targets;                    // of products
  std::set<lt::ComputeType> compute_types;
  int64_t num_products = 0;
  int64_t last_algorithm = 0;
};
Asked asked;

// Handles of the kernel that copies.
std::set<CUkernel> copy_kernels;
std::set<CUfunction> copy_functions;

Driver AskingDriver() {
  Driver driver = EmulatedDriver();
  driver.LibraryGetKernel = [](CUkernel* kernel, CUlibrary library, const char* name) {
    const CUresult result = EmulatedDriver().LibraryGetKernel(kernel, library, name);
    if (std::string(name) == kCopyKernel) copy_kernels.insert(*kernel);
    return result;
  };
  driver.KernelGetFunction = [](CUfunction* function, CUkernel kernel) {
    const CUresult result = EmulatedDriver().KernelGetFunction(function, kernel);
    if (copy_kernels.contains(kernel)) copy_functions.insert(*function);
    return result;
  };
  driver.StreamCreateWithPriority = [](CUstream* stream, unsigned flags, int priority) {
    asked.priorities.insert(priority);
    return EmulatedDriver().StreamCreateWithPriority(stream, flags, priority);
  };
  driver.MemcpyAsync = [](CUdeviceptr to, CUdeviceptr from, size_t size, CUstream on) {
    ++asked.num_copies;
    return EmulatedDriver().MemcpyAsync(to, from, size, on);
  };
  driver.LaunchKernelEx = [](const CUlaunchConfig* config, CUfunction function,
                             void** arguments, void** extra) {
    if (copy_functions.contains(function)) {
      const bool is_clustered = config->numAttrs > 0;
      asked.copies.emplace(config->gridDimX,
                           is_clustered ? config->attrs[0].value.clusterDim.x : 1);
    }
    return EmulatedDriver().LaunchKernelEx(config, function, arguments, extra);
  };
  return driver;
}

CublasLt AskingCublasLt() {
  CublasLt library = EmulatedCublasLt();
  library.MatmulDescCreate = [](lt::MatmulDesc* made, lt::ComputeType type,
                                lt::DataType scale) {
    asked.compute_types.insert(type);
    return EmulatedCublasLt().MatmulDescCreate(made, type, scale);
  };
  library.MatmulDescSetAttribute = [](lt::MatmulDesc desc, lt::DescAttribute attribute,
                                      const void* value, size_t size_bytes) {
    if (attribute == lt::DescAttribute::kSmCountTarget) {
      asked.sm_targets.insert(*static_cast<const int32_t*>(value));
    }
    return EmulatedCublasLt().MatmulDescSetAttribute(desc, attribute, value,
                                                     size_bytes);
  };
  return library;
}

// The attributes of an AG+GEMM call, by name.
class NamedAttributes : public AttributeSource {
 public:
  explicit NamedAttributes(std::map<std::string, int64_t> options)
      : numbers_(std::move(options)) {
    numbers_.insert({{"method", static_cast<int64_t>(Method::kPipeline)},
                     {"num_ranks", 2},
                     {"num_splits", 0},
                     {"num_kernels", 1},
                     {"rhs_transposed", 0},
                     {"has_bias", 0},
                     {"has_residual", 0},
                     {"return_gathered", 0}});
  }
  bool Has(const char* name) const override { return numbers_.contains(name); }
  int64_t Integer(const char* name) const override { return numbers_.at(name); }
  float Float(const char*) const override { return 1; }
  std::string Text(const char*) const override { return "call"; }
  std::vector<int64_t> Integers(const char*) const override { return {0}; }

 private:
  std::map<std::string, int64_t> numbers_;
};

Asked Run(const std::map<std::string, int64_t>& options) {
  static const Driver driver = AskingDriver();
  static const CublasLt library = AskingCublasLt();
  const CallAttributes at =
      ReadAttributes(Op::kAllGatherMatmul, NamedAttributes(options));
  Gpus gpus({.num_devices = at.num_ranks}, kLongS, driver, library);
  GpuCalls calls(gpus, at, {1, 8, 8, 3}, DType::kF32, 1);
  asked = {};
  for (const int rank : calls.local_ranks()) calls.Initialize(rank);
  const int64_t num_prepared = ReadEmulatedCublasLt().num_matmuls;
  for (const int rank : calls.local_ranks()) calls.Execute(rank);
  gpus.Synchronize();
  CheckRight(calls);
  asked.num_products = ReadEmulatedCublasLt().num_matmuls - num_prepared;
  asked.last_algorithm = ReadEmulatedCublasLt().last_algorithm;
  return asked;
}

TEST(KernelsSendWhereCopyEnginesAreNotToBeUsed) {
  const Asked engines = Run({});
  CHECK_EQ(engines.num_copies, 2);
  CHECK(engines.copies.empty());
  const Asked kernels = Run({{"use_ce", 0}, {"num_sm", 4}, {"cga_size", 2}});
  CHECK_EQ(kernels.num_copies, 0);
  CHECK(kernels.copies == (std::set{std::pair{4u, 2u}}));
}

TEST(ProductsLeaveMultiprocessorsFree) {
  CHECK(Run({}).sm_targets == std::set{128});
  CHECK(Run({{"sm_margin", 0}}).sm_targets.empty());
  CHECK(Run({{"sm_margin", 32}}).sm_targets == std::set{100});
}

TEST(ProductsUseTheGivenAlgorithmAndPrecision) {
  CHECK_EQ(Run({}).last_algorithm, 0);
  CHECK_EQ(Run({{"gemm_algorithm", 1}}).last_algorithm, 1);
  CHECK(Run({}).compute_types == std::set{lt::ComputeType::k32F});
  const std::set tf32 = {lt::ComputeType::k32FFastTF32};
  CHECK(Run({{"allow_tf32", 1}}).compute_types == tf32);
}

// The emulated priorities are -5 to 0; there are two devices.
TEST(StreamsHaveTheGivenNumberAndPriority) {
  CHECK_EQ(Run({}).priorities.count(-5), 2u);
  const std::map<std::string, int64_t> named = {
      {"comm_priority", -2}, {"gemm_priority", -1}, {"num_lanes", 3}};
  const std::multiset<int> found = Run(named).priorities;
  CHECK_EQ(found.count(-2), 2u);
  CHECK_EQ(found.count(-1), 6u);
  CHECK_EQ(found.count(-5), 0u);
  CHECK_EQ(Run({{"comm_priority", -100}}).priorities.count(-5), 2u);
}

TEST(ChunksAreDividedIntoTheGivenNumberOfSplits) {
  CHECK_EQ(Run({}).num_copies, 2);
  CHECK_EQ(Run({{"num_splits", 3}}).num_copies, 6);
}

TEST(ChunksOfTwoRanksAreOneProduct) {
  const auto ring = static_cast<int64_t>(Method::kRingExchange);
  const auto aggregate = static_cast<int64_t>(Variant::kAggregate);
  std::map<std::string, int64_t> options = {{"num_ranks", 4}, {"method", ring}};
  CHECK_EQ(Run(options).num_products, 4 * 4);
  options["variant"] = aggregate;
  CHECK_EQ(Run(options).num_products, 4 * 3);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
