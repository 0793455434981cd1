// Captures calls in CUDA graphs and replays them, as XLA's command buffers do.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/cuda_calls.h"
#include "cuda/emulated_graphs.h"

namespace jax_ub {

// Contains a command buffer for each local rank of a call. As XLA does, it captures the
// call on a separate stream, on all devices at once, once for each set of addresses,
// and keeps the graphs. The first graph becomes a child node of a larger graph, which
// is instantiated; if the addresses change, the child node is updated from the graph
// for these addresses.
class CapturedCalls {
 public:
  CapturedCalls(Gpus& gpus, GpuCalls& calls) : gpus_(gpus), calls_(calls) {
    for (const int rank : calls.local_ranks()) buffers_[rank] = {};
    OnEachRank([&](int rank, Buffer& buffer) {
      CHECK_EQ(EmulatedGraphCreate(&buffer.whole, 0), CUDA_SUCCESS);
      CHECK_EQ(EmulatedGraphAddChildGraphNode(&buffer.node, buffer.whole, nullptr, 0,
                                              GraphOf(rank, 0)),
               CUDA_SUCCESS);
      CHECK_EQ(
          gpus_.driver.GraphInstantiate(&buffer.exec, buffer.whole,
                                        CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY),
          CUDA_SUCCESS);
    });
  }
  ~CapturedCalls() {
    for (const auto& [rank, buffer] : buffers_) {
      gpus_.driver.GraphExecDestroy(buffer.exec);
      gpus_.driver.GraphDestroy(buffer.whole);
      for (const auto& [place, graph] : buffer.graphs) gpus_.driver.GraphDestroy(graph);
    }
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  // Moves the operands and results to memory number `place`, and updates the graphs.
  void Move(size_t place) {
    calls_.Move(place);
    OnEachRank([&](int rank, Buffer& buffer) {
      const CUresult result = EmulatedGraphExecChildGraphNodeSetParams(
          buffer.exec, buffer.node, GraphOf(rank, place));
      if (result == CUDA_SUCCESS) return;
      check::Fail(__FILE__, __LINE__, NameOf(calls_.site.attributes()),
                  ": its graph cannot be updated");
    });
  }

  // Returns the number of nodes that the call of a rank captured first.
  int64_t NumNodes(int rank) {
    size_t count = 0;
    CHECK_EQ(EmulatedGraphGetNodes(buffers_.at(rank).graphs.at(0), &count),
             CUDA_SUCCESS);
    return static_cast<int64_t>(count);
  }

  void Launch(int rank) {
    const ScopedContext current = Current(rank);
    CHECK_EQ(gpus_.driver.GraphLaunch(buffers_.at(rank).exec,
                                      gpus_.stream(calls_.ordinal(rank))),
             CUDA_SUCCESS);
  }
  void LaunchAll() {
    for (const int rank : calls_.local_ranks()) Launch(rank);
  }

 private:
  struct Buffer {
    CUgraph whole = nullptr;
    CUgraphNode node = nullptr;
    CUgraphExec exec = nullptr;
    std::map<size_t, CUgraph> graphs;  // by place
  };

  ScopedContext Current(int rank) const {
    return {gpus_.driver, gpus_.context(calls_.ordinal(rank))};
  }

  // Calls `function(rank, buffer)` for each local rank, in one thread per device.
  template <typename Function>
  void OnEachRank(const Function& function) {
    std::vector<std::thread> threads;
    for (auto& [rank, buffer] : buffers_) {
      threads.emplace_back([this, &function, &buffer, rank] {
        calls_.Initialize(rank);
        const ScopedContext current = Current(rank);
        function(rank, buffer);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Returns the graph for these addresses, and captures it at the first call. Requires
  // that the device's context is current.
  CUgraph GraphOf(int rank, size_t place) {
    CUgraph& graph = buffers_.at(rank).graphs[place];
    if (graph != nullptr) return graph;
    const CUstream stream = gpus_.capturing(calls_.ordinal(rank));
    calls_.Workspace(rank);  // allocates
    CHECK_EQ(
        gpus_.driver.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        CUDA_SUCCESS);
    calls_.Execute(rank, stream);
    CHECK_EQ(gpus_.driver.StreamEndCapture(stream, &graph), CUDA_SUCCESS);
    return graph;
  }

  Gpus& gpus_;
  GpuCalls& calls_;
  std::map<int, Buffer> buffers_;  // [rank]
};

// Failed ranks do not wait: such a rank may read a slot while another rank writes it,
// and then fills its results with NaN. This data race is intended, so under
// ThreadSanitizer ranks run one after the other.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kFailsOneByOne = true;
#else
inline constexpr bool kFailsOneByOne = false;
#endif

// Launches a program in which some rank other than rank 0 is misplaced; rank 0 is
// launched last.
inline void LaunchMisplaced(Gpus& gpus, CapturedCalls& captured, int num_ranks) {
  for (int n = 1; n <= num_ranks; ++n) {
    captured.Launch(n % num_ranks);
    if (kFailsOneByOne) gpus.Synchronize(n % num_ranks);
  }
  gpus.Synchronize();
}

// Replays the local ranks' calls with new operands each time: at the captured
// addresses, at other addresses, and at the captured addresses again.
inline void CheckReplays(Gpus& gpus,
                         GpuCalls& calls,
                         CapturedCalls& captured,
                         int seed) {
  for (const size_t place : {0, 1, 0}) {
    captured.Move(place);
    calls.Refill(seed++);
    captured.LaunchAll();
    gpus.Synchronize();
    CheckRight(calls);
  }
}

inline void CheckReplays(Gpus& gpus, GpuCalls& calls, int seed) {
  CapturedCalls captured(gpus, calls);
  CheckReplays(gpus, calls, captured, seed);
}

// Runs random calls of all kinds in sequence, each eagerly or replayed, without waiting
// between them, so that slots of different calls overlap in memory. All processes must
// pass the same seed.
inline void CheckInAnyOrder(Gpus& gpus,
                            int num_ranks,
                            const Placement& placement,
                            int seed) {
  std::vector<std::unique_ptr<GpuCalls>> calls;
  std::vector<std::unique_ptr<CapturedCalls>> captured;
  std::mt19937 random(seed);
  ForEachVariant(num_ranks, [&](CallAttributes at) {
    if (random() % 3 != 0 || at.num_ranks != num_ranks) return;
    const auto up_to = [&](int most) {
      return static_cast<int64_t>(1 + random() % most);
    };
    const jax_ub_test::Sizes sizes = {up_to(2), up_to(9), up_to(9), 3};
    at.channel = "jit_f/" + std::to_string(calls.size());
    calls.push_back(
        std::make_unique<GpuCalls>(gpus, at, sizes, DType::kF32, random(), placement));
  });
  for (const auto& one : calls) {
    captured.push_back(std::make_unique<CapturedCalls>(gpus, *one));
  }
  std::vector<std::pair<size_t, bool>> order;
  for (int i = 0; i < 60; ++i) {
    order.emplace_back(random() % calls.size(), random() % 2);
  }
  std::vector<std::thread> threads;
  for (const int rank : calls[0]->local_ranks()) {
    threads.emplace_back([&, rank] {
      for (const auto& [which, replayed] : order) {
        calls[which]->Initialize(rank);
        if (replayed) {
          captured[which]->Launch(rank);
        } else {
          calls[which]->Execute(rank);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  gpus.Synchronize();
  for (const auto& [which, replayed] : order) CheckRight(*calls[which]);
}

}  // namespace jax_ub
