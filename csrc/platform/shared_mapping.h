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

  // Creates memory, initially zero. Allocates all pages, so that no later access can
  // fail, and seals the size, so that no process can change it. Throws SystemError if
  // there is not enough memory.
  static SharedMapping Create(int64_t size_bytes);

  // Maps memory of another process. Throws SystemError unless its size is sealed and
  // equals `size_bytes`.
  static SharedMapping Map(FileDescriptor memory, int64_t size_bytes);

  std::byte* data() const { return mapping_.get().data; }
  int64_t size_bytes() const { return static_cast<int64_t>(mapping_.get().size); }

  // Returns the descriptor to pass to other processes. Empty if Map has made this
  // mapping.
  const FileDescriptor& descriptor() const { return descriptor_; }
  void CloseDescriptor() { descriptor_.reset(); }

  // Releases the mapping without unmapping it. For a forked child, which does not have
  // the mapping (MADV_DONTFORK): there may be another one at its address.
  void Forget() { static_cast<void>(mapping_.release()); }

 private:
  SharedMapping(FileDescriptor descriptor, int64_t size_bytes);

  FileDescriptor descriptor_;
  HostMapping mapping_;
};

}  // namespace jax_ub
