#include "ffi/cuda/handlers.h"

#include <exception>
#include <string>
#include <utility>

#include "ffi/decode.h"
#include "platform/error.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ub {

namespace {

namespace ffi = xla::ffi;

struct CudaCallSiteState {
  static ffi::TypeId id;
  CudaCallSite site;
};
ffi::TypeId CudaCallSiteState::id = {};

ffi::ErrorOr<std::unique_ptr<CudaCallSiteState>> Instantiate(Op op,
                                                             ffi::Dictionary dict) {
  try {
    return std::unique_ptr<CudaCallSiteState>(
        new CudaCallSiteState{CudaCallSite(DecodeAttributes(op, dict))});
  } catch (...) {
    return ffi::Unexpected(ToFfiError(std::current_exception()));
  }
}

ffi::Error Initialize(CudaCallSiteState* state,
                      int32_t ordinal,
                      ffi::RemainingArgs operands,
                      ffi::RemainingRets results,
                      ffi::Dictionary) {
  try {
    const RankCall call = DecodeCall(state->site.attributes(), operands, results, 1);
    ProcessCudaEngine().Initialize(state->site, ordinal, call);
    return ffi::Error::Success();
  } catch (...) {
    return ToFfiError(std::current_exception());
  }
}

DeviceBytes WorkspaceOf(const CallAttributes& at, const ffi::RemainingRets& results) {
  ffi::Result<ffi::AnyBuffer> last = *results.get<ffi::AnyBuffer>(results.size() - 1);
  if (last->element_type() != ffi::U8) {
    throw ShapeError("jax_ub." + at.label + ": its last result is no workspace");
  }
  return {reinterpret_cast<CUdeviceptr>(last->untyped_data()),
          static_cast<int64_t>(last->size_bytes())};
}

// XLA's execute handler of all ops. The work that the handler enqueues depends only on
// attributes and addresses, so that XLA may capture it in a CUDA graph and replay it.
template <auto kExecute>
ffi::Error Execute(CudaCallSiteState* state,
                   CUstream stream,
                   int32_t ordinal,
                   ffi::RemainingArgs operands,
                   ffi::RemainingRets results,
                   ffi::Dictionary) {
  try {
    const CallAttributes& at = state->site.attributes();
    const RankCall call = DecodeCall(at, operands, results, 1);
    (ProcessCudaEngine().*kExecute)(state->site, ordinal, stream, call,
                                    WorkspaceOf(at, results));
    return ffi::Error::Success();
  } catch (...) {
    return ToFfiError(std::current_exception());
  }
}

template <Op op>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      ffi::Ffi::BindInstantiate()
          .Attrs()
          .To([](ffi::Dictionary dict) { return Instantiate(op, dict); })
          .release();
  return handler->Call(frame);
}

XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindInitialize()
                             .Ctx<ffi::State<CudaCallSiteState>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To(Initialize)
                             .release();
  return handler->Call(frame);
}

auto BindExecute() {
  return ffi::Ffi::BindExecute()
      .Ctx<ffi::State<CudaCallSiteState>>()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      BindExecute()
          .To(Execute<&CudaEngine::Execute>, {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(frame);
}

XLA_FFI_Error* ExecuteTogetherHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      BindExecute().To(Execute<&CudaEngine::ExecuteTogether>).release();
  return handler->Call(frame);
}

}  // namespace

std::array<Target, kNumOps> CudaTargets(bool has_several_devices) {
  auto* const execute = has_several_devices ? &ExecuteTogetherHandler : &ExecuteHandler;
  return TargetsOfOps([execute]<Op op>() {
    return Target{"jax_ub$" + std::string(OpName(op)),
                  reinterpret_cast<void*>(&InstantiateHandler<op>),
                  reinterpret_cast<void*>(&InitializeHandler),
                  reinterpret_cast<void*>(execute)};
  });
}

CallSiteType TheCudaCallSiteType() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<CudaCallSiteState>();
  return {"jax_ub$CudaCallSite", &CudaCallSiteState::id, &info};
}

}  // namespace jax_ub
