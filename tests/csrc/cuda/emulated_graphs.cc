// Emulates the capture of streams into graphs, and the launches of graphs.
#include "cuda/emulated_graphs.h"

#include <algorithm>
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

CUresult BeginCapture(Call& call,
                      CUstream handle,
                      CUstreamCaptureMode mode,
                      uintptr_t into) {
  Stream* const stream = call.FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->handle == 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream->handle;
  stream->capture->into = into;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->mode = mode;
  stream->tips.clear();
  call.machine.captures.push_back(stream->capture);
  return CUDA_SUCCESS;
}

CUresult StreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return RunInContext("StreamBeginCapture",
                      [&](Call& call) { return BeginCapture(call, stream, mode, 0); });
}

CUresult StreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return RunInContext("StreamIsCapturing", [&](Call& call) {
    const Stream* const stream = call.FindStream(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *status = stream->capture == nullptr  ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->is_valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                          : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return CUDA_SUCCESS;
  });
}

// Returns whether every node is in `ends`, or one of `ends` depends on it.
bool AreAllJoined(const std::vector<Node>& nodes, const std::set<int>& ends) {
  std::vector<bool> is_joined(nodes.size(), false);
  for (const int end : ends) is_joined[end] = true;
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!is_joined[i]) return false;
    for (const int dependency : nodes[i].dependencies) is_joined[dependency] = true;
  }
  return true;
}

CUresult StreamEndCapture(CUstream handle, CUgraph* graph) {
  return RunInContext("StreamEndCapture", [&](Call& call) {
    Stream* const stream = call.FindStream(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    const SharedCapture capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream->handle) {
      capture->is_valid = false;
      return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
        capture->thread != std::this_thread::get_id()) {
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    const std::set<int> ends = stream->tips;
    capture->is_over = true;
    std::erase(call.machine.captures, capture);
    for (const auto& [other_handle, other] : call.machine.streams) {
      if (other->capture != capture) continue;
      other->capture.reset();
      other->tips.clear();
    }
    if (!capture->is_valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!AreAllJoined(capture->nodes, ends)) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    Graph* const into = capture->into == 0 ? call.machine.graphs.Add({})
                                           : call.machine.graphs.Find(capture->into);
    if (into == nullptr) return CUDA_ERROR_INVALID_VALUE;
    into->nodes = std::move(capture->nodes);
    *graph = reinterpret_cast<CUgraph>(into->handle);
    return CUDA_SUCCESS;
  });
}

CUresult GraphDestroy(CUgraph graph) {
  return Run("GraphDestroy", [&](Call& call) {
    if (call.machine.graphs.Remove(graph)) return CUDA_SUCCESS;
    call.Violate("cuGraphDestroy of a graph that is not there");
    return CUDA_ERROR_INVALID_VALUE;
  });
}

// Divides nodes into chains: a node is appended to a chain whose last node it depends
// on, or else begins a new chain.
std::vector<std::vector<int>> ChainsOf(const std::vector<Node>& nodes) {
  std::vector<std::vector<int>> chains;
  for (int i = 0; i < static_cast<int>(nodes.size()); ++i) {
    const auto& before = nodes[i].dependencies;
    const auto chain =
        std::find_if(chains.begin(), chains.end(), [&](const auto& other) {
          return std::find(before.begin(), before.end(), other.back()) != before.end();
        });
    (chain != chains.end() ? *chain : chains.emplace_back()).push_back(i);
  }
  return chains;
}

CUresult GraphInstantiate(CUgraphExec* exec, CUgraph handle, unsigned long long flags) {
  return RunInContext("GraphInstantiate", [&](Call& call) {
    const Graph* const graph = call.machine.graphs.Find(handle);
    if (exec == nullptr || graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & ~CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) != 0) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    call.Drain();
    GraphExec made;
    made.has_priorities = flags != 0;
    made.graph = graph->handle;
    made.children = graph->children;
    made.nodes = std::make_shared<const std::vector<Node>>(graph->nodes);
    made.chains = ChainsOf(*made.nodes);
    for (size_t i = 0; i < made.chains.size(); ++i) {
      made.lanes.push_back(call.machine.TakeLane());
    }
    *exec =
        reinterpret_cast<CUgraphExec>(call.machine.execs.Add(std::move(made))->handle);
    return CUDA_SUCCESS;
  });
}

// A launch that is running still completes.
CUresult GraphExecDestroy(CUgraphExec handle) {
  return Run("GraphExecDestroy", [&](Call& call) {
    GraphExec* const exec = call.machine.execs.Find(handle);
    if (exec == nullptr) {
      call.Violate("cuGraphExecDestroy of a graph that is not there");
      return CUDA_ERROR_INVALID_VALUE;
    }
    // A launch may not have given the lanes their work yet.
    auto& launched = exec->last_launch;
    if (launched == nullptr || launched->is_set()) {
      auto& spare = call.machine.spare_lanes;
      spare.insert(spare.end(), exec->lanes.begin(), exec->lanes.end());
    }
    call.machine.execs.Remove(handle);
    return CUDA_SUCCESS;
  });
}

// Returns the nodes in a random order in which each one follows its dependencies.
std::vector<int> RandomOrder(const std::vector<Node>& nodes, std::mt19937_64& random) {
  std::vector<std::vector<int>> dependents(nodes.size());
  std::vector<size_t> num_missing(nodes.size());
  std::vector<int> ready, order;
  for (size_t i = 0; i < nodes.size(); ++i) {
    num_missing[i] = nodes[i].dependencies.size();
    for (const int before : nodes[i].dependencies) {
      dependents[before].push_back(static_cast<int>(i));
    }
    if (num_missing[i] == 0) ready.push_back(static_cast<int>(i));
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    order.push_back(ready.back());
    ready.pop_back();
    for (const int next : dependents[order.back()]) {
      if (--num_missing[next] == 0) ready.push_back(next);
    }
  }
  return order;
}

// One launch of a graph: its nodes, and the moments at which they are done.
struct Launch {
  std::shared_ptr<const std::vector<Node>> nodes;
  std::vector<std::vector<int>> chains;
  std::vector<std::shared_ptr<Lane>> lanes;
  SharedMoment before;  // the graph's launch before this one
  SharedMoment end = std::make_shared<Moment>();
  std::vector<Moment> done;  // [node]
  // The hardware queues start their nodes in order: when each node starts, and which
  // node precedes it; -1: none.
  std::vector<Moment> starts;        // [node]
  std::vector<int> before_in_queue;  // [node]

  Launch(const GraphExec& exec, Machine& machine)
      : nodes(exec.nodes),
        chains(exec.chains),
        lanes(exec.lanes),
        before(exec.last_launch),
        done(exec.nodes->size()),
        starts(exec.nodes->size()),
        before_in_queue(exec.nodes->size(), -1) {
    std::vector<int> queue_of(nodes->size());
    for (size_t chain = 0; chain < chains.size(); ++chain) {
      for (const int i : chains[chain]) {
        queue_of[i] = static_cast<int>(chain) % machine.options.num_queues;
      }
    }
    std::vector<int> newest(machine.options.num_queues, -1);
    for (const int i : RandomOrder(*nodes, machine.random)) {
      before_in_queue[i] = std::exchange(newest[queue_of[i]], i);
    }
  }
};

void RunChain(Launch& launch, size_t chain) {
  for (const int i : launch.chains[chain]) {
    const Node& node = (*launch.nodes)[i];
    if (const int before = launch.before_in_queue[i]; before >= 0) {
      const Unseen unseen;
      launch.starts[before].Await();
    }
    for (const int dependency : node.dependencies) launch.done[dependency].Await();
    SetUnseen(launch.starts[i]);
    launch.lanes[chain]->Delay();
    node.operation.run();
    launch.done[i].Set();
  }
}

void RunLaunch(const std::shared_ptr<Launch>& launch) {
  if (launch->before != nullptr) launch->before->Await();
  for (size_t chain = 0; chain < launch->chains.size(); ++chain) {
    const Unseen unseen;
    launch->lanes[chain]->Post(
        {"a graph", [launch, chain] { RunChain(*launch, chain); }, nullptr});
  }
  for (const auto& chain : launch->chains) launch->done[chain.back()].Await();
  launch->end->Set();
}

CUresult GraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  return RunInContext("GraphLaunch", [&](Call& call) {
    GraphExec* const exec = call.machine.execs.Find(handle);
    Stream* const stream = call.FindStream(stream_handle);
    if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) return AddNodes(*stream, *exec->nodes);
    std::vector<SharedRegion> uses;
    for (const Node& node : *exec->nodes) {
      if (const CUresult result = BeginUse(call, node.operation, uses)) return result;
    }
    const auto launch = std::make_shared<Launch>(*exec, call.machine);
    exec->last_launch = launch->end;
    Machine* const machine = &call.machine;
    const CUresult result =
        Enqueue(call, stream_handle,
                {.name = "a graph", .run = [launch] { RunLaunch(launch); }});
    // After the launch, its memory is no longer in use.
    stream->lane->Post({"the end of a graph", [] {},
                        [machine, uses = std::move(uses)]() mutable {
                          const std::lock_guard lock(machine->mutex);
                          EndUse(*machine, uses);
                        }});
    return result;
  });
}

}  // namespace

CUresult AddNodes(Stream& stream, const std::vector<Node>& nodes) {
  Capture& capture = *stream.capture;
  if (!capture.is_valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (nodes.empty()) return CUDA_SUCCESS;
  const int first = static_cast<int>(capture.nodes.size());
  std::set<int> ends;
  for (const Node& node : nodes) {
    const int number = static_cast<int>(capture.nodes.size());
    ends.insert(number);
    Node added{node.operation, {}};
    for (const int dependency : node.dependencies) {
      added.dependencies.push_back(first + dependency);
      ends.erase(first + dependency);
    }
    if (node.dependencies.empty()) {
      added.dependencies.assign(stream.tips.begin(), stream.tips.end());
    }
    capture.nodes.push_back(std::move(added));
  }
  stream.tips = std::move(ends);
  return CUDA_SUCCESS;
}

void FillGraphs(Driver& driver) {
  driver.StreamIsCapturing = StreamIsCapturing;
  driver.StreamBeginCapture = StreamBeginCapture;
  driver.StreamEndCapture = StreamEndCapture;
  driver.GraphInstantiate = GraphInstantiate;
  driver.GraphLaunch = GraphLaunch;
  driver.GraphExecDestroy = GraphExecDestroy;
  driver.GraphDestroy = GraphDestroy;
}

}  // namespace jax_ub::emulated

namespace jax_ub {

CUresult EmulatedStreamBeginCaptureToGraph(CUstream stream,
                                           CUgraph graph,
                                           CUstreamCaptureMode mode) {
  using namespace emulated;
  return RunInContext("StreamBeginCaptureToGraph", [&](Call& call) {
    const Graph* const found = call.machine.graphs.Find(graph);
    if (found == nullptr || !found->nodes.empty()) return CUDA_ERROR_INVALID_VALUE;
    return BeginCapture(call, stream, mode, found->handle);
  });
}

}  // namespace jax_ub
