#include "cuda/emulated_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace jax_ub::emulated {

namespace {

constexpr int64_t kArenaBytes = int64_t{1} << 38;
constexpr char kFileName[] = "jax_ub_emulated";
// The number of bytes of a large allocation that are filled with 0xFF; it includes the
// flags, which are first.
constexpr int64_t kFilledBytes = int64_t{4} << 20;

int64_t RoundUp(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Reserves addresses by a system call, which sanitizers do not intercept: they would
// reserve shadow memory of the same size.
uint64_t MakeArena() {
  const long made = syscall(SYS_mmap, nullptr, kArenaBytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == -1) throw std::runtime_error("the emulated driver gets no addresses");
  return static_cast<uint64_t>(made);
}

uint64_t Arena() {
  static const uint64_t arena = MakeArena();
  return arena;
}

std::atomic<int64_t> arena_used = 0;

}  // namespace

std::shared_ptr<MemoryFile> MemoryFile::Make(int gpu, int64_t size_bytes) {
  auto file = std::make_shared<MemoryFile>();
  file->gpu = gpu;
  file->size_bytes = size_bytes;
  file->is_own = true;
  file->id = RandomBits();
  char name[64];
  std::snprintf(name, sizeof(name), "%s-%d-%016lx", kFileName, gpu, file->id);
  file->descriptor = FileDescriptor(memfd_create(name, MFD_CLOEXEC));
  if (!file->descriptor || ftruncate(file->descriptor.get(), size_bytes) != 0) {
    throw std::runtime_error("the emulated driver cannot make a memory file");
  }
  static const std::string filling(1 << 16, '\xFF');
  for (int64_t done = 0; done < std::min(size_bytes, kFilledBytes);) {
    const int64_t part = std::min<int64_t>(size_bytes - done, filling.size());
    if (pwrite(file->descriptor.get(), filling.data(), part, done) != part) {
      throw std::runtime_error("the emulated driver cannot fill a memory file");
    }
    done += part;
  }
  return file;
}

std::shared_ptr<MemoryFile> MemoryFile::Open(int descriptor) {
  char target[256] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  if (readlink(link.c_str(), target, sizeof(target) - 1) <= 0) return nullptr;
  auto file = std::make_shared<MemoryFile>();
  const std::string format = std::string("/memfd:") + kFileName + "-%d-%lx";
  if (std::sscanf(target, format.c_str(), &file->gpu, &file->id) != 2) return nullptr;
  file->descriptor = FileDescriptor(fcntl(descriptor, F_DUPFD_CLOEXEC, 3));
  struct stat status = {};
  if (!file->descriptor || fstat(descriptor, &status) != 0) return nullptr;
  file->size_bytes = status.st_size;
  return file;
}

std::shared_ptr<MemoryFile> MemoryFile::Find(int pid, int descriptor, uint64_t id) {
  const std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const FileDescriptor opened(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) return nullptr;
  auto file = Open(opened.get());
  return file != nullptr && file->id == id ? file : nullptr;
}

Region::~Region() {
  // Unmaps the memory, but keeps the addresses reserved.
  if (mapped_bytes == 0) return;
  void* const at = reinterpret_cast<void*>(address);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(at, mapped_bytes, PROT_NONE, kFlags, -1, 0);
}

uint64_t Memory::Reserve(int64_t size_bytes, int64_t alignment) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t size = RoundUp(size_bytes, page) + alignment + page;
  const int64_t begin = arena_used.fetch_add(size);
  if (begin + size > kArenaBytes) return 0;
  const auto first = static_cast<int64_t>(Arena()) + begin;
  return static_cast<uint64_t>(RoundUp(first, std::max(alignment, page)));
}

bool Memory::Holds(uint64_t address) {
  return address >= Arena() && address < Arena() + kArenaBytes;
}

void Memory::Add(SharedRegion region, bool is_accessible) {
  if (region->team != nullptr) {
    regions_[region->address] = std::move(region);
    return;
  }
  region->mapped_bytes = RoundUp(region->size_bytes, sysconf(_SC_PAGESIZE));
  const int protection = is_accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
  void* const mapped =
      mmap(reinterpret_cast<void*>(region->address), region->mapped_bytes, protection,
           MAP_SHARED | MAP_FIXED, region->file->descriptor.get(), 0);
  if (mapped == MAP_FAILED) {
    throw std::runtime_error("the emulated driver cannot map memory");
  }
  regions_[region->address] = std::move(region);
}

SharedRegion Memory::Find(uint64_t address, Region::Kind kind) const {
  const auto found = regions_.find(address);
  return found == regions_.end() || found->second->kind != kind ? nullptr
                                                                : found->second;
}

SharedRegion Memory::Around(uint64_t address) const {
  auto found = regions_.upper_bound(address);
  if (found == regions_.begin()) return nullptr;
  --found;
  const Region& region = *found->second;
  return address < region.address + region.size_bytes ? found->second : nullptr;
}

SharedRegion Memory::Of(uint64_t file) const {
  for (const auto& [address, region] : regions_) {
    if (region->kind == Region::Kind::kVirtual && region->file != nullptr &&
        region->file->id == file) {
      return region;
    }
  }
  return nullptr;
}

int64_t Memory::AllocatedBytes(int gpu) const {
  std::map<const MemoryFile*, int64_t> sizes;
  const auto add = [&](const MemoryFile* file) {
    if (file != nullptr && file->is_own && file->gpu == gpu)
      sizes[file] = file->size_bytes;
  };
  for (const auto& [address, region] : regions_) {
    if (region->kind != Region::Kind::kHost) add(region->file.get());
  }
  for (const auto& [number, handle] : handles) add(handle.file.get());
  int64_t sum = 0;
  for (const auto& [file, size] : sizes) sum += size;
  return sum;
}

}  // namespace jax_ub::emulated
