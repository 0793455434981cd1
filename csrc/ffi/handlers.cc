#include "ffi/handlers.h"

#include <exception>
#include <memory>
#include <utility>

#include "ffi/decode.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ub {

namespace {

namespace ffi = xla::ffi;

// The state that XLA keeps for each custom call of a compiled program. All devices that
// run the program share it.
struct CallSiteState {
  static ffi::TypeId id;
  CallSite site;
};
ffi::TypeId CallSiteState::id = {};

ffi::ErrorOr<std::unique_ptr<CallSiteState>> Instantiate(Op op, ffi::Dictionary dict) {
  try {
    CallAttributes at = DecodeAttributes(op, dict);
    const uint64_t ordinal =
        at.channel.empty() ? 0 : ProcessEngine().rendezvous().NextOrdinal(at.channel);
    return std::unique_ptr<CallSiteState>(
        new CallSiteState{CallSite(std::move(at), ordinal)});
  } catch (...) {
    return ffi::Unexpected(ToFfiError(std::current_exception()));
  }
}

// XLA's execute handler of all ops. Returns a future, because blocking may deadlock:
// XLA might need the blocked thread to run the call of a peer.
ffi::Future Execute(CallSiteState* state,
                    ffi::RunId run,
                    int32_t ordinal,
                    ffi::RemainingArgs operands,
                    ffi::RemainingRets results,
                    ffi::Dictionary) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto complete = [promise](const std::exception_ptr& failure) {
    Settle(promise, failure);
  };
  try {
    const CallAttributes& at = state->site.attributes();
    RankCall call = DecodeCall(at, operands, results);
    const int64_t device = DeviceOf(at, call, ordinal);
    ProcessEngine().Submit(state->site, run.run_id, device, std::move(call), complete);
  } catch (...) {
    Settle(promise, std::current_exception());
  }
  return future;
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

XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::State<CallSiteState>>()
                             .Ctx<ffi::RunId>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To(Execute)
                             .release();
  return handler->Call(frame);
}

}  // namespace

std::array<Target, kNumOps> Targets() {
  return TargetsOfOps([]<Op op>() {
    return Target{"jax_ub$" + std::string(OpName(op)),
                  reinterpret_cast<void*>(&InstantiateHandler<op>),
                  /*initialize=*/nullptr, reinterpret_cast<void*>(&ExecuteHandler)};
  });
}

CallSiteType TheCallSiteType() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<CallSiteState>();
  return {"jax_ub$CallSite", &CallSiteState::id, &info};
}

}  // namespace jax_ub
