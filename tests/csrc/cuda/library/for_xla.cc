// Driver functions that XLA calls, but not the engine.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <thread>

#include "cuda/emulated_driver.h"
#include "cuda/emulated_graphs.h"
#include "cuda/emulated_machine.h"

namespace jax_ub {

namespace {

using emulated::Call;
using emulated::Operation;
using emulated::Run;
using emulated::RunInContext;

const Driver& driver() { return EmulatedDriver(); }

CUDA_MEMSET_NODE_PARAMS WithoutContext(const CUDA_MEMSET_NODE_PARAMS_v2& fill) {
  return {fill.dst, fill.pitch, fill.value, fill.elementSize, fill.width, fill.height};
}

}  // namespace

extern "C" {

// Returns the only version of a function, whichever version is requested.
CUresult cuGetProcAddress_v2(const char* name,
                             void** function,
                             int,
                             cuuint64_t,
                             CUdriverProcAddressQueryResult* found) {
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *function = nullptr;
  for (const char* version : {"", "_v2"}) {
    if (*function == nullptr) {
      *function = dlsym(self, (std::string(name) + version).c_str());
    }
  }
  const bool is_there = *function != nullptr;
  if (found != nullptr) {
    *found =
        is_there ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return is_there ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  return Run("DevicePrimaryCtxGetState", [&](Call& call) {
    *flags = 0;
    *is_active = call.machine.contexts.at(device).num_retained > 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return RunInContext("CtxGetDevice", [&](Call& call) {
    *device = call.device();
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
  std::snprintf(text, size, "0000:%02x:00.0", 0x10 + device);
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return RunInContext("MemGetInfo", [&](Call& call) {
    *free_bytes = emulated::FreeBytes(call.machine, call.device());
    *total_bytes = call.machine.options.device_memory_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult cuPointerGetAttribute(void* value,
                               CUpointer_attribute attribute,
                               CUdeviceptr pointer) {
  return Run("PointerGetAttribute", [&](Call& call) {
    const emulated::SharedRegion region = call.machine.memory.Around(pointer);
    if (region == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
      *static_cast<int*>(value) = region->device;
      return CUDA_SUCCESS;
    }
    if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
      *static_cast<unsigned*>(value) = region->kind == emulated::Region::Kind::kHost
                                           ? CU_MEMORYTYPE_HOST
                                           : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_SUPPORTED;
  });
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to,
                           const void* from,
                           size_t n,
                           CUstream stream) {
  return driver().MemcpyAsync(to, reinterpret_cast<CUdeviceptr>(from), n, stream);
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t n, CUstream stream) {
  return driver().MemcpyAsync(reinterpret_cast<CUdeviceptr>(to), from, n, stream);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to,
                           CUdeviceptr from,
                           size_t n,
                           CUstream stream) {
  return driver().MemcpyAsync(to, from, n, stream);
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return driver().StreamCreateWithPriority(stream, flags, 0);
}

// XLA queries a stream that it has waited for, so the query waits for a moment until
// the stream is idle.
CUresult cuStreamQuery(CUstream stream) {
  emulated::SharedMoment end;
  const CUresult result = Run("StreamQuery", [&](Call& call) {
    emulated::Stream* const found = call.FindStream(stream);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    end = emulated::MomentOf(*found);
    return CUDA_SUCCESS;
  });
  if (result != CUDA_SUCCESS) return result;
  for (int i = 0; i < 100 && !end->is_set(); ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return end->is_set() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return Run("LaunchHostFunc", [&](Call& call) {
    Operation operation;
    operation.name = "cuLaunchHostFunc";
    operation.run = [=] { function(data); };
    return emulated::Enqueue(call, stream, std::move(operation));
  });
}

CUresult cuGraphCreate(CUgraph* graph, unsigned flags) {
  return EmulatedGraphCreate(graph, flags);
}
CUresult cuGraphAddChildGraphNode(CUgraphNode* node,
                                  CUgraph graph,
                                  const CUgraphNode* dependencies,
                                  size_t num_dependencies,
                                  CUgraph child) {
  return EmulatedGraphAddChildGraphNode(node, graph, dependencies, num_dependencies,
                                        child);
}
CUresult cuGraphAddMemsetNode(CUgraphNode* node,
                              CUgraph graph,
                              const CUgraphNode* dependencies,
                              size_t num_dependencies,
                              const CUDA_MEMSET_NODE_PARAMS* params,
                              CUcontext context) {
  return EmulatedGraphAddMemsetNode(node, graph, dependencies, num_dependencies, params,
                                    context);
}
// jaxlib 0.12 calls this function, 0.11 those above. XLA does not destroy a child graph
// that it has moved into the graph.
CUresult cuGraphAddNode(CUgraphNode* node,
                        CUgraph graph,
                        const CUgraphNode* dependencies,
                        const CUgraphEdgeData*,
                        size_t num_dependencies,
                        CUgraphNodeParams* params) {
  if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    return EmulatedGraphAddChildGraphNode(node, graph, dependencies, num_dependencies,
                                          params->graph.graph);
  }
  if (params->type == CU_GRAPH_NODE_TYPE_MEMSET) {
    const CUDA_MEMSET_NODE_PARAMS fill = WithoutContext(params->memset);
    return EmulatedGraphAddMemsetNode(node, graph, dependencies, num_dependencies,
                                      &fill, params->memset.ctx);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec,
                                            CUgraphNode node,
                                            CUgraph child) {
  return EmulatedGraphExecChildGraphNodeSetParams(exec, node, child);
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec,
                                        CUgraphNode node,
                                        const CUDA_MEMSET_NODE_PARAMS* params,
                                        CUcontext context) {
  return EmulatedGraphExecMemsetNodeSetParams(exec, node, params, context);
}
CUresult cuGraphExecNodeSetParams(CUgraphExec exec,
                                  CUgraphNode node,
                                  CUgraphNodeParams* params) {
  if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    return EmulatedGraphExecChildGraphNodeSetParams(exec, node, params->graph.graph);
  }
  if (params->type == CU_GRAPH_NODE_TYPE_MEMSET) {
    const CUDA_MEMSET_NODE_PARAMS fill = WithoutContext(params->memset);
    return EmulatedGraphExecMemsetNodeSetParams(exec, node, &fill, params->memset.ctx);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuStreamBeginCaptureToGraph(CUstream stream,
                                     CUgraph graph,
                                     const CUgraphNode*,
                                     const CUgraphEdgeData*,
                                     size_t num_dependencies,
                                     CUstreamCaptureMode mode) {
  if (num_dependencies > 0) return CUDA_ERROR_NOT_SUPPORTED;
  return EmulatedStreamBeginCaptureToGraph(stream, graph, mode);
}
// XLA calls this for the number of root nodes.
CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, size_t* num_nodes) {
  return Run("GraphGetRootNodes", [&](Call& call) {
    const emulated::Graph* const graph = call.machine.graphs.Find(handle);
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (nodes != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    *num_nodes = 0;
    for (const emulated::Node& node : graph->nodes) {
      *num_nodes += node.dependencies.empty();
    }
    return CUDA_SUCCESS;
  });
}

}  // extern "C"

}  // namespace jax_ub
