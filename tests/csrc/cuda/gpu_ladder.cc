// gpu_ladder [LIBRARY DIRECTORY ...]: checks the parts of the CUDA engine on one GPU. Each
// rung needs the ones above it, so the first that fails shows where the fault is. A rung
// that fails does not end the program. The exit status is 77 if there is no GPU.
//
//   L1 driver     versions, the device's attributes, and whether the kernels load
//   L2 kernels    sums, copies and transpositions have the bits of the CPU engine; scales
//                 of FP8 operands follow the formula; a wait ends by a signal, or by its
//                 deadline
//   L3 cublaslt   products of random layouts, dtypes, alignments and addends are exact
//   L4 graphs     a captured product and sum, replayed with other operands
//   L5 sharing    another process maps this process's memory, reads it and writes it
//
// The two further rungs are measured: L6, signals and waits while GEMMs run, by gpu_bench,
// and L7, a whole call of one rank, by loopback_bench.

#include <sys/socket.h>

#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gpu_bench.h"
#include "cuda/random_arena.h"
#include "cuda/random_scale_calls.h"
#include "platform/file_descriptor.h"
#include "platform/unix_socket.h"
#include "processes.h"
#include "transport/cuda/virtual_memory.h"

namespace jax_ub {

namespace {

constexpr int64_t kSharedBytes = 2 * kMiB;
constexpr uint32_t kWritten = 0x600d600d;  // by this process to the shared memory
constexpr uint32_t kReplied = 0xcafecafe;  // by the other process

void Require(bool holds, const std::string& what) {
  if (!holds) throw Error(what);
}

// Pinned memory of the host, which has the same addresses on the device.
class PinnedArena {
 public:
  PinnedArena(const Driver& driver, int64_t size_bytes)
      : memory_(driver, size_bytes), size_bytes_(size_bytes) {
    Require(memory_.device() == reinterpret_cast<CUdeviceptr>(memory_.get()),
            "pinned memory has another address on the device");
  }

  // Returns memory that is aligned to 256 bytes.
  std::byte* Allocate(int64_t size_bytes) {
    std::byte* data = static_cast<std::byte*>(memory_.get()) + used_bytes_;
    used_bytes_ += (size_bytes + 255) / 256 * 256;
    Require(used_bytes_ <= size_bytes_, "the arena is too small");
    return data;
  }
  void Clear() { used_bytes_ = 0; }

 private:
  HostMemory memory_;
  int64_t size_bytes_;
  int64_t used_bytes_ = 0;
};

void Fill(const Driver& driver, CUdeviceptr to, uint32_t word, CUstream stream) {
  Check(driver, driver.MemsetD32Async(to, word, kSharedBytes / 4, stream),
        "cuMemsetD32Async");
}

// Throws Error unless all words of the shared memory are `word`.
void RequireWords(const Driver& driver,
                  CUdeviceptr from,
                  uint32_t word,
                  CUstream stream) {
  const HostMemory copy(driver, kSharedBytes);
  Check(driver, driver.MemcpyAsync(copy.device(), from, kSharedBytes, stream),
        "cuMemcpyAsync");
  Check(driver, driver.StreamSynchronize(stream), "cuStreamSynchronize");
  const auto* words = static_cast<const uint32_t*>(copy.get());
  for (int64_t i = 0; i < kSharedBytes / 4; ++i) {
    Require(words[i] == word,
            "word " + std::to_string(i) + " of the shared memory is " +
                std::to_string(words[i]) + ", not " + std::to_string(word));
  }
}

// Another process, which maps memory that it receives. It is forked before this process
// initializes the driver, which must not be used after a fork.
class OtherProcess {
 public:
  OtherProcess() : OtherProcess(Connect()) {}

  // Sends the descriptor of memory, and returns when the other process has written to it.
  // Throws Error with the reason if it could not.
  void Write(const FileDescriptor& memory) {
    const std::byte message{};
    Require(Send(here_, {&message, 1}, &memory) == Sent::kYes,
            "the descriptor was not sent");
    const std::string failure = process_.Join()[0];
    Require(failure.empty(), "the other process: " + failure);
  }

 private:
  using Ends = std::array<FileDescriptor, 2>;

  static Ends Connect() {
    int ends[2];
    Require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0,
                       ends) == 0,
            "socketpair failed");
    return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
  }

  explicit OtherProcess(Ends ends)
      : here_(std::move(ends[0])), process_(1, [&](int) {
          here_.reset();  // the end of this process, whose exit ends Poll
          MapAndWrite(ends[1]);
        }) {}

  static void MapAndWrite(const FileDescriptor& connection) {
    std::vector<pollfd> polled = {{connection.get(), POLLIN, 0}};
    Poll(polled);
    std::byte message;
    const Received received = Receive(connection, {&message, 1});
    if (received.arrival != Arrival::kMessage) return;
    const Driver& driver = SystemDriver();
    const Context context(driver, 0);
    const ScopedContext current(driver, context.get());
    const CUdevice devices[] = {context.device()};
    const auto descriptor = static_cast<intptr_t>(received.passed.get());
    const VirtualMemory shared(
        ImportMemory(driver, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                     reinterpret_cast<void*>(descriptor)),
        kSharedBytes, devices);
    const Stream stream(driver);
    RequireWords(driver, shared.base(), kWritten, stream.get());
    Fill(driver, shared.base(), kReplied, stream.get());
    Check(driver, driver.StreamSynchronize(stream.get()), "cuStreamSynchronize");
  }

  FileDescriptor here_;
  Processes process_;
};

class Ladder : public GpuBench {
 public:
  Ladder(const Driver& driver, const CublasLt& library)
      : GpuBench(driver, library), arena_(driver, 16 * kMiB) {}

  std::string Kernels() {
    const int num_calls =
        CheckRandomCalls<SumParams>(
            MakeSum, [&](const SumParams& sum) { gpu_.sums().Sum(stream(0), sum); }) +
        CheckRandomCalls<CopyParams>(
            MakeCopy,
            [&](const CopyParams& copy) { gpu_.sums().Copy(stream(0), copy, 0, 0); }) +
        CheckRandomCalls<TransposeParams>(MakeTranspose, [&](const auto& transpose) {
          gpu_.sums().Transpose(stream(0), transpose);
        });
    const Fp8ScaleKernels scales(driver_);
    const int num_scale_calls =
        CheckRandomCalls<BlockScalesParams>(
            MakeBlockScales,
            [&](const auto& blocks) { scales.StoreBlockScales(stream(0), blocks); }) +
        CheckRandomCalls<RowScalesParams>(MakeRowScales, [&](const auto& rows) {
          scales.ConvertRows(stream(0), rows);
        });
    CheckFlags();
    return std::to_string(num_calls) + " sums, copies and transpositions, " +
           std::to_string(num_scale_calls) + " FP8 operands";
  }

  std::string Products() {
    constexpr int kProducts = 300;
    for (int seed = 0; seed < kProducts; ++seed) {
      arena_.Clear();
      Random random(seed);
      const auto gemm = MakeDeviceGemm(seed, Values::kIntegers);
      MoveInto(arena_.Allocate(ArenaBytes(*gemm)), random, *gemm);
      Multiply(gemm->problem, 0);
      Synchronize();
      const int64_t num_wrong = CountWrong(*gemm, Values::kIntegers);
      const auto name = [](DType dtype) { return std::string(DTypeName(dtype)); };
      const GemmProblem& problem = gemm->problem;
      Require(num_wrong == 0,
              "product " + std::to_string(seed) + ", " + name(problem.a.dtype) + " " +
                  std::to_string(problem.m) + " x " + std::to_string(problem.k) +
                  " x " + std::to_string(problem.n) + " to " + name(problem.c.dtype) +
                  " with " + std::to_string(problem.addends.size()) +
                  " addends: " + std::to_string(num_wrong) + " elements are wrong");
    }
    return std::to_string(kProducts) + " products";
  }

  // Captures c = a b and sum = c + c, and replays them for several contents of a and b.
  std::string Graphs() {
    constexpr int64_t kSide = 64;
    constexpr int64_t kElements = kSide * kSide;
    arena_.Clear();
    std::byte* const a = arena_.Allocate(2 * kElements);
    std::byte* const b = arena_.Allocate(2 * kElements);
    std::byte* const c = arena_.Allocate(2 * kElements);
    std::byte* const out = arena_.Allocate(2 * kElements);
    const GemmProblem product = Product(kSide, kSide, kSide, DeviceAddressOf(a),
                                        DeviceAddressOf(b), DeviceAddressOf(c));
    SumParams sum = {};
    sum.num_parts = 2;
    sum.rows = sum.columns = kSide;
    sum.parts[0] = sum.parts[1] = {DeviceAddressOf(c), kSide, DType::kBF16};
    sum.out = {DeviceAddressOf(out), kSide, DType::kBF16};
    const auto enqueue = [&] {
      Multiply(product, 0);
      gpu_.sums().Sum(stream(0), sum);
    };
    enqueue();  // plans what a capture must not plan
    Synchronize();
    const CUgraphExec graph = Capture(stream(0), enqueue);
    constexpr int kReplays = 3;
    for (int replay = 0; replay < kReplays; ++replay) {
      Random random(replay);
      std::vector<float> x(kElements), w(kElements);
      for (int64_t i = 0; i < kElements; ++i) {
        x[i] = static_cast<float>(Pick(random, -1, 1));
        w[i] = static_cast<float>(Pick(random, -1, 1));
        Write(a + 2 * i, DType::kBF16, x[i]);
        Write(b + 2 * i, DType::kBF16, w[i]);
      }
      Launch(graph, stream(0));
      Synchronize();
      for (int64_t i = 0; i < kElements; ++i) {
        float expected = 0;
        for (int64_t k = 0; k < kSide; ++k) {
          expected += 2 * x[i / kSide * kSide + k] * w[k * kSide + i % kSide];
        }
        const float found = Read(out + 2 * i, DType::kBF16);
        Require(found == expected, "replay " + std::to_string(replay) + ": element " +
                                       std::to_string(i) + " is " +
                                       std::to_string(found) + ", not " +
                                       std::to_string(expected));
      }
    }
    driver_.GraphExecDestroy(graph);
    return std::to_string(kReplays) + " replays";
  }

  std::string Sharing(OtherProcess& other) {
    const Context context(driver_, 0);
    const CUdevice devices[] = {context.device()};
    const VirtualMemory memory =
        VirtualMemory::Create(driver_, context.device(), kSharedBytes,
                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, devices);
    Require(memory.size_bytes() == kSharedBytes,
            "the driver allocates " + std::to_string(memory.size_bytes()) +
                " bytes instead of " + std::to_string(kSharedBytes));
    Fill(driver_, memory.base(), kWritten, stream(0));
    Synchronize();
    int descriptor = -1;
    ExportMemory(memory.memory(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                 &descriptor);
    other.Write(FileDescriptor(descriptor));
    RequireWords(driver_, memory.base(), kReplied, stream(0));
    return std::to_string(kSharedBytes) + " bytes written by another process";
  }

 private:
  // Runs random calls of a kernel and returns their number.
  template <typename Params>
  int CheckRandomCalls(KernelCall<Params> (*make)(RandomMatrices&),
                       const std::function<void(const Params&)>& run) {
    constexpr int kCalls = 100;
    for (int seed = 0; seed < kCalls; ++seed) {
      arena_.Clear();
      Random random(seed);
      RandomMatrices matrices([&](int64_t size) { return arena_.Allocate(size); },
                              random);
      const KernelCall<Params> call = make(matrices);
      run(call.params);
      Synchronize();
      Require(call.IsRight(), "a random call with seed " + std::to_string(seed) +
                                  " of " + NameOf(call.params) + " is wrong");
    }
    return kCalls;
  }
  static std::string NameOf(const SumParams&) { return kSumKernel; }
  static std::string NameOf(const CopyParams&) { return kCopyKernel; }
  static std::string NameOf(const TransposeParams&) { return kTransposeKernel; }
  static std::string NameOf(const BlockScalesParams&) { return kBlockScalesKernel; }
  static std::string NameOf(const RowScalesParams&) { return kConvertRowsKernel; }

  void CheckFlags() {
    const OwnFlags signalled(driver_, stream(0));
    gpu_.flags().Signal(stream(0), signalled.Signal());
    gpu_.flags().Wait(stream(0), signalled.Wait());
    gpu_.flags().End(stream(0), signalled.End());
    Synchronize();
    Require(signalled.error().code == ErrorRecord::kNone,
            "a wait for a flag that was set failed with code " +
                std::to_string(signalled.error().code));
    const OwnFlags forgotten(driver_, stream(0));
    gpu_.flags().Wait(stream(0), forgotten.Wait(10'000'000));
    Synchronize();
    Require(forgotten.error().code == ErrorRecord::kDeadline,
            "a wait for a flag that was not set ended with code " +
                std::to_string(forgotten.error().code) + ", not at its deadline");
  }

  PinnedArena arena_;
};

std::string DescribeDevice(const Driver& driver, const CublasLt& library) {
  int version = 0;
  Check(driver, driver.DriverGetVersion(&version), "cuDriverGetVersion");
  const Context context(driver, 0);
  char name[256] = {};
  Check(driver, driver.DeviceGetName(name, sizeof(name), context.device()),
        "cuDeviceGetName");
  size_t memory_bytes = 0;
  Check(driver, driver.DeviceTotalMem(&memory_bytes, context.device()),
        "cuDeviceTotalMem");
  std::string text = std::string(name) + ", " + std::to_string(memory_bytes / kMiB) +
                     " MiB, driver for CUDA " + std::to_string(version) +
                     ", cuBLASLt " + std::to_string(library.version);
  const std::pair<const char*, CUdevice_attribute> attributes[] = {
      {"major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
      {"minor", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
      {"multiprocessors", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
      {"clusters", CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH},
      {"virtual memory", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
      {"descriptors", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
      {"fabric", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED},
      {"multicast", CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED},
  };
  for (const auto& [label, attribute] : attributes) {
    text +=
        std::string(", ") + label + " " + std::to_string(context.Attribute(attribute));
  }
  return text;
}

// Runs a rung, prints its result, and returns whether it holds.
bool Holds(const char* name, const std::function<std::string()>& rung) {
  try {
    const std::string text = rung();
    std::cout << "ok    " << name << ": " << text << std::endl;
    return true;
  } catch (const std::exception& error) {
    std::cout << "FAIL  " << name << ": " << error.what() << std::endl;
    return false;
  }
}

int Climb(const std::vector<std::string>& directories) {
  OtherProcess other;
  const Driver& driver = SystemDriver();
  std::optional<CublasLt> library;
  std::optional<Ladder> ladder;
  const bool loads = Holds("L1 driver", [&] {
    library = LoadCublasLt(directories);
    const std::string text = DescribeDevice(driver, *library);
    ladder.emplace(driver, *library);
    return text;
  });
  if (!loads) return 1;
  bool holds = Holds("L2 kernels", [&] { return ladder->Kernels(); });
  holds &= Holds("L3 cublaslt", [&] { return ladder->Products(); });
  holds &= Holds("L4 graphs", [&] { return ladder->Graphs(); });
  holds &= Holds("L5 sharing", [&] { return ladder->Sharing(other); });
  return holds ? 0 : 1;
}

}  // namespace

}  // namespace jax_ub

int main(int argc, char** argv) try {
  return jax_ub::Climb({argv + 1, argv + argc});
} catch (const jax_ub::UnsupportedError& error) {
  std::cout << "gpu_ladder: not run: " << error.what() << std::endl;
  return 77;
}
