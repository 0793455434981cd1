// Anonymous memory that processes share by passing its descriptor on: nothing in
// /dev/shm or /tmp, and nothing left when the last process that maps it is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "platform/file_descriptor.h"
#include "platform/mapping.h"

namespace jax_ub {

class SharedMapping {
 public:
  SharedMapping() = default;

  // Zeros. All of it is there: no later access can fail. Nobody can change its size.
  static SharedMapping Create(int64_t size_bytes);

  // What another process created. Throws SystemError unless it is memory of this size,
  // sealed.
  static SharedMapping Map(FileDescriptor memory, int64_t size_bytes);

  std::byte* data() const { return mapping_.get().data; }
  int64_t size_bytes() const { return static_cast<int64_t>(mapping_.get().size); }

  // To be passed on; none in one that was mapped.
  const FileDescriptor& descriptor() const { return descriptor_; }
  void CloseDescriptor() { descriptor_.reset(); }

  // In a child of fork, which has no part in it: the range may hold something else.
  void Forget() { static_cast<void>(mapping_.release()); }

 private:
  SharedMapping(FileDescriptor descriptor, int64_t size_bytes);

  FileDescriptor descriptor_;
  HostMapping mapping_;
};

}  // namespace jax_ub
