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

// Returns the FFI targets for a process, indexed by Op. With several devices, XLA must
// not capture the calls in a graph. In the first run of a call, the threads of the
// devices wait for each other (CudaEngine::ExecuteTogether), but XLA does not call
// handlers when it replays a graph.
std::array<Target, kNumOps> CudaTargets(bool has_several_devices);

// Returns the FFI type of the state that XLA keeps for each custom call.
CallSiteType TheCudaCallSiteType();

// Returns the engine of this process, which all handlers share. Creates it at the first
// call. Throws UnsupportedError if the driver or cuBLASLt is missing.
CudaEngine& ProcessCudaEngine();

// Returns the engine's cuBLASLt library. Loads it at the first call. Throws
// UnsupportedError if it is missing.
const CublasLt& ProcessCublasLt();

// Sets additional directories in which to search for cuBLASLt. Has no effect once the
// library is loaded.
void SetLibraryPaths(std::vector<std::string> directories);
// Sets how long a rank waits for its peers before its call fails. May also be called
// while the engine exists.
void SetCudaTimeout(double timeout_s);

// Sets whether all-reduces may use NVLink multicast (NVLS, NVLink SHARP). Must be
// called before the engine exists.
void SetCudaNvls(bool nvls);
bool CudaNvls();

// Replaces the engine of this process, for tests. nullptr restores the original engine.
void ReplaceCudaEngine(CudaEngine* engine);

}  // namespace jax_ub
