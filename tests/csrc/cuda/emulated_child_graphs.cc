// Emulates child graphs and fill nodes. The nodes of a child become consecutive nodes
// of the graph.
#include <atomic>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cuda/emulated_graphs.h"
#include "cuda/emulated_machine.h"

namespace jax_ub {

namespace emulated {

namespace {

const Child* FindChild(const std::vector<Child>& children, CUgraphNode node) {
  for (const Child& child : children) {
    if (child.handle == reinterpret_cast<uintptr_t>(node)) return &child;
  }
  return nullptr;
}

// Returns the nodes of a child on which no other node of the child depends.
std::set<int> EndsOf(const Graph& graph, const Child& child) {
  std::set<int> ends;
  for (size_t i = child.first; i < child.first + child.count; ++i) {
    ends.insert(static_cast<int>(i));
    for (const int dependency : graph.nodes[i].dependencies) ends.erase(dependency);
  }
  return ends;
}

// Returns a node of a child as a node of the graph, in which the child's nodes begin at
// index `first`.
Node Moved(const Node& node, size_t first) {
  Node moved = node;
  for (int& dependency : moved.dependencies) dependency += static_cast<int>(first);
  return moved;
}

bool MayBecome(const Operation& old, const Operation& next, bool has_priorities) {
  return old.kind == next.kind && old.device == next.device &&
         old.owners == next.owners &&
         (!has_priorities || old.priority == next.priority);
}

// Returns the dependencies of a node within its child. Roots have none: they depend
// only on nodes before the child.
std::vector<int> Within(const Node& node, size_t first) {
  std::vector<int> dependencies;
  for (const int dependency : node.dependencies) {
    if (dependency >= static_cast<int>(first)) dependencies.push_back(dependency);
  }
  return dependencies;
}

// Adds the nodes of a child, which run after the children `dependencies`.
CUresult AddChild(Graph& graph,
                  const std::vector<Node>& nodes,
                  const CUgraphNode* dependencies,
                  size_t num_dependencies,
                  CUgraphNode* node) {
  std::set<int> before;
  for (size_t i = 0; i < num_dependencies; ++i) {
    const Child* const other = FindChild(graph.children, dependencies[i]);
    if (other == nullptr) return CUDA_ERROR_INVALID_VALUE;
    before.merge(EndsOf(graph, *other));
  }
  static std::atomic<uintptr_t> last = 0x8;
  const Child added{last += 0x10, graph.nodes.size(), nodes.size()};
  for (const Node& one : nodes) {
    Node moved = Moved(one, added.first);
    if (moved.dependencies.empty()) {
      moved.dependencies.assign(before.begin(), before.end());
    }
    graph.nodes.push_back(std::move(moved));
  }
  graph.children.push_back(added);
  *node = reinterpret_cast<CUgraphNode>(added.handle);
  return CUDA_SUCCESS;
}

CUresult SetChild(Call& call,
                  CUgraphExec handle,
                  CUgraphNode node,
                  const std::vector<Node>& wanted) {
  GraphExec* const exec = call.machine.execs.Find(handle);
  if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Child* const child = FindChild(exec->children, node);
  const bool is_there =
      call.machine.graphs.Find(reinterpret_cast<CUgraph>(exec->graph)) != nullptr;
  if (child == nullptr || !is_there || child->count != wanted.size()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Launches that are running keep the previous nodes.
  std::vector<Node> nodes = *exec->nodes;
  for (size_t i = 0; i < child->count; ++i) {
    Node& old = nodes[child->first + i];
    const Node next = Moved(wanted[i], child->first);
    if (!MayBecome(old.operation, next.operation, exec->has_priorities) ||
        Within(old, child->first) != next.dependencies) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    old.operation = next.operation;
  }
  exec->nodes = std::make_shared<const std::vector<Node>>(std::move(nodes));
  return CUDA_SUCCESS;
}

template <typename Value>
Operation FillBy(const Call& call, const CUDA_MEMSET_NODE_PARAMS& params) {
  return FillOf(call, "a fill of a graph", params.dst, static_cast<Value>(params.value),
                params.width);
}

// Returns the node of a fill, or no node if the driver rejects the fill or the
// emulation does not support it (fills with several rows).
std::vector<Node> FillNode(const Call& call,
                           const CUDA_MEMSET_NODE_PARAMS* params,
                           CUcontext context) {
  const int device = DeviceOf(call, context);
  if (params == nullptr || device < 0 || params->width == 0 || params->height != 1) {
    return {};
  }
  const unsigned size = params->elementSize;
  if ((size != 1 && size != 2 && size != 4) || params->dst % size != 0) return {};
  Operation fill = size == 1   ? FillBy<uint8_t>(call, *params)
                   : size == 2 ? FillBy<uint16_t>(call, *params)
                               : FillBy<uint32_t>(call, *params);
  fill.device = device;
  return {{std::move(fill), {}}};
}

}  // namespace

}  // namespace emulated

using namespace emulated;

CUresult EmulatedGraphCreate(CUgraph* graph, unsigned flags) {
  return Run("GraphCreate", [&](Call& call) {
    if (graph == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    *graph = reinterpret_cast<CUgraph>(call.machine.graphs.Add({})->handle);
    return CUDA_SUCCESS;
  });
}

CUresult EmulatedGraphGetNodes(CUgraph handle, size_t* count) {
  return Run("GraphGetNodes", [&](Call& call) {
    const Graph* const graph = call.machine.graphs.Find(handle);
    if (graph == nullptr || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = graph->nodes.size();
    return CUDA_SUCCESS;
  });
}

CUresult EmulatedGraphAddChildGraphNode(CUgraphNode* node,
                                        CUgraph graph_handle,
                                        const CUgraphNode* dependencies,
                                        size_t num_dependencies,
                                        CUgraph child_handle) {
  return Run("GraphAddChildGraphNode", [&](Call& call) {
    Graph* const graph = call.machine.graphs.Find(graph_handle);
    const Graph* const child = call.machine.graphs.Find(child_handle);
    if (node == nullptr || graph == nullptr || child == nullptr || graph == child) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (const Node& one : child->nodes) {
      if (one.operation.kind == Operation::Kind::kFree) return CUDA_ERROR_INVALID_VALUE;
    }
    if (child->nodes.empty()) call.Violate("a child graph has no nodes");
    return AddChild(*graph, child->nodes, dependencies, num_dependencies, node);
  });
}

CUresult EmulatedGraphExecChildGraphNodeSetParams(CUgraphExec exec,
                                                  CUgraphNode node,
                                                  CUgraph child) {
  return Run("GraphExecChildGraphNodeSetParams", [&](Call& call) {
    const Graph* const graph = call.machine.graphs.Find(child);
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return SetChild(call, exec, node, graph->nodes);
  });
}

CUresult EmulatedGraphAddMemsetNode(CUgraphNode* node,
                                    CUgraph handle,
                                    const CUgraphNode* dependencies,
                                    size_t num_dependencies,
                                    const CUDA_MEMSET_NODE_PARAMS* params,
                                    CUcontext context) {
  return Run("GraphAddMemsetNode", [&](Call& call) {
    Graph* const graph = call.machine.graphs.Find(handle);
    const std::vector<Node> fill = FillNode(call, params, context);
    if (node == nullptr || graph == nullptr || fill.empty()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return AddChild(*graph, fill, dependencies, num_dependencies, node);
  });
}

CUresult EmulatedGraphExecMemsetNodeSetParams(CUgraphExec exec,
                                              CUgraphNode node,
                                              const CUDA_MEMSET_NODE_PARAMS* params,
                                              CUcontext context) {
  return Run("GraphExecMemsetNodeSetParams", [&](Call& call) {
    const std::vector<Node> fill = FillNode(call, params, context);
    return fill.empty() ? CUDA_ERROR_INVALID_VALUE : SetChild(call, exec, node, fill);
  });
}

}  // namespace jax_ub
