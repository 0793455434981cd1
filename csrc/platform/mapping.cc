#include "platform/mapping.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "platform/cgroup.h"
#include "platform/error.h"

// The headers of the oldest supported kernels lack these constants.
#if !defined(MFD_NOEXEC_SEAL)
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#if !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace jax_ub {

namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

std::string Bytes(int64_t size_bytes) { return std::to_string(size_bytes) + " bytes"; }

FileDescriptor NewMemory() {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int descriptor = memfd_create("jax_ub", flags | MFD_NOEXEC_SEAL);
  // Kernels before 6.3 reject MFD_NOEXEC_SEAL with EINVAL, so memfd_create is called
  // again without it.
  if (descriptor < 0 && errno == EINVAL) descriptor = memfd_create("jax_ub", flags);
  FileDescriptor memory(descriptor);
  if (!memory) ThrowSystemError("memfd_create", errno);
  return memory;
}

// Throws SystemError if less than `size_bytes` bytes of memory are available. Linux
// overcommits memory, so without this check, a too large allocation would succeed, and
// the kernel would kill the process when it accesses the memory.
void CheckAvailable(int64_t size_bytes) {
  const int64_t available_bytes = AvailableBytes();
  if (size_bytes <= available_bytes) return;
  throw SystemError("memory of " + Bytes(size_bytes) + ": only " +
                    Bytes(available_bytes) + " are available");
}

}  // namespace

void MappingTraits::Close(MappedRange mapping) noexcept {
  static_cast<void>(munmap(mapping.data, mapping.size));
}

HostMapping MapPrivate(size_t size_bytes, Pages pages) noexcept {
  void* const data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
  const int advice = pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
  static_cast<void>(madvise(data, size_bytes, advice));
  return HostMapping({.data = static_cast<std::byte*>(data), .size = size_bytes});
}

SharedMapping::SharedMapping(FileDescriptor descriptor, int64_t size_bytes)
    : descriptor_(std::move(descriptor)) {
  const size_t size = static_cast<size_t>(size_bytes);
  void* data =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
  if (data == MAP_FAILED) ThrowSystemError("mmap of " + Bytes(size_bytes), errno);
  mapping_ = HostMapping({.data = static_cast<std::byte*>(data), .size = size});
  // Both calls are hints. Huge pages cause fewer TLB misses in large copies.
  // MADV_DONTFORK excludes the memory from forked children, which might keep it after
  // this process has exited.
  static_cast<void>(madvise(data, size, MADV_HUGEPAGE));
  static_cast<void>(madvise(data, size, MADV_DONTFORK));
}

SharedMapping SharedMapping::Create(int64_t size_bytes) {
  CheckAvailable(size_bytes);
  FileDescriptor memory = NewMemory();
  if (fchmod(memory.get(), S_IRUSR | S_IWUSR) != 0) ThrowSystemError("fchmod", errno);
  if (ftruncate(memory.get(), size_bytes) != 0) {
    ThrowSystemError("ftruncate to " + Bytes(size_bytes), errno);
  }
  SharedMapping mapping(std::move(memory), size_bytes);
  // Writing to all pages allocates huge pages on the local NUMA node, which fallocate
  // alone does not. The call is a hint, so fallocate then guarantees that every page is
  // allocated.
  static_cast<void>(
      madvise(mapping.data(), static_cast<size_t>(size_bytes), MADV_POPULATE_WRITE));
  int failed = 0;
  do {
    failed = posix_fallocate(mapping.descriptor().get(), 0, size_bytes);
  } while (failed == EINTR);
  if (failed != 0) ThrowSystemError("fallocate of " + Bytes(size_bytes), failed);
  if (fcntl(mapping.descriptor().get(), F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) {
    ThrowSystemError("sealing memory", errno);
  }
  return mapping;
}

SharedMapping SharedMapping::Map(FileDescriptor memory, int64_t size_bytes) {
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    throw SystemError("memory whose size is not sealed");
  }
  struct stat status = {};
  if (fstat(memory.get(), &status) != 0) ThrowSystemError("fstat", errno);
  if (status.st_size != size_bytes) {
    throw SystemError("memory of " + Bytes(status.st_size) + " instead of " +
                      Bytes(size_bytes));
  }
  SharedMapping mapping(std::move(memory), size_bytes);
  mapping.CloseDescriptor();
  static_cast<void>(
      madvise(mapping.data(), static_cast<size_t>(size_bytes), MADV_POPULATE_READ));
  return mapping;
}

}  // namespace jax_ub
