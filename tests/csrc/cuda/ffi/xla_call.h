// Calls an FFI handler as XLA does, through the C interface of XLA's FFI.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "ffi/target.h"
#include "xla/ffi/api/c_api.h"

// Defines types that XLA's header only declares.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};
#if XLA_FFI_API_MINOR >= 4
struct XLA_FFI_InvokeContext {  // XLA_FFI_ExecutionContext is a name of it
#else
struct XLA_FFI_ExecutionContext {
#endif
  void* state = nullptr;
  CUstream stream = nullptr;
  int32_t ordinal = 0;
};

namespace jax_ub {

using XlaAttribute = std::variant<int64_t, float, std::string, std::vector<int64_t>>;

struct XlaArray {
  XLA_FFI_DataType dtype = XLA_FFI_DataType_F32;
  std::vector<int64_t> dims;
};

struct XlaOutcome {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
};

inline const XLA_FFI_Api& XlaApi() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->errc, args->message};
    };
    made.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) {
      delete args->error;
    };
    made.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
      args->ctx->state = args->state;
      return nullptr;
    };
    made.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = args->ctx->state;
      return nullptr;
    };
    made.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = args->ctx->stream;
      return nullptr;
    };
    made.XLA_FFI_DeviceOrdinal_Get =
        [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = args->ctx->ordinal;
      return nullptr;
    };
    return made;
  }();
  return api;
}

// One custom call of a program, with its attributes and the types of its arrays.
class XlaCall {
 public:
  XlaCall(Target target,
          CallSiteType type,
          std::map<std::string, XlaAttribute> attributes,
          std::vector<XlaArray> operands,
          std::vector<XlaArray> results)
      : target_(std::move(target)),
        type_(std::move(type)),
        attributes_(std::move(attributes)),
        operands_(std::move(operands)),
        results_(std::move(results)) {
    static_cast<XLA_FFI_TypeId*>(type_.type_id)->type_id = 7;
  }
  ~XlaCall() {
    if (state_ == nullptr) return;
    static_cast<const XLA_FFI_TypeInfo*>(type_.type_info)->deleter(state_);
  }
  XlaCall(const XlaCall&) = delete;
  XlaCall& operator=(const XlaCall&) = delete;

  XlaOutcome Instantiate() {
    XLA_FFI_ExecutionContext context;
    const XlaOutcome outcome =
        Call(target_.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE, context, {});
    state_ = context.state;
    return outcome;
  }
  // `addresses` contains those of the operands, followed by those of the results.
  XlaOutcome Initialize(int32_t ordinal, const std::vector<CUdeviceptr>& addresses) {
    XLA_FFI_ExecutionContext context{state_, nullptr, ordinal};
    return Call(target_.initialize, XLA_FFI_ExecutionStage_INITIALIZE, context,
                addresses);
  }
  XlaOutcome Execute(int32_t ordinal,
                     CUstream stream,
                     const std::vector<CUdeviceptr>& addresses) {
    XLA_FFI_ExecutionContext context{state_, stream, ordinal};
    return Call(target_.execute, XLA_FFI_ExecutionStage_EXECUTE, context, addresses);
  }

  // Returns the metadata that XLA requests from a handler when it is registered.
  static XLA_FFI_Metadata MetadataOf(void* handler) {
    XLA_FFI_Metadata metadata = {};
    metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
    XLA_FFI_Metadata_Extension extension = {};
    extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE,
                                XLA_FFI_Extension_Metadata, nullptr};
    extension.metadata = &metadata;
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.extension_start = &extension.extension_base;
    frame.api = &XlaApi();
    CHECK(reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame) == nullptr);
    return metadata;
  }

 private:
  XlaOutcome Call(void* handler,
                  XLA_FFI_ExecutionStage stage,
                  XLA_FFI_ExecutionContext& context,
                  const std::vector<CUdeviceptr>& addresses) {
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &XlaApi();
    frame.ctx = &context;
    frame.stage = stage;

    std::vector<XLA_FFI_Buffer> buffers;
    const size_t count = addresses.empty() ? 0 : operands_.size() + results_.size();
    buffers.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      XlaArray& array =
          i < operands_.size() ? operands_[i] : results_[i - operands_.size()];
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype,
                         reinterpret_cast<void*>(addresses.at(i)),
                         static_cast<int64_t>(array.dims.size()), array.dims.data()});
    }
    std::vector<void*> pointers;
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    const size_t num_operands = count == 0 ? 0 : operands_.size();
    std::vector<XLA_FFI_ArgType> arg_types(num_operands, XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(count - num_operands,
                                           XLA_FFI_RetType_BUFFER);
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(num_operands),
                  arg_types.data(), pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr,
                  static_cast<int64_t>(count - num_operands), ret_types.data(),
                  pointers.data() + num_operands};

    EncodedAttributes encoded(attributes_);
    frame.attrs = encoded.attrs();
    XLA_FFI_Error* error = reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame);
    if (error == nullptr) return {};
    const XlaOutcome outcome{error->code, error->message};
    delete error;
    return outcome;
  }

  // The attributes as XLA encodes them, sorted by name.
  class EncodedAttributes {
   public:
    explicit EncodedAttributes(std::map<std::string, XlaAttribute>& attributes) {
      const size_t size = attributes.size();
      spans_.reserve(2 * size);
      scalars_.reserve(size);
      arrays_.reserve(size);
      for (auto& [name, value] : attributes) {
        names_.push_back(Span(name));
        std::visit([this](auto& held) { Add(held); }, value);
      }
    }
    XLA_FFI_Attrs attrs() {
      return {XLA_FFI_Attrs_STRUCT_SIZE,
              nullptr,
              static_cast<int64_t>(names_.size()),
              types_.data(),
              names_.data(),
              values_.data()};
    }

   private:
    XLA_FFI_ByteSpan* Span(const std::string& text) {
      spans_.push_back({text.data(), text.size()});
      return &spans_.back();
    }
    void AddScalar(XLA_FFI_DataType dtype, void* value) {
      scalars_.push_back({dtype, value});
      types_.push_back(XLA_FFI_AttrType_SCALAR);
      values_.push_back(&scalars_.back());
    }
    void Add(int64_t& value) { AddScalar(XLA_FFI_DataType_S64, &value); }
    void Add(float& value) { AddScalar(XLA_FFI_DataType_F32, &value); }
    void Add(std::string& text) {
      types_.push_back(XLA_FFI_AttrType_STRING);
      values_.push_back(Span(text));
    }
    void Add(std::vector<int64_t>& numbers) {
      arrays_.push_back({XLA_FFI_DataType_S64, numbers.size(), numbers.data()});
      types_.push_back(XLA_FFI_AttrType_ARRAY);
      values_.push_back(&arrays_.back());
    }

    std::vector<XLA_FFI_AttrType> types_;
    std::vector<XLA_FFI_ByteSpan*> names_;
    std::vector<void*> values_;
    std::vector<XLA_FFI_ByteSpan> spans_;
    std::vector<XLA_FFI_Scalar> scalars_;
    std::vector<XLA_FFI_Array> arrays_;
  };

  const Target target_;
  const CallSiteType type_;
  std::map<std::string, XlaAttribute> attributes_;
  std::vector<XlaArray> operands_;
  std::vector<XlaArray> results_;
  void* state_ = nullptr;
};

}  // namespace jax_ub
