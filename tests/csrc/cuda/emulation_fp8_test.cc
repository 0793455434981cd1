// Tests FP8 products of the emulated cuBLASLt: values, and what it rejects.
#include <cmath>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/library_calls.h"

namespace jax_ub {
namespace {

using namespace library_calls;

// An FP8 product that cuBLASLt computes on every device that supports FP8.
Options Fp8(OperandDTypes operands = DType::kE4M3, DType results = DType::kBF16) {
  return {.operands = operands,
          .results = results,
          .transpose_a = true,
          .m = 16,
          .n = 7,
          .k = 32,
          .has_scales = true};
}

EmulatedOptions DeviceOf(int major, int minor) {
  return {.attributes = {{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, major},
                         {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, minor}}};
}

Status FindFp8(const Options& options) { return Product(options).Find(); }

TEST(Fp8ProductsAreExactAndScaled) {
  EmulatedMachine machine(DeviceOf(10, 0));
  const Gpu gpu;
  uint64_t seed = 0;
  for (const OperandDTypes& operands : kFp8Pairs) {
    for (const DType results : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (int bits = 0; bits < 16; ++bits) {
        Options options = Fp8(operands, results);
        options.n = 16;
        options.transpose_a = (bits & 1) != 0;
        options.transpose_b = (bits & 2) != 0;
        options.has_scales = (bits & 4) != 0;
        options.has_bias = (bits & 8) != 0 && results != DType::kF32;
        options.beta = static_cast<float>(bits & 1);
        options.batch = 1 + (bits & 1);
        CheckExact(options, ++seed);
      }
    }
  }
}

TEST(Fp8NeedsADeviceAndALibraryThatSupportIt) {
  {
    EmulatedMachine machine(DeviceOf(8, 6));
    const Gpu gpu;
    CHECK(Is(FindFp8(Fp8()), Status::kNotSupported));
  }
  EmulatedMachine machine(DeviceOf(8, 9));
  const Gpu gpu;
  CHECK(Is(FindFp8(Fp8()), Status::kSuccess));
  SetEmulatedCublasLtVersion(120102);
  CHECK(Is(FindFp8(Fp8()), Status::kNotSupported));
  SetEmulatedCublasLtVersion(130000);
}

TEST(OnlySomeDevicesMultiplyAllLayoutsOfFp8) {
  for (const auto& [major, minor, has_all] :
       std::vector<std::tuple<int, int, bool>>{{8, 9, false},
                                               {9, 0, false},
                                               {10, 0, true},
                                               {10, 3, true},
                                               {11, 0, true},
                                               {12, 0, false},
                                               {12, 1, false}}) {
    EmulatedMachine machine(DeviceOf(major, minor));
    const Gpu gpu;
    for (int bits = 0; bits < 4; ++bits) {
      Options options = Fp8();
      options.n = 16;
      options.transpose_a = (bits & 1) != 0;
      options.transpose_b = (bits & 2) != 0;
      CHECK(Is(FindFp8(options),
               has_all || bits == 1 ? Status::kSuccess : Status::kNotSupported));
    }
  }
}

TEST(OnlyPairsOfFp8DTypesWithWideResultsAreMultiplied) {
  EmulatedMachine machine;
  const Gpu gpu;
  for (const OperandDTypes& operands :
       std::vector<OperandDTypes>{{DType::kE5M2, DType::kE5M2},
                                  {DType::kE4M3, DType::kBF16},
                                  {DType::kF16, DType::kE5M2}}) {
    Options options = Fp8(operands);
    options.has_scales = false;
    CHECK(Is(FindFp8(options), Status::kNotSupported));
  }
  CHECK(Is(FindFp8(Fp8(DType::kE4M3, DType::kE4M3)), Status::kNotSupported));
  Options options = Fp8();
  options.compute = lt::ComputeType::k32FFastTF32;
  CHECK(Is(FindFp8(options), Status::kNotSupported));
  options = Fp8(DType::kE4M3, DType::kF32);
  Product mixed(options);
  Matrix c(DType::kBF16, options.m, options.n, 0, 1, false);
  std::swap(mixed.c.layout, c.layout);
  CHECK(Is(mixed.Find(), Status::kNotSupported));
  std::swap(mixed.c.layout, c.layout);
}

TEST(ABiasOfFp8ProductsHas16Bits) {
  EmulatedMachine machine;
  const Gpu gpu;
  const auto find = [](DType results, DType bias) {
    Options options = Fp8(DType::kE4M3, results);
    options.has_bias = true;
    Product product(options);
    product.Set(lt::DescAttribute::kBiasDataType,
                static_cast<int32_t>(DataTypeOf(bias)));
    return product.Find();
  };
  CHECK(Is(find(DType::kBF16, DType::kBF16), Status::kSuccess));
  CHECK(Is(find(DType::kF16, DType::kF16), Status::kSuccess));
  CHECK(Is(find(DType::kF32, DType::kBF16), Status::kSuccess));
  CHECK(Is(find(DType::kF32, DType::kF32), Status::kNotSupported));
  CHECK(Is(find(DType::kBF16, DType::kF32), Status::kNotSupported));
  CHECK(Is(find(DType::kBF16, DType::kF16), Status::kNotSupported));
}

TEST(SizesAndAddressesOfFp8ProductsAreMultiplesOf16Bytes) {
  EmulatedMachine machine;
  const Gpu gpu;
  Options options = Fp8();
  options.k = 40;
  CHECK(Is(FindFp8(options), Status::kNotSupported));
  options = Fp8();
  options.m = 12;  // 24 bytes of bf16
  CHECK(Is(FindFp8(options), Status::kNotSupported));
  options.m = 8;
  CHECK(Is(FindFp8(options), Status::kSuccess));
  for (const auto alignment : {lt::PreferenceAttribute::kMinAlignmentA,
                               lt::PreferenceAttribute::kMinAlignmentB,
                               lt::PreferenceAttribute::kMinAlignmentC,
                               lt::PreferenceAttribute::kMinAlignmentD}) {
    Product product(Fp8());
    product.Prefer(alignment, uint32_t{16});
    CHECK(Is(product.Find(), Status::kSuccess));
    product.Prefer(alignment, uint32_t{8});
    CHECK(Is(product.Find(), Status::kNotSupported));
  }
}

TEST(ScalesOfRowsNeedHopperAndANewLibrary) {
  Options options = Fp8();
  options.has_row_scales = true;
  for (const auto& [major, minor, status] :
       std::vector<std::tuple<int, int, Status>>{{8, 9, Status::kNotSupported},
                                                 {9, 0, Status::kSuccess},
                                                 {10, 0, Status::kNotSupported},
                                                 {12, 0, Status::kNotSupported}}) {
    EmulatedMachine machine(DeviceOf(major, minor));
    const Gpu gpu;
    CHECK(Is(FindFp8(options), status));
  }
  EmulatedMachine machine;
  const Gpu gpu;
  uint64_t seed = 0;
  for (const OperandDTypes& operands : kFp8Pairs) {
    options.operands = operands;
    CheckExact(options, ++seed);
  }
  SetEmulatedCublasLtVersion(120805);
  CHECK(Is(FindFp8(options), Status::kNotSupported));
  SetEmulatedCublasLtVersion(130000);
  // Both operands have them.
  Product product(options);
  product.Set(lt::DescAttribute::kBScaleMode,
              static_cast<int32_t>(lt::ScaleMode::kScalar));
  CHECK(Is(product.Find(), Status::kNotSupported));
  product.Set(lt::DescAttribute::kBScaleMode,
              static_cast<int32_t>(lt::ScaleMode::kOuterVector));
  CHECK(Is(product.Find(), Status::kSuccess));
  product.Set(lt::DescAttribute::kBScalePointer,
              static_cast<void*>(product.b_scales.At(0, 1, 0)));
  CHECK(Is(product.Find(), Status::kNotSupported));
}

Options BlockScaled(OperandDTypes operands = DType::kE4M3) {
  Options options = Fp8(operands);
  options.has_scales = false;
  options.has_block_scales = true;
  return options;
}

TEST(ScalesOfBlocksNeedBlackwellAndANewLibrary) {
  for (const auto& [major, minor, status] :
       std::vector<std::tuple<int, int, Status>>{{8, 9, Status::kNotSupported},
                                                 {9, 0, Status::kNotSupported},
                                                 {10, 0, Status::kSuccess},
                                                 {10, 3, Status::kSuccess},
                                                 {11, 0, Status::kSuccess},
                                                 {12, 0, Status::kNotSupported}}) {
    EmulatedMachine machine(DeviceOf(major, minor));
    const Gpu gpu;
    CHECK(Is(FindFp8(BlockScaled()), status));
  }
  EmulatedMachine machine(DeviceOf(10, 0));
  const Gpu gpu;
  SetEmulatedCublasLtVersion(120700);
  CHECK(Is(FindFp8(BlockScaled()), Status::kNotSupported));
  SetEmulatedCublasLtVersion(130000);
}

// Tiles have 128 rows and 128 elements along k. They do not depend on the layouts of the
// matrices.
TEST(ScalesOfBlocksAreReadFromTiles) {
  EmulatedMachine machine(DeviceOf(10, 0));
  const Gpu gpu;
  uint64_t seed = 0;
  for (const OperandDTypes& operands : kFp8Pairs) {
    for (int bits = 0; bits < 4; ++bits) {
      Options options = BlockScaled(operands);
      options.results = DType::kF32;
      options.transpose_a = (bits & 1) != 0;
      options.transpose_b = (bits & 2) != 0;
      options.m = 160;
      options.n = 144;
      options.k = 32 * (3 + bits);
      CheckExact(options, ++seed);
    }
  }
}

TEST(ProductsWithScalesOfBlocksAreAlignedAndAreNoBatches) {
  EmulatedMachine machine(DeviceOf(10, 0));
  const Gpu gpu;
  Options options = BlockScaled();
  options.k = 48;
  CHECK(Is(FindFp8(options), Status::kNotSupported));
  options = BlockScaled();
  options.batch = 2;
  CHECK(Is(FindFp8(options), Status::kNotSupported));
  Product product(BlockScaled());
  CHECK(Is(product.Find(), Status::kSuccess));
  auto* const tiles = static_cast<std::byte*>(product.b_tiles.get());
  product.Set(lt::DescAttribute::kBScalePointer, static_cast<void*>(tiles + 8));
  CHECK(Is(product.Find(), Status::kNotSupported));
  product.Set(lt::DescAttribute::kBScalePointer, static_cast<void*>(tiles));
  product.Set(lt::DescAttribute::kBScaleMode,
              static_cast<int32_t>(lt::ScaleMode::kScalar));
  CHECK(Is(product.Find(), Status::kNotSupported));
}

// A kernel may read the scales of rows and blocks that do not exist.
TEST(PaddingOfScalesThatIsNotZeroGivesNan) {
  EmulatedMachine machine(DeviceOf(10, 0));
  const Gpu gpu;
  Product product(BlockScaled());
  for (Matrix* matrix : {&product.a, &product.b}) {
    std::mt19937 random(1);
    matrix->Randomize(random);
  }
  static_cast<uint8_t*>(product.b_tiles.get())[511] = 1;
  CHECK(Is(product.Find(), Status::kSuccess));
  CHECK(Is(product.Run(), Status::kSuccess));
  Gpu::Synchronize(product.stream.get());
  CHECK(std::isnan(product.d.Get(0, 0, 0)));
}

TEST(OnlyFp8OperandsHaveScales) {
  EmulatedMachine machine;
  const Gpu gpu;
  Options options;
  options.has_scales = true;
  CHECK(Is(FindFp8(options), Status::kInvalidValue));
  // An algorithm is for a product with scales or without.
  Product product(Fp8());
  CHECK(Is(product.Find(), Status::kSuccess));
  product.Set(lt::DescAttribute::kAScalePointer, static_cast<void*>(nullptr));
  CHECK(Is(product.Run(), Status::kInvalidValue));
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
