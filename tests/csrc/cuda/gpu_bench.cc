// gpu_bench [FILE.json [LIBRARY DIRECTORY ...]]: what one GPU can show of the CUDA engine's
// parts, with its peers in the same run, and a verdict for each claim. Exits with 77 where
// there is no GPU.
//
//   ceilings   the plain product through CudaGemm; a copy by the copy engine
//   chunked    the products of a rank in P chunks on 1 to 3 streams against one product
//   copies     messages by the copy engine and by kernels of 4 to 32 thread blocks
//   beside     a product while its operand is moved, by the copy engine or by kernels that
//              it leaves multiprocessors to, against the product alone
//   handshakes signals and waits at the highest priority while GEMMs use all but 0 to 16
//              multiprocessors
//   sum        the reduction of P parts against the copy's rate
//   launch     host time to enqueue a product, a sum, copies, a signal and a wait
//
// Operands are random: products of zeros are faster than any that matter. Every figure is
// the median of kRounds rounds in which what is compared takes turns.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/gpu.h"
#include "engine/segments.h"
#include "gemm/cuda/cublaslt.h"
#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "platform/error.h"

namespace jax_ub {

constexpr int kRounds = 15;
constexpr int kNoGpu = 77;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kMaxStreams = 3;

// The product of one rank for a linear layer of a model.
struct Layer {
  std::string name;
  int64_t m, n, k;
  int num_ranks;
  double most_ratio;  // that chunks may cost, over one product
};

// Layers of Llama 3 70B and 405B and GPT-3 with M = 8192: N / P columns for
// all-gathers, K / P inner features for reduce-scatters.
const std::vector<Layer> kLayers = {
    {"70B qkv  P=8", 8192, 1280, 8192, 8, 1.20},
    {"70B proj P=8", 8192, 8192, 1024, 8, 1.05},
    {"70B fc1  P=8", 8192, 7168, 8192, 8, 1.10},
    {"70B fc2  P=8", 8192, 8192, 3584, 8, 1.05},
    {"70B qkv  P=4", 8192, 2560, 8192, 4, 1.20},
    {"405B qkv P=8", 8192, 2304, 16384, 8, 1.20},
    {"405B fc1 P=8", 8192, 13312, 16384, 8, 1.10},
    {"GPT3 fc2 P=8", 8192, 12288, 6144, 8, 1.05},
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Verdict {
  std::string claim;
  double value;
  double limit;
  bool at_least;  // else at most
  bool Holds() const { return at_least ? value >= limit : value <= limit; }
};

class Bench {
 public:
  Bench(const Driver& driver, const CublasLt& library)
      : driver_(driver),
        gpu_(driver, library, 0),
        current_(driver, gpu_.context()),
        flags_page_(driver, 4096),
        error_(driver, sizeof(ErrorRecord)) {
    for (int i = 0; i <= kMaxStreams; ++i) {
      streams_.emplace_back(driver);
      workspaces_.emplace_back(driver, 2 * kLibraryWorkspaceBytes);
    }
    Check(driver, driver.MemsetD8Async(flags_page_.get(), 0, 4096, streams_[0].get()),
          "cuMemsetD8Async");
    FillBlock();
  }

  void Run() {
    Ceilings();
    for (const Layer& layer : kLayers) Chunked(layer);
    Copies();
    Beside();
    Handshakes();
    MatrixSum();
    Launch();
  }

  const std::vector<Verdict>& verdicts() const { return verdicts_; }
  const std::vector<std::pair<std::string, double>>& figures() const {
    return figures_;
  }

 private:
  using Enqueue = std::function<void()>;

  // Fills the block of random bf16 numbers between -1 and 1 that every operand repeats.
  void FillBlock() {
    const int64_t size = 16 * kMiB;
    block_ = HostMemory(driver_, size);
    auto* numbers = static_cast<uint16_t*>(block_.get());
    std::minstd_rand random(1);
    for (int64_t i = 0; i < size / 2; ++i) {
      const float number = static_cast<float>(random() & 0xffff) / 32768.0f - 1.0f;
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof(bits));
      numbers[i] = static_cast<uint16_t>(bits >> 16);
    }
  }

  DeviceMemory Random(int64_t size_bytes) {
    DeviceMemory memory(driver_, size_bytes);
    for (int64_t at = 0; at < size_bytes; at += 16 * kMiB) {
      const int64_t part = std::min(16 * kMiB, size_bytes - at);
      Check(driver_,
            driver_.MemcpyAsync(memory.get() + at, block_.device(), part,
                                streams_[0].get()),
            "cuMemcpyAsync");
    }
    Synchronize();
    return memory;
  }

  void Synchronize() { Check(driver_, driver_.CtxSynchronize(), "cuCtxSynchronize"); }

  // Returns the microseconds between two events of stream 0, which the other streams
  // join.
  double Once(const Enqueue& enqueue) {
    Event begin(driver_, CU_EVENT_DEFAULT);
    Event end(driver_, CU_EVENT_DEFAULT);
    Record(begin, 0);
    for (int i = 1; i <= kMaxStreams; ++i) Await(i, begin);
    enqueue();
    for (int i = 1; i <= kMaxStreams; ++i) {
      Event lane(driver_);
      Record(lane, i);
      Await(0, lane);
    }
    Record(end, 0);
    Check(driver_, driver_.EventSynchronize(end.get()), "cuEventSynchronize");
    float elapsed_ms = 0;
    Check(driver_, driver_.EventElapsedTime(&elapsed_ms, begin.get(), end.get()),
          "cuEventElapsedTime");
    return 1e3 * elapsed_ms;
  }

  // Returns the median time of each program; the programs take turns.
  std::vector<double> Times(const std::vector<Enqueue>& programs) {
    std::vector<std::vector<double>> times(programs.size());
    for (const Enqueue& program : programs) Once(program);
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < programs.size(); ++i) {
        times[i].push_back(Once(programs[i]));
      }
    }
    std::vector<double> medians;
    for (auto& one : times) medians.push_back(Median(one));
    return medians;
  }

  void Record(const Event& event, int stream) {
    Check(driver_, driver_.EventRecord(event.get(), streams_[stream].get()),
          "cuEventRecord");
  }
  void Await(int stream, const Event& event) {
    Check(driver_, driver_.StreamWaitEvent(streams_[stream].get(), event.get(), 0),
          "cuStreamWaitEvent");
  }

  // Returns the product C [m, n] = A [m, k] B [k, n] of dense bf16 matrices.
  static GemmProblem Product(
      int64_t m, int64_t n, int64_t k, CUdeviceptr a, CUdeviceptr b, CUdeviceptr c) {
    const auto tensor = [](CUdeviceptr data, int64_t rows, int64_t features) {
      return Tensor{DType::kBF16, 1, rows, features,
                    reinterpret_cast<std::byte*>(data)};
    };
    OperandSegments x(DType::kBF16);
    OperandSegments w(DType::kBF16);
    ResultSegments y(DType::kBF16);
    x.AddOuter(m);
    x.AddInner(k);
    x.Append(RowsOf(tensor(a, m, k), 0, 0));
    w.AddOuter(n);
    w.AddInner(k);
    w.Append(KernelOf(tensor(b, k, n), false));
    y.AddRows(m);
    y.AddColumns(n);
    y.Append(RowsOf(tensor(c, m, n), 0, 0));
    return Problem(1, std::move(x), std::move(w), std::move(y));
  }

  GemmWorkspace WorkspaceOf(int stream) const {
    return {workspaces_[stream].get(), workspaces_[stream].size_bytes()};
  }

  void Multiply(const GemmProblem& problem,
                int stream,
                int sm_target = 0,
                int algorithm = 0) {
    gpu_.gemm().Enqueue(problem, {sm_target, false, algorithm}, WorkspaceOf(stream),
                        streams_[stream].get());
  }

  void Copy(CUdeviceptr to, CUdeviceptr from, int64_t size_bytes, int stream) {
    Check(driver_, driver_.MemcpyAsync(to, from, size_bytes, streams_[stream].get()),
          "cuMemcpyAsync");
  }

  // Enqueues a copy by a kernel with `num_blocks` thread blocks, as calls with use_ce =
  // false send.
  void CopyByKernel(CUdeviceptr to,
                    CUdeviceptr from,
                    int64_t size_bytes,
                    int stream,
                    int num_blocks) {
    const CopyParams rows{from, to, 1, size_bytes, size_bytes, size_bytes, 0};
    gpu_.sums().Copy(streams_[stream].get(), rows, num_blocks, 0);
  }

  void Ceilings() {
    const int64_t n = 8192;
    const DeviceMemory a = Random(2 * n * n), b = Random(2 * n * n);
    const DeviceMemory c(driver_, 2 * n * n);
    const GemmProblem problem = Product(n, n, n, a.get(), b.get(), c.get());
    // The first algorithm is the one that calls use unless they are tuned.
    std::vector<Enqueue> programs;
    for (int i = 0; i < gpu_.gemm().NumAlgorithms(problem, {}, WorkspaceOf(0)); ++i) {
      programs.push_back([&, i] { Multiply(problem, 0, 0, i); });
    }
    for (const double time : Times(programs)) {
      Show("product 8192^3 bf16, algorithm " + std::to_string(figures_.size()) +
               ", TFLOP/s",
           2e-6 * n * n * n / time);
    }
    const int64_t size = 1024 * kMiB;
    const DeviceMemory from = Random(size), to(driver_, size);
    copy_tbs_ = 2e-6 * size / Times({[&] { Copy(to.get(), from.get(), size, 0); }})[0];
    Show("copy of 1 GiB, read and written, TB/s", copy_tbs_);
  }

  // Measures products as in AG+GEMM and GEMM+RS: P chunks of rows, which take turns on
  // the streams.
  void Chunked(const Layer& layer) {
    const int64_t m = layer.m, n = layer.n, k = layer.k, rows = m / layer.num_ranks;
    const DeviceMemory a = Random(2 * m * k), b = Random(2 * k * n);
    const DeviceMemory c(driver_, 2 * m * n);
    const GemmProblem whole = Product(m, n, k, a.get(), b.get(), c.get());
    std::vector<GemmProblem> chunks;
    for (int i = 0; i < layer.num_ranks; ++i) {
      chunks.push_back(Product(rows, n, k, a.get() + 2 * i * rows * k, b.get(),
                               c.get() + 2 * i * rows * n));
    }
    std::vector<Enqueue> programs = {[&] { Multiply(whole, 0); }};
    std::vector<std::string> names;
    for (int num_streams = 1; num_streams <= kMaxStreams; ++num_streams) {
      for (int margin : {0, 2}) {
        const int target = margin == 0 ? 0 : gpu_.num_sms() - margin;
        names.push_back(std::to_string(num_streams) + " streams, margin " +
                        std::to_string(margin));
        programs.push_back([&, num_streams, target] {
          for (size_t i = 0; i < chunks.size(); ++i) {
            Multiply(chunks[i], 1 + static_cast<int>(i) % num_streams, target);
          }
        });
      }
    }
    const auto times = Times(programs);
    double best = times[1] / times[0];
    for (size_t i = 0; i < names.size(); ++i) {
      best = std::min(best, times[1 + i] / times[0]);
      Show("chunked over one product, " + layer.name + ", " + names[i],
           times[1 + i] / times[0]);
    }
    verdicts_.push_back({"chunked over one product, " + layer.name + ", best knobs",
                         best, layer.most_ratio, false});
  }

  // Measures copies within this GPU; copies to a peer are not measured.
  void Copies() {
    constexpr int kCopies = 16;
    for (const int64_t size : {kMiB / 16, kMiB, 32 * kMiB}) {
      const DeviceMemory from = Random(size), to(driver_, size);
      std::vector<std::string> names = {"the copy engine"};
      std::vector<Enqueue> programs = {[&] {
        for (int i = 0; i < kCopies; ++i) Copy(to.get(), from.get(), size, 0);
      }};
      for (const int num_blocks : {4, 16, 32}) {
        names.push_back(std::to_string(num_blocks) + " thread blocks");
        programs.push_back([&, num_blocks] {
          for (int i = 0; i < kCopies; ++i) {
            CopyByKernel(to.get(), from.get(), size, 0, num_blocks);
          }
        });
      }
      const auto times = Times(programs);
      for (size_t i = 0; i < names.size(); ++i) {
        Show("copy of " + std::to_string(size / 1024) + " KiB, one of many, by " +
                 names[i] + ", us",
             times[i] / kCopies);
      }
    }
  }

  void Beside() {
    const Layer& layer = kLayers[2];
    const int64_t m = layer.m, n = layer.n, k = layer.k;
    const DeviceMemory a = Random(2 * m * k), b = Random(2 * k * n);
    const DeviceMemory c(driver_, 2 * m * n), gathered(driver_, 2 * m * k);
    const GemmProblem whole = Product(m, n, k, a.get(), b.get(), c.get());
    std::vector<std::string> names = {"a copy of its operand"};
    std::vector<Enqueue> programs = {[&] { Multiply(whole, 1); },
                                     [&] {
                                       Copy(gathered.get(), a.get(), 2 * m * k, 2);
                                       Multiply(whole, 1);
                                     }};
    for (const int num_blocks : {4, 16}) {
      names.push_back("the same by " + std::to_string(num_blocks) + " thread blocks");
      programs.push_back([&, num_blocks] {
        CopyByKernel(gathered.get(), a.get(), 2 * m * k, 2, num_blocks);
        Multiply(whole, 1, gpu_.num_sms() - num_blocks);
      });
    }
    const auto times = Times(programs);
    for (size_t i = 0; i < names.size(); ++i) {
      Show("product beside " + names[i] + " over the product, " + layer.name,
           times[1 + i] / times[0]);
    }
  }

  // Measures the device time of a signal and a wait for it, at the highest stream
  // priority, while GEMMs leave some multiprocessors free.
  void Handshakes() {
    constexpr int kGemms = 8;
    constexpr int kHandshakes = 32;
    int least = 0, greatest = 0;
    Check(driver_, driver_.CtxGetStreamPriorityRange(&least, &greatest),
          "cuCtxGetStreamPriorityRange");
    const Stream communication(driver_, greatest);
    const CUstream stream = communication.get();
    const int64_t m = 1024, n = 7168, k = 8192;  // a chunk of 70B fc1 at P = 8
    const DeviceMemory a = Random(2 * m * k), b = Random(2 * k * n);
    const DeviceMemory c(driver_, 2 * m * n);
    const GemmProblem chunk = Product(m, n, k, a.get(), b.get(), c.get());
    for (const int margin : {0, 2, 4, 8, 16}) {
      const int target = margin == 0 ? 0 : gpu_.num_sms() - margin;
      std::vector<double> handshakes, gemms, alone;
      for (int round = 0; round <= kRounds; ++round) {
        alone.push_back(Once([&] {
          for (int i = 0; i < kGemms; ++i) Multiply(chunk, 0, target);
        }));
        Event begin(driver_, CU_EVENT_DEFAULT);
        Event end(driver_, CU_EVENT_DEFAULT);
        gemms.push_back(Once([&] {
          Multiply(chunk, 0, target);
          Event running(driver_);
          Record(running, 0);  // after the first GEMM, so that the rest fills the GPU
          Check(driver_, driver_.StreamWaitEvent(stream, running.get(), 0),
                "cuStreamWaitEvent");
          for (int i = 1; i < kGemms; ++i) Multiply(chunk, 0, target);
          Check(driver_, driver_.EventRecord(begin.get(), stream), "cuEventRecord");
          for (int i = 0; i < kHandshakes; ++i) Handshake(stream);
          Check(driver_, driver_.EventRecord(end.get(), stream), "cuEventRecord");
        }));
        Synchronize();
        float elapsed_ms = 0;
        Check(driver_, driver_.EventElapsedTime(&elapsed_ms, begin.get(), end.get()),
              "cuEventElapsedTime");
        handshakes.push_back(1e3 * elapsed_ms / kHandshakes);
      }
      const std::string suffix = ", margin " + std::to_string(margin);
      Show("signal and wait beside GEMMs" + suffix + ", us", Median(handshakes));
      Show("GEMMs beside them over the GEMMs alone" + suffix,
           Median(gemms) / Median(alone));
      Show("eight GEMMs 1024x7168x8192" + suffix + ", us", Median(alone));
    }
  }

  // Enqueues a signal to this rank itself, and a wait for it.
  void Handshake(CUstream stream) {
    const CUdeviceptr page = flags_page_.get();
    const RankWords own{page, page + 128, page + 256, error_.device()};
    SignalParams signal{};
    signal.own = own;
    signal.num_targets = 1;
    signal.targets[0] = {page + 384, page + 512};
    WaitParams wait{};
    wait.own = own;
    wait.flag = wait.announced = page + 384;
    wait.ahead = 1;
    wait.timeout_ns = 1'000'000'000;
    gpu_.flags().Signal(stream, signal);
    gpu_.flags().Wait(stream, wait);
  }

  // Measures the reduction of GEMM+RS, which sums P bf16 partials in f32.
  void MatrixSum() {
    const int64_t rows = 1024, columns = 8192, num_parts = 8;
    const DeviceMemory parts = Random(2 * num_parts * rows * columns);
    const DeviceMemory out(driver_, 2 * rows * columns);
    SumParams params{};
    params.num_parts = num_parts;
    params.rows = rows;
    params.columns = columns;
    params.out = {out.get(), columns, DType::kBF16};
    for (int64_t i = 0; i < num_parts; ++i) {
      params.parts[i] = {parts.get() + 2 * i * rows * columns, columns, DType::kBF16};
    }
    // Measures 32 sums in a row, because the data of one fit in the GPU's caches.
    const auto times = Times({[&] {
      for (int i = 0; i < 32; ++i) gpu_.sums().Sum(streams_[0].get(), params);
    }});
    const double bytes = 2.0 * (num_parts + 1) * rows * columns * 32;
    const double tbs = 1e-6 * bytes / times[0];
    Show("sum of 8 parts, read and written, TB/s", tbs);
    verdicts_.push_back(
        {"sum of 8 parts over the copy's rate", tbs / copy_tbs_, 0.85, true});
  }

  // Returns the average host time of a call, in microseconds, over many calls in a row.
  double HostTime(const Enqueue& enqueue) {
    constexpr int kCalls = 200;
    std::vector<double> times;
    for (int round = 0; round < kRounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kCalls; ++i) enqueue();
      const std::chrono::duration<double, std::micro> elapsed =
          std::chrono::steady_clock::now() - begin;
      times.push_back(elapsed.count() / kCalls);
      Synchronize();
    }
    return Median(times);
  }

  void Launch() {
    const int64_t n = 256;
    const DeviceMemory a = Random(2 * n * n), b = Random(2 * n * n);
    const DeviceMemory c(driver_, 2 * n * n);
    const GemmProblem small = Product(n, n, n, a.get(), b.get(), c.get());
    const CUdeviceptr page = flags_page_.get();
    const RankWords own{page, page + 128, page + 256, error_.device()};
    SignalParams signal{};
    signal.own = own;
    signal.num_targets = 1;
    signal.targets[0] = {page + 384, page + 512};
    WaitParams wait{};
    wait.own = own;
    wait.flag = wait.announced = page + 384;
    wait.ahead = 1;
    wait.timeout_ns = 1'000'000'000;
    const CUstream stream = streams_[0].get();
    Show("host time of a small product, us", HostTime([&] { Multiply(small, 0); }));
    SumParams sum{};
    sum.num_parts = 2;
    sum.rows = sum.columns = n;
    sum.out = {c.get(), n, DType::kBF16};
    sum.parts[0] = {a.get(), n, DType::kBF16};
    sum.parts[1] = {b.get(), n, DType::kBF16};
    Show("host time of a sum, us", HostTime([&] { gpu_.sums().Sum(stream, sum); }));
    Show("host time of a copy by the copy engine, us",
         HostTime([&] { Copy(c.get(), a.get(), 2 * n * n, 0); }));
    Show("host time of a copy by a kernel, us",
         HostTime([&] { CopyByKernel(c.get(), a.get(), 2 * n * n, 0, 0); }));
    Show("host time of a signal, us",
         HostTime([&] { gpu_.flags().Signal(stream, signal); }));
    Show("host time of a wait, us", HostTime([&] { gpu_.flags().Wait(stream, wait); }));
    const auto times = Times({[&] {
      for (int i = 0; i < 100; ++i) {
        gpu_.flags().Signal(stream, signal);
        gpu_.flags().Wait(stream, wait);
      }
    }});
    Show("device time of a signal and a wait for it, us", times[0] / 100);
  }

  void Show(const std::string& name, double value) {
    figures_.emplace_back(name, value);
    std::cout << std::left << std::setw(76) << name << std::setprecision(4) << value
              << std::endl;
  }

  const Driver& driver_;
  Gpu gpu_;
  const ScopedContext current_;
  DeviceMemory flags_page_;
  HostMemory error_;
  HostMemory block_;
  std::vector<Stream> streams_;
  std::vector<DeviceMemory> workspaces_;  // [stream]
  double copy_tbs_ = 0;
  std::vector<std::pair<std::string, double>> figures_;
  std::vector<Verdict> verdicts_;
};

void Write(const char* path, const Bench& bench) {
  std::ofstream file(path);
  file << "{\n \"figures\": {";
  const char* comma = "\n";
  for (const auto& [name, value] : bench.figures()) {
    file << comma << "  \"" << name << "\": " << value;
    comma = ",\n";
  }
  file << "\n },\n \"verdicts\": [";
  comma = "\n";
  for (const Verdict& verdict : bench.verdicts()) {
    file << comma << "  {\"claim\": \"" << verdict.claim
         << "\", \"value\": " << verdict.value << ", \"limit\": " << verdict.limit
         << ", \"holds\": " << (verdict.Holds() ? "true" : "false") << "}";
    comma = ",\n";
  }
  file << "\n ]\n}\n";
  if (!file) throw Error(std::string("cannot write ") + path);
}

int Main(int argc, char** argv) {
  const Driver* driver = nullptr;
  try {
    driver = &SystemDriver();
  } catch (const UnsupportedError& error) {
    std::cout << "gpu_bench: not run: " << error.what() << std::endl;
    return kNoGpu;
  }
  const std::vector<std::string> directories(argv + std::min(argc, 2), argv + argc);
  const CublasLt library = LoadCublasLt(directories);
  std::cout << "cuBLASLt " << library.version << ", " << library.path << "\n\n";
  Bench bench(*driver, library);
  bench.Run();
  std::cout << std::endl;
  for (const Verdict& verdict : bench.verdicts()) {
    std::cout << (verdict.Holds() ? "holds  " : "MISSED ") << verdict.claim << ": "
              << verdict.value << (verdict.at_least ? " (at least " : " (at most ")
              << verdict.limit << ")" << std::endl;
  }
  if (argc > 1) Write(argv[1], bench);
  return 0;
}

}  // namespace jax_ub

int main(int argc, char** argv) {
  try {
    return jax_ub::Main(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "gpu_bench: " << error.what() << std::endl;
    return 1;
  }
}
