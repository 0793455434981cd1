// The FFI handlers that quantize an array to FP8.
#include <exception>
#include <memory>
#include <string>

#include "engine/cpu/completion.h"
#include "engine/cpu/thread_pool.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"
#include "platform/error.h"
#include "quantize/cpu/quantize.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ub {

namespace {

namespace ffi = xla::ffi;

void Require(bool condition, const char* what) {
  if (!condition) throw ShapeError(std::string("jax_ub.quantize: ") + what);
}

ScaleLayout DecodeLayout(const ffi::Dictionary& dict) {
  const auto get = [&](const char* name) {
    const auto value = dict.get<int64_t>(name);
    Require(value.has_value(), "an attribute of the scales is missing");
    return *value;
  };
  return {get("groups"), get("rows"), get("columns"), get("per_column") != 0};
}

void CheckCounts(const ScaleLayout& layout, size_t num_elements, size_t num_scales) {
  Require(num_elements == static_cast<size_t>(layout.num_elements()) &&
              num_scales == static_cast<size_t>(layout.num_scales()),
          "the scales do not match the elements");
}

// Returns the dtype of an array to quantize.
DType DecodeSource(const ffi::AnyBuffer& x) {
  const DType dtype = DecodeDType("quantize", x.element_type());
  Require(InfoOf(dtype).is_result, "the array is none of f32, bf16 and f16");
  return dtype;
}

// Runs all units of a pass. A short pass runs on the calling thread, because waking
// other threads takes as long. Otherwise may return before the pass has ended: XLA's
// thread must not wait for other threads.
template <typename Pass>
ffi::Future Run(const Pass& pass) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const QuantizeUnits units(pass.layout);
  if (units.estimated_us() < kMaxInlineUs) {
    for (int64_t unit = 0; unit < units.count(); ++unit) pass.RunUnit(units, unit);
    promise.SetAvailable();
    return future;
  }
  const Completion completion(
      [promise](const std::exception_ptr& failure) { Settle(promise, failure); });
  ThreadPool& pool = ProcessEngine().pool();
  // XLA may continue the program in the completion, and wait for other devices there.
  // A thread that computes must not wait for them, unless it is XLA's own thread.
  const auto done = [completion, &pool](const std::exception_ptr& failure,
                                        bool participated) {
    if (participated) {
      completion(failure);
    } else {
      pool.SubmitBlocking(completion.AsTask(failure));
    }
  };
  pool.Participate(std::make_shared<ParallelJob>(
      units.count(), [=](int64_t unit, Scratch&) { pass.RunUnit(units, unit); },
      units.estimated_us(), done));
  return future;
}

// Calls `execute`, and converts its exceptions to an XLA error.
template <typename Execute>
ffi::Future WithErrors(const Execute& execute) {
  try {
    return execute();
  } catch (...) {
    ffi::Promise promise;
    ffi::Future future(promise);
    Settle(promise, std::current_exception());
    return future;
  }
}

ffi::Future ExecuteAmax(ffi::AnyBuffer x,
                        ffi::Result<ffi::Buffer<ffi::F32>> maxima,
                        ffi::Dictionary dict) {
  return WithErrors([&] {
    const auto keeps_nan = dict.get<bool>("keeps_nan");
    Require(keeps_nan.has_value(), "the attribute keeps_nan is missing");
    const AmaxPass pass{DecodeLayout(dict), DecodeSource(x), x.untyped_data(),
                        *keeps_nan, static_cast<int32_t*>(maxima->untyped_data())};
    CheckCounts(pass.layout, x.element_count(), maxima->element_count());
    pass.Begin();
    return Run(pass);
  });
}

ffi::Future ExecuteCast(ffi::AnyBuffer x,
                        ffi::AnyBuffer scales,
                        ffi::Result<ffi::AnyBuffer> values,
                        ffi::Dictionary dict) {
  return WithErrors([&] {
    const CastPass pass{
        DecodeLayout(dict),    DecodeSource(x),
        x.untyped_data(),      DecodeDType("quantize", scales.element_type()),
        scales.untyped_data(), DecodeDType("quantize", values->element_type()),
        values->untyped_data()};
    Require(pass.scale_dtype == DType::kF32 || pass.scale_dtype == DType::kE8M0,
            "the scales are neither f32 nor e8m0");
    Require(IsFp8(pass.fp8_dtype), "the result is not FP8");
    Require(values->element_count() == x.element_count(), "the sizes differ");
    CheckCounts(pass.layout, x.element_count(), scales.element_count());
    return Run(pass);
  });
}

XLA_FFI_Error* AmaxHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Attrs()
                             .To(ExecuteAmax)
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* CastHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Ret<ffi::AnyBuffer>()
                             .Attrs()
                             .To(ExecuteCast)
                             .release();
  return handler->Call(frame);
}

}  // namespace

std::array<Target, 2> QuantizeTargets() {
  const auto target = [](const char* name, auto* execute) {
    return Target{name, /*instantiate=*/nullptr, /*initialize=*/nullptr,
                  reinterpret_cast<void*>(execute)};
  };
  return {target("jax_ub.amax", &AmaxHandler), target("jax_ub.cast", &CastHandler)};
}

}  // namespace jax_ub
