// Anonymous shared memory (memfd). Processes share it by passing its descriptor, so it
// needs no file in /dev/shm or /tmp, and the kernel frees it when the last process that
// maps it exits.
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

  // Creates zero-filled memory. All pages are allocated here, so no later access can
  // fail, and the size is sealed, so no process can change it. Throws SystemError if
  // there is not enough memory.
  static SharedMapping Create(int64_t size_bytes);

  // Maps memory that another process created. Throws SystemError unless its size is
  // `size_bytes` and sealed.
  static SharedMapping Map(FileDescriptor memory, int64_t size_bytes);

  std::byte* data() const { return mapping_.get().data; }
  int64_t size_bytes() const { return static_cast<int64_t>(mapping_.get().size); }

  // The descriptor to pass to other processes. Empty if Map made this mapping.
  const FileDescriptor& descriptor() const { return descriptor_; }
  void CloseDescriptor() { descriptor_.reset(); }

  // Drops the mapping without unmapping it. Called in a child of fork(), which does not
  // inherit the mapping (MADV_DONTFORK): its address range may contain another mapping.
  void Forget() { static_cast<void>(mapping_.release()); }

 private:
  SharedMapping(FileDescriptor descriptor, int64_t size_bytes);

  FileDescriptor descriptor_;
  HostMapping mapping_;
};

}  // namespace jax_ub
