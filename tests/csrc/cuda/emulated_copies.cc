// Copies and fills.
#include <cstring>
#include <memory>
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

constexpr size_t kMaxPitch = 2147483647;

struct Copy {
  uint64_t to = 0;
  uint64_t from = 0;
  int64_t num_rows = 1;
  int64_t row_bytes = 0;
  int64_t to_stride = 0;
  int64_t from_stride = 0;

  Touch written() const { return {to, num_rows, row_bytes, to_stride}; }
  Touch read() const { return {from, num_rows, row_bytes, from_stride}; }
  void Run() const {
    for (int64_t row = 0; row < num_rows; ++row) {
      std::memcpy(reinterpret_cast<void*>(to + row * to_stride),
                  reinterpret_cast<const void*>(from + row * from_stride),
                  static_cast<size_t>(row_bytes));
    }
  }
};

// Memory of the host that no CUDA call made: read before the call returns, and written
// before it returns.
CUresult EnqueueCopy(Call& call, const char* name, CUstream handle, Copy copy) {
  Stream* const stream = call.FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (copy.written().span_bytes() == 0) return CUDA_SUCCESS;
  const bool is_captured = stream->capture != nullptr;
  Operation operation;
  operation.name = name;
  std::shared_ptr<std::string> staged;
  if (Memory::Holds(copy.from)) {
    operation.touches.push_back(copy.read());
  } else if (!is_captured) {
    staged = std::make_shared<std::string>(reinterpret_cast<const char*>(copy.from),
                                           copy.read().span_bytes());
    copy.from = reinterpret_cast<uint64_t>(staged->data());
  }
  const bool returns_when_done = !Memory::Holds(copy.to) && !is_captured;
  if (Memory::Holds(copy.to)) operation.touches.push_back(copy.written());
  operation.run = [copy, staged] { copy.Run(); };
  const CUresult result = Enqueue(call, handle, std::move(operation));
  if (result == CUDA_SUCCESS && returns_when_done) call.AwaitAtEnd(MomentOf(*stream));
  return result;
}

CUresult MemcpyAsync(CUdeviceptr to,
                     CUdeviceptr from,
                     size_t size_bytes,
                     CUstream stream) {
  return RunInContext("MemcpyAsync", [&](Call& call) {
    if (size_bytes > 0 && (to == 0 || from == 0)) return CUDA_ERROR_INVALID_VALUE;
    Copy copy{.to = to, .from = from};
    copy.row_bytes = static_cast<int64_t>(size_bytes);
    return EnqueueCopy(call, "cuMemcpyAsync", stream, copy);
  });
}

// The address of an end of a 2D copy; 0: of a kind that is not emulated.
uint64_t EndOf(CUmemorytype type, const void* host, CUdeviceptr device) {
  switch (type) {
    case CU_MEMORYTYPE_HOST:
      return reinterpret_cast<uint64_t>(host);
    case CU_MEMORYTYPE_DEVICE:
      return Memory::Holds(device) ? device : 0;
    case CU_MEMORYTYPE_UNIFIED:
      return device;
    default:
      return 0;
  }
}

CUresult Memcpy2DAsync(const CUDA_MEMCPY2D* params, CUstream stream) {
  return RunInContext("Memcpy2DAsync", [&](Call& call) {
    if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUDA_MEMCPY2D& p = *params;
    const uint64_t to = EndOf(p.dstMemoryType, p.dstHost, p.dstDevice);
    const uint64_t from = EndOf(p.srcMemoryType, p.srcHost, p.srcDevice);
    if (to == 0 || from == 0) return CUDA_ERROR_INVALID_VALUE;
    // A pitch of 0 is that of rows without gaps.
    const size_t to_pitch =
        p.dstPitch != 0 ? p.dstPitch : p.WidthInBytes + p.dstXInBytes;
    const size_t from_pitch =
        p.srcPitch != 0 ? p.srcPitch : p.WidthInBytes + p.srcXInBytes;
    if (to_pitch < p.WidthInBytes + p.dstXInBytes || to_pitch > kMaxPitch ||
        from_pitch < p.WidthInBytes + p.srcXInBytes || from_pitch > kMaxPitch) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Copy copy;
    copy.to = to + p.dstY * to_pitch + p.dstXInBytes;
    copy.from = from + p.srcY * from_pitch + p.srcXInBytes;
    copy.num_rows = static_cast<int64_t>(p.Height);
    copy.row_bytes = static_cast<int64_t>(p.WidthInBytes);
    copy.to_stride = static_cast<int64_t>(to_pitch);
    copy.from_stride = static_cast<int64_t>(from_pitch);
    return EnqueueCopy(call, "cuMemcpy2DAsync", stream, copy);
  });
}

template <typename Value>
CUresult Fill(
    const char* name, CUdeviceptr to, Value value, size_t count, CUstream stream) {
  return RunInContext(name, [&](Call& call) {
    if (to % sizeof(Value) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (call.FindStream(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (count == 0) return CUDA_SUCCESS;
    Operation operation;
    operation.name = name;
    operation.touches.push_back(
        {to, 1, static_cast<int64_t>(count * sizeof(Value)), 0});
    operation.run = [=] { std::fill_n(reinterpret_cast<Value*>(to), count, value); };
    return Enqueue(call, stream, std::move(operation));
  });
}

CUresult MemsetD8Async(CUdeviceptr to,
                       unsigned char value,
                       size_t count,
                       CUstream stream) {
  return Fill("MemsetD8Async", to, value, count, stream);
}

CUresult MemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return Fill("MemsetD32Async", to, value, count, stream);
}

}  // namespace

void FillCopies(Driver& driver) {
  driver.MemcpyAsync = MemcpyAsync;
  driver.Memcpy2DAsync = Memcpy2DAsync;
  driver.MemsetD8Async = MemsetD8Async;
  driver.MemsetD32Async = MemsetD32Async;
}

}  // namespace jax_ub::emulated
