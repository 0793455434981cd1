// The FFI targets of the CUDA engine, and the engine that their handlers use. Stages:
//
//   instantiate   Runs once per custom call of a compiled program. Reads attributes.
//   initialize    Runs before every run of the program, on each device. Makes plans,
//                 loads kernels, binds the communicator, and raises errors of earlier
//                 calls. Does not wait for peers.
//   execute       Enqueues the call. XLA may capture it once in a graph and replay it,
//                 if the process has one device.
//
// The last result of a call is its workspace, with element type u8.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "engine/call.h"
#include "engine/cuda/cuda_engine.h"
#include "ffi/target.h"

namespace jax_ub {

// Returns the FFI targets of a process, indexed by Op. With several devices, their
// threads wait for each other in the first run of a call (CudaEngine::ExecuteTogether).
// In this case XLA must not capture the handlers in a graph, because it does not call
// them when it replays the graph.
std::array<Target, kNumOps> CudaTargets(bool has_several_devices);

// Returns the type of the state of an instantiated call.
CallSiteType TheCudaCallSiteType();

// Returns the engine that all handlers of this process share, and creates it at the
// first call. Throws UnsupportedError if the driver or cuBLASLt is missing.
CudaEngine& ProcessCudaEngine();

// Returns the cuBLASLt library that the engine uses, and loads it at the first call.
// Throws UnsupportedError if it is missing.
const CublasLt& ProcessCublasLt();

// Sets additional directories to search for cuBLASLt. Has no effect after the library
// has been loaded.
void SetLibraryPaths(std::vector<std::string> directories);
// Sets the timeout of waits, also for an existing engine.
void SetCudaTimeout(double timeout_s);

// Sets whether all-reduces may use multicast (NVLink SHARP). Must be called before the
// engine exists.
void SetCudaNvls(bool nvls);
bool CudaNvls();

// Replaces the engine of this process in tests; nullptr restores the original engine.
void ReplaceCudaEngine(CudaEngine* engine);

}  // namespace jax_ub
