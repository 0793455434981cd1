#include "ffi/decode.h"

#include <new>
#include <stdexcept>
#include <string>

#include "ffi/attributes.h"
#include "ffi/target.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

namespace ffi = xla::ffi;

class XlaAttributes : public AttributeSource {
 public:
  XlaAttributes(Op op, const ffi::Dictionary& dict) : op_(op), dict_(dict) {}

  bool Has(const char* name) const override { return dict_.contains(name); }
  int64_t Integer(const char* name) const override { return Get<int64_t>(name); }
  float Float(const char* name) const override { return Get<float>(name); }
  std::string Text(const char* name) const override {
    return std::string(Get<std::string_view>(name));
  }
  std::vector<int64_t> Integers(const char* name) const override {
    const auto numbers = Get<ffi::Span<const int64_t>>(name);
    return {numbers.begin(), numbers.end()};
  }

 private:
  template <typename T>
  T Get(const char* name) const {
    auto value = dict_.get<T>(name);
    if (value.has_error()) {
      throw std::invalid_argument(AttributeError(op_, name) + value.error().message());
    }
    return *value;
  }

  const Op op_;
  const ffi::Dictionary& dict_;
};

ffi::DataType XlaTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ffi::F32;
    case DType::kBF16:
      return ffi::BF16;
    case DType::kF16:
      return ffi::F16;
    case DType::kE4M3:
      return ffi::F8E4M3FN;
    case DType::kE5M2:
      return ffi::F8E5M2;
    case DType::kE8M0:
      return ffi::F8E8M0FNU;
  }
  throw std::logic_error("unknown dtype");
}

const uint32_t* DecodePartition(const CallAttributes& at,
                                const ffi::RemainingArgs& operands) {
  const auto partition = operands.get<ffi::BufferR0<ffi::U32>>(operands.size() - 1);
  if (partition.has_error()) {
    throw ShapeError("jax_ub." + at.label + ": its last operand is no partition: " +
                     partition.error().message());
  }
  return partition->typed_data();
}

Tensor DecodeBuffer(const CallAttributes& at, const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return TensorOf(at, DecodeDType(at.label, buffer.element_type()),
                  {dims.begin(), dims.size()}, buffer.untyped_data());
}

}  // namespace

DType DecodeDType(const std::string& label, ffi::DataType type) {
  for (const DTypeInfo& info : kDTypes) {
    if (XlaTypeOf(info.dtype) == type) return info.dtype;
  }
  throw ShapeError("jax_ub." + label + ": XLA element type " +
                   std::to_string(static_cast<int>(type)) + " is none of " +
                   DTypeNames(&DTypeInfo::name));
}

CallAttributes DecodeAttributes(Op op, const ffi::Dictionary& dict) {
  return ReadAttributes(op, XlaAttributes(op, dict));
}

int64_t DeviceOf(const CallAttributes& at, const RankCall& call, int32_t ordinal) {
  if (call.partition == nullptr) return ordinal;
  const uint32_t number = *call.partition;
  if (number >= at.devices.size()) {
    throw ShapeError("jax_ub." + at.label + ": partition " + std::to_string(number) +
                     " of " + std::to_string(at.devices.size()));
  }
  return at.devices[number];
}

RankCall DecodeCall(const CallAttributes& at,
                    const ffi::RemainingArgs& operands,
                    const ffi::RemainingRets& results,
                    size_t num_workspaces) {
  if (results.size() < num_workspaces) {
    throw ShapeError("jax_ub." + at.label + ": the workspace is missing");
  }
  RankCall call;
  size_t num_operands = operands.size();
  if (!at.devices.empty()) {
    call.partition = DecodePartition(at, operands);
    --num_operands;
  }
  call.operands.reserve(num_operands);
  call.results.reserve(results.size() - num_workspaces);
  for (size_t i = 0; i < num_operands; ++i) {
    call.operands.push_back(DecodeBuffer(at, *operands.get<ffi::AnyBuffer>(i)));
  }
  SplitScales(at, call);
  for (size_t i = 0; i + num_workspaces < results.size(); ++i) {
    call.results.push_back(DecodeBuffer(at, **results.get<ffi::AnyBuffer>(i)));
  }
  return call;
}

ffi::Error ToFfiError(const std::exception_ptr& failure) noexcept try {
  try {
    std::rethrow_exception(failure);
  } catch (const DeadlineError& error) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error.what());
  } catch (const CommunicatorError& error) {
    return ffi::Error(ffi::ErrorCode::kAborted, error.what());
  } catch (const UnsupportedError& error) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
  } catch (const ShapeError& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_ub: out of memory");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("jax_ub: ") + error.what());
  } catch (...) {
    return ffi::Error::Internal("jax_ub: unknown exception");
  }
} catch (const std::bad_alloc&) {
  // This text fits into std::string's internal buffer, so the error can be created
  // without allocating memory.
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
}

void Settle(ffi::Promise promise, const std::exception_ptr& failure) {
  if (failure) {
    promise.SetError(ToFfiError(failure));
  } else {
    promise.SetAvailable();
  }
}

std::pair<int, int> XlaFfiApiVersion() {
  return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
}

}  // namespace jax_ub
