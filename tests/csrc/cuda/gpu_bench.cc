// gpu_bench [FILE.json [LIBRARY DIRECTORY ...]]: what one GPU can show of the CUDA engine's
// parts, with its peers in the same run, and a verdict for each claim. Exits with 77 where
// there is no GPU.
//
//   ceilings   the plain product through CudaGemm; a copy by the copy engine
//   chunked    the products of a rank in P chunks on 1 to 3 streams against one product
//   copies     messages by the copy engine and by kernels of 4 to 32 thread blocks
//   moved      a product while its operand is moved, by the copy engine or by kernels that
//              it leaves multiprocessors to, against the product alone
//   handshakes signals and waits at the highest priority while GEMMs use all but 0 to 16
//              multiprocessors
//   sum        the reduction of P parts against the copy's rate
//   launch     host time to enqueue a product, a sum, copies, a signal and a wait
//
// Operands are random: products of zeros are faster than any that matter. Every figure is
// the median of kRounds rounds in which what is compared takes turns.

#include "cuda/gpu_bench.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace jax_ub {

namespace {

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

class PartsBench : public GpuBench {
 public:
  PartsBench(const Driver& driver, const CublasLt& library)
      : GpuBench(driver, library), own_flags_(driver, stream(0)) {
    Synchronize();
  }

  void Run() {
    Ceilings();
    for (const Layer& layer : kLayers) Chunked(layer);
    Copies();
    NextToCopies();
    Handshakes();
    MatrixSum();
    HostTimes();
  }

 private:
  void Copy(CUdeviceptr to, CUdeviceptr from, int64_t size_bytes, int lane) {
    Check(driver_, driver_.MemcpyAsync(to, from, size_bytes, stream(lane)),
          "cuMemcpyAsync");
  }

  // Enqueues a copy by a kernel with `num_blocks` thread blocks, as calls with use_ce =
  // false send.
  void CopyByKernel(
      CUdeviceptr to, CUdeviceptr from, int64_t size_bytes, int lane, int num_blocks) {
    const CopyParams rows{from, to, 1, size_bytes, size_bytes, size_bytes, 0};
    gpu_.sums().Copy(stream(lane), rows, num_blocks, 0);
  }

  void Ceilings() {
    const int64_t n = 8192;
    const DeviceMemory a = RandomMemory(2 * n * n), b = RandomMemory(2 * n * n);
    const DeviceMemory c(driver_, 2 * n * n);
    const GemmProblem problem = Product(n, n, n, a.get(), b.get(), c.get());
    // The first algorithm is the one that calls use unless they are tuned.
    std::vector<Enqueue> programs;
    for (int i = 0; i < gpu_.gemm().Prepare(problem, {}, WorkspaceOf(0)); ++i) {
      programs.push_back([&, i] { Multiply(problem, 0, 0, i); });
    }
    for (const double time : Times(programs)) {
      Show("product 8192^3 bf16, algorithm " + std::to_string(figures_.size()) +
               ", TFLOP/s",
           2e-6 * n * n * n / time);
    }
    const int64_t size = 1024 * kMiB;
    const DeviceMemory from = RandomMemory(size), to(driver_, size);
    copy_tbs_ = 2e-6 * size / Times({[&] { Copy(to.get(), from.get(), size, 0); }})[0];
    Show("copy of 1 GiB, read and written, TB/s", copy_tbs_);
  }

  // Measures products as in AG+GEMM and GEMM+RS: P chunks of rows, which take turns on
  // the streams.
  void Chunked(const Layer& layer) {
    const int64_t m = layer.m, n = layer.n, k = layer.k, rows = m / layer.num_ranks;
    const DeviceMemory a = RandomMemory(2 * m * k), b = RandomMemory(2 * k * n);
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
      // GEMMs that run at the same time may plan for a share of the multiprocessors.
      std::vector<int> targets = {0, gpu_.num_sms() - 4};
      if (num_streams > 1) targets.push_back(gpu_.num_sms() / num_streams);
      for (const int target : targets) {
        names.push_back(std::to_string(num_streams) + " streams, target " +
                        std::to_string(target));
        programs.push_back([&, num_streams, target] {
          for (size_t i = 0; i < chunks.size(); ++i) {
            Multiply(chunks[i], 1 + static_cast<int>(i) % num_streams, target);
          }
        });
      }
    }
    const auto times = ReplayTimes(programs);
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
      const DeviceMemory from = RandomMemory(size), to(driver_, size);
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
      const auto times = ReplayTimes(programs);
      for (size_t i = 0; i < names.size(); ++i) {
        Show("copy of " + std::to_string(size / 1024) + " KiB, one of many, by " +
                 names[i] + ", us",
             times[i] / kCopies);
      }
    }
  }

  void NextToCopies() {
    const Layer& layer = kLayers[2];
    const int64_t m = layer.m, n = layer.n, k = layer.k;
    const DeviceMemory a = RandomMemory(2 * m * k), b = RandomMemory(2 * k * n);
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
    const auto times = ReplayTimes(programs);
    for (size_t i = 0; i < names.size(); ++i) {
      Show("product next to " + names[i] + " over the product, " + layer.name,
           times[1 + i] / times[0]);
    }
  }

  // Measures signals and waits on a stream of the highest priority while GEMMs run that
  // leave some multiprocessors free. Both are replayed, so the host delays neither.
  void Handshakes() {
    constexpr int kGemms = 8;
    constexpr int kHandshakes = 32;
    int least = 0, greatest = 0;
    Check(driver_, driver_.CtxGetStreamPriorityRange(&least, &greatest),
          "cuCtxGetStreamPriorityRange");
    const Stream urgent(driver_, greatest);
    const CUgraphExec handshakes = Capture(urgent.get(), [&] {
      for (int i = 0; i < kHandshakes; ++i) Handshake(urgent.get());
    });
    const auto time_handshakes = [&] {
      Event begin(driver_, CU_EVENT_DEFAULT);
      Event end(driver_, CU_EVENT_DEFAULT);
      Record(begin, urgent.get());
      Launch(handshakes, urgent.get());
      Record(end, urgent.get());
      return Microseconds(begin, end) / kHandshakes;
    };
    const auto show = [&](const std::string& where, const auto& prepare) {
      std::vector<double> times;
      for (int round = 0; round <= kRounds; ++round) {
        prepare();
        times.push_back(time_handshakes());
        Synchronize();
      }
      Show("signal and wait, " + where + ", us", Median(times));
    };
    show("alone", [] {});
    for (const Layer& layer : {kLayers[1], kLayers[2]}) {
      const int64_t m = layer.m / layer.num_ranks, n = layer.n, k = layer.k;
      const DeviceMemory a = RandomMemory(2 * m * k), b = RandomMemory(2 * k * n);
      const DeviceMemory c(driver_, 2 * m * n);
      const GemmProblem chunk = Product(m, n, k, a.get(), b.get(), c.get());
      for (const int margin : {0, 2, 4, 8, 16}) {
        const int target = margin == 0 ? 0 : gpu_.num_sms() - margin;
        const auto multiply = [&] {
          for (int i = 0; i < kGemms; ++i) Multiply(chunk, 0, target);
        };
        multiply();
        Synchronize();
        const CUgraphExec gemms = Capture(stream(0), multiply);
        const std::string suffix = layer.name + ", margin " + std::to_string(margin);
        show("next to chunks of " + suffix, [&] { Launch(gemms, stream(0)); });
        driver_.GraphExecDestroy(gemms);
      }
    }
    driver_.GraphExecDestroy(handshakes);
  }

  // Enqueues a signal to this rank itself, and a wait for it.
  void Handshake(CUstream stream) {
    gpu_.flags().Signal(stream, own_flags_.Signal());
    gpu_.flags().Wait(stream, own_flags_.Wait());
  }

  // Measures the reduction of GEMM+RS, which sums P bf16 partials in f32.
  void MatrixSum() {
    const int64_t rows = 1024, columns = 8192, num_parts = 8;
    const DeviceMemory parts = RandomMemory(2 * num_parts * rows * columns);
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
      for (int i = 0; i < 32; ++i) gpu_.sums().Sum(stream(0), params);
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

  void HostTimes() {
    const int64_t n = 256;
    const DeviceMemory a = RandomMemory(2 * n * n), b = RandomMemory(2 * n * n);
    const DeviceMemory c(driver_, 2 * n * n);
    const GemmProblem small = Product(n, n, n, a.get(), b.get(), c.get());
    const SignalParams signal = own_flags_.Signal();
    const WaitParams wait = own_flags_.Wait();
    const CUstream first = stream(0);
    Show("host time of a small product, us", HostTime([&] { Multiply(small, 0); }));
    SumParams sum{};
    sum.num_parts = 2;
    sum.rows = sum.columns = n;
    sum.out = {c.get(), n, DType::kBF16};
    sum.parts[0] = {a.get(), n, DType::kBF16};
    sum.parts[1] = {b.get(), n, DType::kBF16};
    Show("host time of a sum, us", HostTime([&] { gpu_.sums().Sum(first, sum); }));
    Show("host time of a copy by the copy engine, us",
         HostTime([&] { Copy(c.get(), a.get(), 2 * n * n, 0); }));
    Show("host time of a copy by a kernel, us",
         HostTime([&] { CopyByKernel(c.get(), a.get(), 2 * n * n, 0, 0); }));
    Show("host time of a signal, us",
         HostTime([&] { gpu_.flags().Signal(first, signal); }));
    Show("host time of a wait, us", HostTime([&] { gpu_.flags().Wait(first, wait); }));
  }

  OwnFlags own_flags_;
  double copy_tbs_ = 0;
};

}  // namespace

}  // namespace jax_ub

int main(int argc, char** argv) {
  return jax_ub::RunGpuBench<jax_ub::PartsBench>("gpu_bench", argc, argv);
}
