// Driver functions that XLA calls, and the engine does not: they add a captured graph
// or a fill to a larger graph, and later change its addresses. The nodes that they add
// are called children; each child depends on earlier ones.
#pragma once

#include <cuda.h>

#include <cstddef>

namespace jax_ub {

CUresult EmulatedGraphCreate(CUgraph* graph, unsigned flags);

// Sets `count` to the number of nodes of the graph.
CUresult EmulatedGraphGetNodes(CUgraph graph, size_t* count);

// Adds a copy of the graph `child`, to run after the nodes `dependencies`, which are
// children, too. Returns CUDA_ERROR_INVALID_VALUE if a node of `child` frees memory. A
// child without nodes is a violation, because CUDA crashes when the graph is
// instantiated.
CUresult EmulatedGraphAddChildGraphNode(CUgraphNode* node,
                                        CUgraph graph,
                                        const CUgraphNode* dependencies,
                                        size_t num_dependencies,
                                        CUgraph child);

// Updates the nodes inside `node` from those of `child`, for later launches. Returns
// CUDA_ERROR_INVALID_VALUE unless the graph of the node still exists, and `child` has
// the same number of nodes in the same order, of the same kinds and with the same
// edges; kernels must be in the same context and, if the graph was instantiated with
// node priorities, have the same priority; operands of copies and fills must have the
// same owners.
CUresult EmulatedGraphExecChildGraphNodeSetParams(CUgraphExec exec,
                                                  CUgraphNode node,
                                                  CUgraph child);

// Adds a fill by the device of `context`, to run after the nodes `dependencies`, which
// are children, too. XLA writes the number of a partition in this way.
CUresult EmulatedGraphAddMemsetNode(CUgraphNode* node,
                                    CUgraph graph,
                                    const CUgraphNode* dependencies,
                                    size_t num_dependencies,
                                    const CUDA_MEMSET_NODE_PARAMS* params,
                                    CUcontext context);

// Changes the fill of a node for later launches. Returns CUDA_ERROR_INVALID_VALUE
// unless the graph of the node still exists, the memory has the same owner, and both
// fills have one dimension.
CUresult EmulatedGraphExecMemsetNodeSetParams(CUgraphExec exec,
                                              CUgraphNode node,
                                              const CUDA_MEMSET_NODE_PARAMS* params,
                                              CUcontext context);

// Begins a capture of the stream into `graph`, which must be empty.
CUresult EmulatedStreamBeginCaptureToGraph(CUstream stream,
                                           CUgraph graph,
                                           CUstreamCaptureMode mode);

}  // namespace jax_ub
