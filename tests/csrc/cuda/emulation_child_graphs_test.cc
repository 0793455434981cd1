// Tests child graphs in the emulated driver, as XLA creates and updates them.
#include <functional>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"
#include "cuda/emulated_graphs.h"

using namespace jax_ub;

namespace {

const Driver& driver = EmulatedDriver();
using Gpu = EmulatedGpu;
using Body = std::function<void(CUstream)>;

// Captures the work that a function enqueues on a stream, as a graph.
class Captured {
 public:
  Captured(CUstream stream, const Body& body) {
    Check(driver,
          driver.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
          "begin");
    body(stream);
    Check(driver, driver.StreamEndCapture(stream, &graph_), "end");
  }
  ~Captured() { driver.GraphDestroy(graph_); }
  Captured(const Captured&) = delete;
  CUgraph get() const { return graph_; }

 private:
  CUgraph graph_ = nullptr;
};

// A graph whose nodes are child graphs that run one after the other.
class Whole {
 public:
  explicit Whole(
      const std::vector<CUgraph>& children,
      unsigned long long flags = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) {
    Check(driver, EmulatedGraphCreate(&graph_, 0), "create");
    for (const CUgraph child : children) {
      CUgraphNode node = nullptr;
      Check(driver,
            EmulatedGraphAddChildGraphNode(&node, graph_,
                                           nodes_.empty() ? nullptr : &nodes_.back(),
                                           nodes_.empty() ? 0 : 1, child),
            "add");
      nodes_.push_back(node);
    }
    Check(driver, driver.GraphInstantiate(&exec_, graph_, flags), "instantiate");
  }
  ~Whole() {
    driver.GraphExecDestroy(exec_);
    Forget();
  }
  Whole(const Whole&) = delete;

  // Destroys the graph, but not the instantiated graph.
  void Forget() {
    if (graph_ != nullptr) driver.GraphDestroy(std::exchange(graph_, nullptr));
  }
  CUresult Update(size_t child, CUgraph graph) {
    return EmulatedGraphExecChildGraphNodeSetParams(exec_, nodes_[child], graph);
  }
  void Launch(CUstream stream) {
    Check(driver, driver.GraphLaunch(exec_, stream), "launch");
  }

 private:
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
  std::vector<CUgraphNode> nodes_;
};

Body Filling(const DeviceMemory& memory, uint32_t value, size_t count) {
  return
      [=, to = memory.get()](CUstream stream) { Gpu::Fill(stream, to, value, count); };
}

}  // namespace

TEST(ChildrenRunInTheirOrderWithWhatTheyWereGivenLast) {
  EmulatedMachine machine({.seed = 3, .max_delay_us = 200});
  {
    const Gpu gpu;
    const Stream stream(driver, 0);
    const DeviceMemory first(driver, 4096), second(driver, 4096), copy(driver, 4096);
    const auto copying = [&](const DeviceMemory& from) {
      return
          [&copy, &from](CUstream on) { Gpu::Copy(on, copy.get(), from.get(), 4096); };
    };
    const Captured fill(stream.get(), Filling(first, 1, 1024));
    const Captured take(stream.get(), copying(first));
    const Captured other_fill(stream.get(), Filling(second, 2, 1024));
    const Captured other_take(stream.get(), copying(second));
    Whole whole({fill.get(), take.get()});
    whole.Launch(stream.get());
    CHECK(Gpu::Read(stream.get(), copy.get(), 1024) == std::vector<uint32_t>(1024, 1));
    // An update does not change a launch that is running.
    whole.Launch(stream.get());
    CHECK_EQ(whole.Update(1, other_take.get()), CUDA_SUCCESS);
    CHECK_EQ(whole.Update(0, other_fill.get()), CUDA_SUCCESS);
    CHECK(Gpu::Read(stream.get(), copy.get(), 1024) == std::vector<uint32_t>(1024, 1));
    whole.Launch(stream.get());
    CHECK(Gpu::Read(stream.get(), copy.get(), 1024) == std::vector<uint32_t>(1024, 2));
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(AnUpdateHasTheSameNodesInTheSameOrder) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    const Stream stream(driver, 0), side(driver, 0);
    const Event fork(driver), join(driver);
    const DeviceMemory a(driver, 64), b(driver, 64);
    const auto fill = [&](CUstream on, const DeviceMemory& to) {
      Gpu::Fill(on, to.get(), 1, 16);
    };
    const auto copy = [&](CUstream on) { Gpu::Copy(on, a.get(), b.get(), 64); };
    const Captured known(stream.get(), [&](CUstream on) {
      fill(on, b);
      copy(on);
    });
    Whole whole({known.get()});
    CHECK_EQ(whole.Update(0, known.get()), CUDA_SUCCESS);
    const std::vector<Body> others = {[&](CUstream on) { fill(on, b); },
                                      [&](CUstream on) {
                                        fill(on, b);
                                        copy(on);
                                        fill(on, b);
                                      },
                                      [&](CUstream on) {
                                        copy(on);
                                        fill(on, b);
                                      },
                                      [&](CUstream on) {
                                        Gpu::Join(side.get(), fork, on);
                                        fill(on, a);
                                        copy(side.get());
                                        Gpu::Join(on, join, side.get());
                                      }};
    for (const Body& other : others) {
      const Captured captured(stream.get(), other);
      CHECK_EQ(whole.Update(0, captured.get()), CUDA_ERROR_INVALID_VALUE);
    }
    whole.Forget();
    CHECK_EQ(whole.Update(0, known.get()), CUDA_ERROR_INVALID_VALUE);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(CopiesAndFillsKeepTheOwnersOfTheirMemory) {
  EmulatedMachine machine({.num_devices = 2});
  {
    const Gpu gpu;
    const Stream stream(driver, 0);
    const DeviceMemory to(driver, 64), from(driver, 64), other(driver, 64);
    const HostMemory host(driver, 64);
    const Context peer(driver, 1);
    const DeviceMemory remote = [&] {
      const ScopedContext current(driver, peer.get());
      return DeviceMemory(driver, 64);
    }();
    Check(driver, driver.CtxEnablePeerAccess(peer.get(), 0), "peers");
    const auto copying = [&](CUdeviceptr target, CUdeviceptr source) {
      return [=](CUstream on) { Gpu::Copy(on, target, source, 64); };
    };
    const Captured known(stream.get(), copying(to.get(), from.get()));
    Whole whole({known.get()});
    const Captured moved(stream.get(), copying(other.get(), to.get()));
    CHECK_EQ(whole.Update(0, moved.get()), CUDA_SUCCESS);
    for (const auto& [target, source] :
         {std::pair{to.get(), remote.get()}, std::pair{remote.get(), from.get()},
          std::pair{to.get(), host.device()}, std::pair{host.device(), from.get()}}) {
      const Captured elsewhere(stream.get(), copying(target, source));
      CHECK_EQ(whole.Update(0, elsewhere.get()), CUDA_ERROR_INVALID_VALUE);
    }
    const Captured fill(stream.get(), Filling(to, 1, 16));
    Whole filled({fill.get()});
    const Captured filled_there(stream.get(), Filling(remote, 1, 16));
    CHECK_EQ(filled.Update(0, filled_there.get()), CUDA_ERROR_INVALID_VALUE);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(FillsAreNodesThatAreUpdatedToo) {
  EmulatedMachine machine({.num_devices = 2, .seed = 5, .max_delay_us = 200});
  {
    const Gpu gpu;
    const Stream stream(driver, 0);
    const Context peer(driver, 1);
    const DeviceMemory to(driver, 64), copy(driver, 64);
    const DeviceMemory remote = [&] {
      const ScopedContext current(driver, peer.get());
      return DeviceMemory(driver, 64);
    }();
    const auto filling = [](const DeviceMemory& memory, unsigned value, unsigned size) {
      return CUDA_MEMSET_NODE_PARAMS{.dst = memory.get(),
                                     .pitch = 0,
                                     .value = value,
                                     .elementSize = size,
                                     .width = 64 / size,
                                     .height = 1};
    };
    const Captured take(stream.get(),
                        [&](CUstream on) { Gpu::Copy(on, copy.get(), to.get(), 64); });
    CUgraph graph = nullptr;
    Check(driver, EmulatedGraphCreate(&graph, 0), "create");
    CUgraphNode fill = nullptr, child = nullptr;
    const auto add = [&](const CUDA_MEMSET_NODE_PARAMS& params) {
      return EmulatedGraphAddMemsetNode(&fill, graph, nullptr, 0, &params,
                                        gpu.context());
    };
    CUDA_MEMSET_NODE_PARAMS rows = filling(to, 1, 4), odd = rows;
    rows.height = 2;
    odd.elementSize = 3;
    CHECK_EQ(add(rows), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(add(odd), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(add(filling(to, 7, 4)), CUDA_SUCCESS);
    Check(driver, EmulatedGraphAddChildGraphNode(&child, graph, &fill, 1, take.get()),
          "add");
    CUgraphExec exec = nullptr;
    Check(driver, driver.GraphInstantiate(&exec, graph, 0), "instantiate");
    const auto launched = [&] {
      Check(driver, driver.GraphLaunch(exec, stream.get()), "launch");
      return Gpu::Read(stream.get(), copy.get(), 16);
    };
    const auto update = [&](const CUDA_MEMSET_NODE_PARAMS& params) {
      return EmulatedGraphExecMemsetNodeSetParams(exec, fill, &params, gpu.context());
    };
    CHECK(launched() == std::vector<uint32_t>(16, 7));
    CHECK_EQ(update(filling(to, 0x109, 2)), CUDA_SUCCESS);
    CHECK(launched() == std::vector<uint32_t>(16, 0x1090109));
    CHECK_EQ(update(filling(to, 0x109, 1)), CUDA_SUCCESS);
    CHECK(launched() == std::vector<uint32_t>(16, 0x9090909));
    CHECK_EQ(update(rows), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(update(filling(remote, 1, 4)), CUDA_ERROR_INVALID_VALUE);
    driver.GraphDestroy(graph);
    CHECK_EQ(update(filling(to, 7, 4)), CUDA_ERROR_INVALID_VALUE);
    driver.GraphExecDestroy(exec);
  }
  CHECK_EQ(machine.Complaints(), "");
}

// An update accepts another kernel, but another priority only if it has no effect.
TEST(KernelsKeepTheirPriorityAndMayBeOthers) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    const EmulatedLibrary library;
    const EmulatedGate gate(library);
    const Stream usual(driver, 0), urgent(driver, -5);
    const auto wait = [&](CUstream on) { gate.Wait(on); };
    const auto signal = [&](CUstream on) { gate.Signal(on); };
    const Captured known(usual.get(), wait);
    const Captured other(usual.get(), signal);
    const Captured sooner(urgent.get(), wait);
    Whole whole({known.get()});
    CHECK_EQ(whole.Update(0, other.get()), CUDA_SUCCESS);
    CHECK_EQ(whole.Update(0, sooner.get()), CUDA_ERROR_INVALID_VALUE);
    Whole without({known.get()}, 0);
    CHECK_EQ(without.Update(0, sooner.get()), CUDA_SUCCESS);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(AChildFreesNoMemory) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0);
  DeviceMemory memory(driver, 64);
  const Captured freeing(stream.get(), [&](CUstream on) {
    Gpu::Fill(on, memory.get(), 1, 16);
    Check(driver, driver.MemFreeAsync(memory.get(), on), "free");
  });
  CHECK_THROWS(Whole({freeing.get()}), "CUDA_ERROR_INVALID_VALUE");
}

TEST(AChildWithoutNodesIsAViolation) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0);
  const Captured empty(stream.get(), [](CUstream) {});
  const Whole whole({empty.get()});
  CHECK_EQ(machine.Violations().size(), 1u);
}

CHECK_MAIN()
