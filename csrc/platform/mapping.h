// Owned memory mappings: private memory with a chosen page size, and memory that
// processes share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform/file_descriptor.h"
#include "platform/handle.h"

namespace jax_ub {

struct MappedRange {
  std::byte* data = nullptr;
  size_t size = 0;
  bool operator==(const MappedRange&) const = default;
};

struct MappingTraits {
  using Value = MappedRange;
  static constexpr Value kNone = {};
  static void Close(Value mapping) noexcept;
};

using HostMapping = UniqueHandle<MappingTraits>;

// Page size of private memory. Huge pages cause fewer TLB misses; small pages are
// faster to allocate at their first access.
enum class Pages { kHuge, kSmall };

// Maps private memory, initially zero. The kernel allocates a page at its first access.
// Returns an empty handle after an error. `pages` is only a hint.
HostMapping MapPrivate(size_t size_bytes, Pages pages) noexcept;

// Anonymous shared memory (memfd). Processes share it by passing its descriptor, so it
// needs no file in /dev/shm or /tmp, and the kernel frees it when the last process that
// maps it exits.
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

  // Returns the descriptor to pass to other processes. The descriptor is empty if the
  // mapping comes from Map.
  const FileDescriptor& descriptor() const { return descriptor_; }
  void CloseDescriptor() { descriptor_.reset(); }

  // Gives up the mapping without unmapping it. Used in a forked child, which does not
  // have the mapping (MADV_DONTFORK), so that the address may belong to another mapping
  // of the child.
  void DetachAfterFork() { static_cast<void>(mapping_.release()); }

 private:
  SharedMapping(FileDescriptor descriptor, int64_t size_bytes);

  FileDescriptor descriptor_;
  HostMapping mapping_;
};

}  // namespace jax_ub
