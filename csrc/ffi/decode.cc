#include "ffi/decode.h"

#include <stdexcept>
#include <string>

#include "platform/error.h"

namespace jax_ub {

namespace {

namespace ffi = xla::ffi;

class AttributeReader {
 public:
  AttributeReader(Op op, const ffi::Dictionary& dict) : op_(op), dict_(dict) {}

  template <typename T>
  T Get(const char* name) const {
    auto value = dict_.get<T>(name);
    if (value.has_error()) {
      throw std::invalid_argument("jax_ub." + std::string(OpName(op_)) +
                                  ": attribute " + name + ": " +
                                  value.error().message());
    }
    return *value;
  }

  int64_t InRange(const char* name, int64_t low, int64_t high) const {
    const int64_t value = Get<int64_t>(name);
    if (value < low || value > high) {
      throw std::invalid_argument("jax_ub." + std::string(OpName(op_)) +
                                  ": attribute " + name + " is " +
                                  std::to_string(value) + ", expected " +
                                  std::to_string(low) + " to " + std::to_string(high));
    }
    return value;
  }

  bool Flag(const char* name) const { return InRange(name, 0, 1) != 0; }
  int Count(const char* name) const {
    return static_cast<int>(InRange(name, 1, 1 << 16));
  }

 private:
  const Op op_;
  const ffi::Dictionary& dict_;
};

DType DecodeDType(const Attributes& at, ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32:
      return DType::kF32;
    case ffi::BF16:
      return DType::kBF16;
    case ffi::F16:
      return DType::kF16;
    default:
      break;
  }
  throw ShapeError("jax_ub." + at.label + ": XLA element type " +
                   std::to_string(static_cast<int>(dtype)) +
                   " is none of f32, bf16 and f16");
}

Tensor DecodeBuffer(const Attributes& at, const ffi::AnyBuffer& buffer) {
  Tensor tensor;
  tensor.dtype = DecodeDType(at, buffer.element_type());
  tensor.data = static_cast<std::byte*>(buffer.untyped_data());
  const auto dims = buffer.dimensions();
  if (at.op == Op::kAllReduce) {  // any shape: only the elements count
    tensor.features = static_cast<int64_t>(buffer.element_count());
    return tensor;
  }
  const size_t rank = dims.size();
  tensor.features = rank > 0 ? dims[rank - 1] : 1;
  tensor.rows = rank > 1 ? dims[rank - 2] : 1;
  for (size_t i = 0; i + 2 < rank; ++i) tensor.batch *= dims[i];
  return tensor;
}

}  // namespace

Attributes DecodeAttributes(Op op, const ffi::Dictionary& dict) {
  const AttributeReader read(op, dict);
  Attributes at;
  at.op = op;
  at.method = static_cast<Method>(read.InRange("method", 0, 4));
  at.num_ranks = read.Count("num_ranks");
  const auto ranks = read.Get<ffi::Span<const int64_t>>("ranks");
  at.ranks.assign(ranks.begin(), ranks.end());
  at.num_splits = read.InRange("num_splits", 0, 1 << 16);
  at.label = read.Get<std::string_view>("label");
  at.channel = read.Get<std::string_view>("channel");
  switch (op) {
    case Op::kAllGatherMatmul:
      at.num_kernels = read.Count("num_kernels");
      at.rhs_transposed = read.Flag("rhs_transposed");
      at.has_bias = read.Flag("has_bias");
      at.has_residual = read.Flag("has_residual");
      at.scale = read.Get<float>("scale");
      at.return_gathered = read.Flag("return_gathered");
      break;
    case Op::kMatmulReduceScatter:
    case Op::kMatmulAllReduce:
    case Op::kMatmul:
      at.num_kernels = read.Count("num_pairs");
      at.rhs_transposed = read.Flag("rhs_transposed");
      at.has_bias = read.Flag("has_bias");
      at.has_residual = read.Flag("has_residual");
      at.scale = read.Get<float>("scale");
      break;
    case Op::kWgrad:
      at.num_kernels = read.Count("num_outputs");
      at.accumulate = read.Flag("accumulate");
      at.gather = static_cast<Gather>(read.InRange("gather", 0, 2));
      at.scale = read.Get<float>("scale");
      break;
    case Op::kBulkAllGather:
      at.num_kernels = read.Count("num_pairs");
      break;
    case Op::kBulkReduceScatter:
      at.num_kernels = read.Count("num_outputs");
      at.accumulate = read.Flag("accumulate");
      break;
    case Op::kAllGather:
    case Op::kReduceScatter:
    case Op::kAllReduce:
      break;
  }
  return at;
}

RankCall DecodeCall(const Attributes& at,
                    const ffi::RemainingArgs& operands,
                    const ffi::RemainingRets& results) {
  RankCall call;
  call.operands.reserve(operands.size());
  call.results.reserve(results.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    call.operands.push_back(DecodeBuffer(at, *operands.get<ffi::AnyBuffer>(i)));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    call.results.push_back(DecodeBuffer(at, **results.get<ffi::AnyBuffer>(i)));
  }
  return call;
}

}  // namespace jax_ub
