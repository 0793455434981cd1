// What XLA calls to put graphs that it captured into a larger one, and fills, and to give
// them other addresses there, by the rules of the driver API: functions that the engine
// does not call. The nodes that it puts one behind the other are called children here.
#pragma once

#include <cuda.h>

#include <cstddef>

namespace jax_ub {

CUresult EmulatedGraphCreate(CUgraph* graph, unsigned flags);

// A copy of `child`, behind the nodes `dependencies`, which are children too. Refused, with
// CUDA_ERROR_INVALID_VALUE, where a node frees memory. A child without nodes, which crashes
// CUDA when the graph is instantiated, is a violation.
CUresult EmulatedGraphAddChildGraphNode(CUgraphNode* node,
                                        CUgraph graph,
                                        const CUgraphNode* dependencies,
                                        size_t num_dependencies,
                                        CUgraph child);

// The node's nodes do what those of `child` do, in launches from now on. Refused, with
// CUDA_ERROR_INVALID_VALUE, unless the graph of the node is still there, and unless `child`
// has as many nodes, in the same order, of the same kinds and with the same edges; kernels
// in the same context, and of the same priority where the graph was instantiated with
// priorities of nodes; operands of copies and fills with the same owners.
CUresult EmulatedGraphExecChildGraphNodeSetParams(CUgraphExec exec,
                                                  CUgraphNode node,
                                                  CUgraph child);

// A fill by the device of `context`, behind the nodes `dependencies`, which are children
// too. XLA writes the number of a partition so.
CUresult EmulatedGraphAddMemsetNode(CUgraphNode* node,
                                    CUgraph graph,
                                    const CUgraphNode* dependencies,
                                    size_t num_dependencies,
                                    const CUDA_MEMSET_NODE_PARAMS* params,
                                    CUcontext context);

// The node fills so in launches from now on. Refused, with CUDA_ERROR_INVALID_VALUE, unless
// the graph of the node is still there, the memory has the same owner, and both fills have
// one dimension.
CUresult EmulatedGraphExecMemsetNodeSetParams(CUgraphExec exec,
                                              CUgraphNode node,
                                              const CUDA_MEMSET_NODE_PARAMS* params,
                                              CUcontext context);

// What the stream is given until its capture ends goes into `graph`, which is empty.
CUresult EmulatedStreamBeginCaptureToGraph(CUstream stream,
                                           CUgraph graph,
                                           CUstreamCaptureMode mode);

}  // namespace jax_ub
