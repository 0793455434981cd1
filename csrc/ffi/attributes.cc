#include "ffi/attributes.h"

#include <limits>
#include <stdexcept>

namespace jax_ub {

namespace {

class Reader {
 public:
  Reader(Op op, const AttributeSource& source) : op_(op), source_(source) {}

  int64_t InRange(const char* name, int64_t low, int64_t high) const {
    const int64_t value = source_.Integer(name);
    if (value < low || value > high) {
      throw std::invalid_argument("jax_ub." + std::string(OpName(op_)) +
                                  ": attribute " + name + " is " +
                                  std::to_string(value) + ", expected " +
                                  std::to_string(low) + " to " + std::to_string(high));
    }
    return value;
  }

  bool Flag(const char* name) const { return InRange(name, 0, 1) != 0; }
  float Float(const char* name) const { return source_.Float(name); }
  int Count(const char* name) const {
    return static_cast<int>(InRange(name, 1, 1 << 16));
  }

  // Reads an optional attribute. Does not change `value` if the attribute is missing.
  void MayHave(const char* name, bool& value) const {
    if (source_.Has(name)) value = Flag(name);
  }
  void MayHave(const char* name, int64_t low, int64_t high, int& value) const {
    if (source_.Has(name)) value = static_cast<int>(InRange(name, low, high));
  }

 private:
  const Op op_;
  const AttributeSource& source_;
};

KernelOptions ReadKernelOptions(const Reader& read) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  KernelOptions kernel_options;
  read.MayHave("use_ce", kernel_options.use_ce);
  read.MayHave("num_sm", 0, kMost, kernel_options.num_sm);
  read.MayHave("cga_size", 0, 16, kernel_options.cga_size);
  read.MayHave("sm_margin", 0, kMost, kernel_options.sm_margin);
  read.MayHave("num_lanes", 1, 8, kernel_options.num_lanes);
  read.MayHave("allow_tf32", kernel_options.allow_tf32);
  read.MayHave("transposes_fp8", kernel_options.transposes_fp8);
  read.MayHave("gemm_algorithm", 0, 7, kernel_options.gemm_algorithm);
  read.MayHave("comm_priority", -kMost, kMost, kernel_options.comm_priority);
  read.MayHave("gemm_priority", -kMost, kMost, kernel_options.gemm_priority);
  return kernel_options;
}

template <bool CallAttributes::* kMember>
void ReadFlag(const Reader& read, const char* name, CallAttributes& at) {
  at.*kMember = read.Flag(name);
}

void ReadGather(const Reader& read, const char* name, CallAttributes& at) {
  at.gather = static_cast<Gather>(read.InRange(name, 0, 2));
}

void ReadScale(const Reader& read, const char* name, CallAttributes& at) {
  at.scale = read.Float(name);
}

template <bool CallAttributes::* kMember>
void MayHaveFlag(const Reader& read, const char* name, CallAttributes& at) {
  read.MayHave(name, at.*kMember);
}

struct AttributeReader {
  OpAttribute bit;
  const char* name;
  void (*read)(const Reader&, const char* name, CallAttributes&);
};
constexpr AttributeReader kReaders[] = {
    {kRhsTransposed, "rhs_transposed", ReadFlag<&CallAttributes::rhs_transposed>},
    {kBias, "has_bias", ReadFlag<&CallAttributes::has_bias>},
    {kResidual, "has_residual", ReadFlag<&CallAttributes::has_residual>},
    {kReturnGathered, "return_gathered", ReadFlag<&CallAttributes::return_gathered>},
    {kAccumulate, "accumulate", ReadFlag<&CallAttributes::accumulate>},
    {kGather, "gather", ReadGather},
    {kScale, "scale", ReadScale},
    {kScales, "has_scales", MayHaveFlag<&CallAttributes::has_scales>},
    {kScales, "has_row_scales", MayHaveFlag<&CallAttributes::has_row_scales>},
    {kAddends, "has_bias", MayHaveFlag<&CallAttributes::has_bias>},
    {kAddends, "has_residual", MayHaveFlag<&CallAttributes::has_residual>},
};

}  // namespace

std::string DTypeNames(const char* DTypeInfo::* column) {
  std::string names;
  for (const DTypeInfo& info : kDTypes) {
    names += (names.empty() ? "" : ", ") + std::string(info.*column);
  }
  return names;
}

std::string AttributeError(Op op, std::string_view name) {
  return "jax_ub." + std::string(OpName(op)) + ": attribute " + std::string(name) +
         ": ";
}

std::vector<std::string_view> AttributeNames(const OpInfo& info) {
  std::vector<std::string_view> names;
  if (info.count != nullptr) names.push_back(info.count);
  for (const AttributeReader& attribute : kReaders) {
    if (info.attributes & attribute.bit) names.push_back(attribute.name);
  }
  return names;
}

CallAttributes ReadAttributes(Op op, const AttributeSource& source) {
  const Reader read(op, source);
  CallAttributes at;
  at.op = op;
  at.method = static_cast<Method>(read.InRange("method", 0, 4));
  at.num_ranks = read.Count("num_ranks");
  at.ranks = source.Integers("ranks");
  if (source.Has("devices")) at.devices = source.Integers("devices");
  at.num_splits = read.InRange("num_splits", 0, 1 << 16);
  // The attribute is optional, because programs that older versions exported lack it.
  int variant = 0;
  read.MayHave("variant", 0, kNumVariants - 1, variant);
  at.variant = static_cast<Variant>(variant);
  at.label = source.Text("label");
  at.channel = source.Text("channel");
  read.MayHave("generation", 0, std::numeric_limits<int>::max(), at.generation);
  at.kernel_options = ReadKernelOptions(read);
  const OpInfo& info = InfoOf(op);
  if (info.count != nullptr) at.num_kernels = read.Count(info.count);
  for (const AttributeReader& attribute : kReaders) {
    if (info.attributes & attribute.bit) attribute.read(read, attribute.name, at);
  }
  return at;
}

Tensor TensorOf(const CallAttributes& at,
                DType dtype,
                std::span<const int64_t> dimensions,
                void* data) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.data = static_cast<std::byte*>(data);
  const size_t rank = dimensions.size();
  if (InfoOf(at.op).collective == CollectiveKind::kAllReduce) {
    tensor.features = at.has_bias && rank > 0 ? dimensions.back() : 1;
    for (const int64_t size : dimensions) tensor.rows *= size;
    if (tensor.features > 0) tensor.rows /= tensor.features;
    return tensor;
  }
  tensor.features = rank > 0 ? dimensions[rank - 1] : 1;
  tensor.rows = rank > 1 ? dimensions[rank - 2] : 1;
  for (size_t i = 0; i + 2 < rank; ++i) tensor.batch *= dimensions[i];
  return tensor;
}

}  // namespace jax_ub
