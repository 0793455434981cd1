// Emulates the driver functions that copy and fill memory.
#include <cstring>
#include <memory>
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

struct Copy {
  uint64_t to = 0;
  uint64_t from = 0;
  int64_t size_bytes = 0;

  Touch written() const { return {to, 1, size_bytes, 0}; }
  Touch read() const { return {from, 1, size_bytes, 0}; }
  void Run() const {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                static_cast<size_t>(size_bytes));
  }
};

}  // namespace

int OwnerOf(const Call& call, uint64_t address) {
  const SharedRegion region = call.machine.memory.Around(address);
  return region == nullptr || region->kind == Region::Kind::kHost ? -1 : region->device;
}

namespace {

// Enqueues a copy. Pageable host memory is read before the call returns, or written
// before it returns.
CUresult EnqueueCopy(Call& call, CUstream handle, Copy copy) {
  Stream* const stream = call.FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (copy.written().span_bytes() == 0) return CUDA_SUCCESS;
  const bool is_captured = stream->capture != nullptr;
  Operation operation;
  operation.name = "cuMemcpyAsync";
  operation.kind = Operation::Kind::kCopy;
  operation.owners = {OwnerOf(call, copy.to), OwnerOf(call, copy.from)};
  // Multiprocessors copy within a device, and copy engines between devices.
  operation.num_processors = operation.owners == std::vector(2, stream->device) ? 1 : 0;
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
    return EnqueueCopy(call, stream, {to, from, static_cast<int64_t>(size_bytes)});
  });
}

template <typename Value>
CUresult Fill(
    const char* name, CUdeviceptr to, Value value, size_t count, CUstream stream) {
  return RunInContext(name, [&](Call& call) {
    if (to % sizeof(Value) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (call.FindStream(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (count == 0) return CUDA_SUCCESS;
    return Enqueue(call, stream, FillOf(call, name, to, value, count));
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
  driver.MemsetD8Async = MemsetD8Async;
  driver.MemsetD32Async = MemsetD32Async;
}

}  // namespace jax_ub::emulated
