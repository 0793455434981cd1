// What the benchmarks of a GPU share: random operands, GEMMs, and times of work that is
// enqueued on streams, eager or replayed as a graph.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/gpu.h"
#include "engine/segments.h"
#include "gemm/cuda/cublaslt.h"
#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "platform/error.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

inline constexpr int kRounds = 15;
inline constexpr int64_t kMiB = int64_t{1} << 20;

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The words of a rank that signals to itself, and a flag.
class OwnFlags {
 public:
  // Zeroes the words on `stream`.
  OwnFlags(const Driver& driver, CUstream stream)
      : page_(driver, 4096), error_(driver, sizeof(ErrorRecord)) {
    Check(driver, driver.MemsetD8Async(page_.get(), 0, 4096, stream),
          "cuMemsetD8Async");
  }

  RankWords words() const {
    return {page_.get(), page_.get() + 128, page_.get() + 256, error_.device()};
  }
  const ErrorRecord& error() const {
    return *static_cast<const ErrorRecord*>(error_.get());
  }
  SignalParams Signal() const {
    SignalParams signal{};
    signal.own = words();
    signal.signals = {1, {{flag(), page_.get() + 512}}};
    return signal;
  }
  WaitParams Wait(uint64_t timeout_ns = 1'000'000'000) const {
    WaitParams wait{};
    wait.waiting.own = words();
    wait.waiting.timeout_ns = timeout_ns;
    wait.ahead = 1;
    wait.num_flags = 1;
    wait.flags[0].flag = wait.flags[0].announced = flag();
    return wait;
  }
  EndParams End() const {
    EndParams end{};
    end.own = words();
    return end;
  }

 private:
  CUdeviceptr flag() const { return page_.get() + 384; }

  DeviceMemory page_;
  HostMemory error_;
};

struct Verdict {
  std::string claim;
  double value;
  double limit;
  bool at_least;  // else at most
  bool Holds() const { return at_least ? value >= limit : value <= limit; }
};

// The GPU, streams and figures of a benchmark. Stream 0 joins the other streams.
class GpuBench {
 public:
  using Enqueue = std::function<void()>;
  static constexpr int kMaxStreams = 3;

  GpuBench(const Driver& driver, const CublasLt& library)
      : driver_(driver), gpu_(driver, library, 0), current_(driver, gpu_.context()) {
    for (int i = 0; i <= kMaxStreams; ++i) {
      streams_.emplace_back(driver);
      workspaces_.emplace_back(driver, 2 * kLibraryWorkspaceBytes);
    }
    FillBlock();
  }

  const std::vector<Verdict>& verdicts() const { return verdicts_; }

  // Writes figures and verdicts as JSON.
  void WriteJson(const char* path) const {
    std::ofstream file(path);
    file << "{\n \"figures\": {";
    const char* comma = "\n";
    for (const auto& [name, value] : figures_) {
      file << comma << "  \"" << name << "\": " << value;
      comma = ",\n";
    }
    file << "\n },\n \"verdicts\": [";
    comma = "\n";
    for (const Verdict& verdict : verdicts_) {
      file << comma << "  {\"claim\": \"" << verdict.claim
           << "\", \"value\": " << verdict.value << ", \"limit\": " << verdict.limit
           << ", \"holds\": " << (verdict.Holds() ? "true" : "false") << "}";
      comma = ",\n";
    }
    file << "\n ]\n}\n";
    if (!file) throw Error(std::string("cannot write ") + path);
  }

 protected:
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

  DeviceMemory RandomMemory(int64_t size_bytes) {
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

  // Returns the microseconds from the begin to the end of work on the streams. Stream 0
  // starts and ends the work, and the other streams fork from it and join it.
  double Once(const Enqueue& enqueue) {
    Event begin(driver_, CU_EVENT_DEFAULT);
    Event end(driver_, CU_EVENT_DEFAULT);
    Record(begin, stream(0));
    enqueue();
    Record(end, stream(0));
    return Microseconds(begin, end);
  }

  double Microseconds(const Event& begin, const Event& end) {
    Check(driver_, driver_.EventSynchronize(end.get()), "cuEventSynchronize");
    float elapsed_ms = 0;
    Check(driver_, driver_.EventElapsedTime(&elapsed_ms, begin.get(), end.get()),
          "cuEventElapsedTime");
    return 1e3 * elapsed_ms;
  }

  // Enqueues work on all streams: they wait for stream 0, which waits for them after it.
  void OnAllStreams(const Enqueue& enqueue) {
    Event begin(driver_);
    Record(begin, stream(0));
    for (int i = 1; i <= kMaxStreams; ++i) Await(stream(i), begin);
    enqueue();
    for (int i = 1; i <= kMaxStreams; ++i) {
      Event lane(driver_);
      Record(lane, stream(i));
      Await(stream(0), lane);
    }
  }

  // Returns the median time of each program, enqueued by the host. The programs take
  // turns.
  std::vector<double> Times(const std::vector<Enqueue>& programs) {
    std::vector<Enqueue> forked;
    for (const Enqueue& program : programs) {
      forked.push_back([&] { OnAllStreams(program); });
    }
    return MediansInTurns(forked);
  }

  // Returns the median time of each program, replayed as a graph, as XLA's command
  // buffers are. The host enqueues nothing meanwhile.
  std::vector<double> ReplayTimes(const std::vector<Enqueue>& programs) {
    std::vector<CUgraphExec> graphs;
    std::vector<Enqueue> replays;
    for (const Enqueue& program : programs) {
      OnAllStreams(program);  // plans what a capture must not plan
      Synchronize();
      graphs.push_back(Capture(stream(0), [&] { OnAllStreams(program); }));
      replays.push_back([this, graph = graphs.back()] { Launch(graph, stream(0)); });
    }
    const std::vector<double> medians = MediansInTurns(replays);
    for (const CUgraphExec graph : graphs) driver_.GraphExecDestroy(graph);
    return medians;
  }

  // Returns a graph of the work that a program enqueues on `stream`, and on streams that
  // fork from it and join it.
  CUgraphExec Capture(CUstream stream, const Enqueue& program) {
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    Check(driver_,
          driver_.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
          "cuStreamBeginCapture");
    program();
    Check(driver_, driver_.StreamEndCapture(stream, &graph), "cuStreamEndCapture");
    Check(driver_,
          driver_.GraphInstantiate(&executable, graph,
                                   CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY),
          "cuGraphInstantiateWithFlags");
    Check(driver_, driver_.GraphDestroy(graph), "cuGraphDestroy");
    return executable;
  }
  void Launch(CUgraphExec graph, CUstream stream) {
    Check(driver_, driver_.GraphLaunch(graph, stream), "cuGraphLaunch");
  }

  void Record(const Event& event, CUstream stream) {
    Check(driver_, driver_.EventRecord(event.get(), stream), "cuEventRecord");
  }
  void Await(CUstream stream, const Event& event) {
    Check(driver_, driver_.StreamWaitEvent(stream, event.get(), 0),
          "cuStreamWaitEvent");
  }
  CUstream stream(int i) const { return streams_[i].get(); }

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

  GemmWorkspace WorkspaceOf(int lane) const {
    return {workspaces_[lane].get(), workspaces_[lane].size_bytes()};
  }

  // Enqueues a GEMM on stream `lane`.
  void Multiply(const GemmProblem& problem,
                int lane,
                int sm_target = 0,
                int algorithm = 0) {
    const GemmOptions options{.sm_target = sm_target, .algorithm = algorithm};
    gpu_.gemm().Enqueue(problem, options, WorkspaceOf(lane), stream(lane));
  }

  void Show(const std::string& name, double value) {
    figures_.emplace_back(name, value);
    std::cout << std::left << std::setw(76) << name << std::setprecision(4) << value
              << std::endl;
  }

  const Driver& driver_;
  Gpu gpu_;
  std::vector<Verdict> verdicts_;
  std::vector<std::pair<std::string, double>> figures_;

 private:
  std::vector<double> MediansInTurns(const std::vector<Enqueue>& programs) {
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

  const ScopedContext current_;
  HostMemory block_;
  std::vector<Stream> streams_;
  std::vector<DeviceMemory> workspaces_;  // [stream]
};

// Runs a benchmark, prints its verdicts, and writes its figures to the file that the
// first argument names. The other arguments are directories of libraries. Returns the
// exit status, which is 77 if there is no GPU.
template <typename Bench>
int RunGpuBench(const char* name, int argc, char** argv) try {
  constexpr int kNoGpu = 77;
  const Driver* driver = nullptr;
  try {
    driver = &SystemDriver();
  } catch (const UnsupportedError& error) {
    std::cout << name << ": not run: " << error.what() << std::endl;
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
  if (argc > 1) bench.WriteJson(argv[1]);
  return 0;
} catch (const std::exception& error) {
  std::cerr << name << ": " << error.what() << std::endl;
  return 1;
}

}  // namespace jax_ub
