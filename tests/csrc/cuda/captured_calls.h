// Calls that are captured and replayed, as XLA does it.
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

// A call of all ranks of the process, in a command buffer of each. XLA captures it on a
// stream of its own, on all devices at once, for each set of addresses, and keeps the
// graphs. The first is made a child of a larger graph, which is instantiated; whenever the
// addresses are others, the child's node is given what the graph of these does.
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

  // The calls have their operands and results there from now on.
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

  // By a thread for each device.
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

  // With the context current.
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

// Failed ranks do not wait: one may read a slot while another writes it, and then fills its
// results with NaN. This race is intended.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kFailsOneByOne = true;
#else
inline constexpr bool kFailsOneByOne = false;
#endif

// Of a program that some rank is misplaced in, if not rank 0: that comes last.
inline void LaunchMisplaced(Gpus& gpus, CapturedCalls& captured, int num_ranks) {
  for (int n = 1; n <= num_ranks; ++n) {
    captured.Launch(n % num_ranks);
    if (kFailsOneByOne) gpus.Synchronize(n % num_ranks);
  }
  gpus.Synchronize();
}

// Replays the calls of the process's ranks, with other operands each time: where they were
// captured, in other memory, and there again.
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

// Runs some calls of all kinds one after the other, each eager or replayed, without a
// pause: slots of different calls overlap in memory. All processes pass the same seed.
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
