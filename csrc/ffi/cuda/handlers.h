// The FFI targets of the CUDA engine, for whoever registers them with XLA.
//
//   instantiate   once per custom call of a compiled program: attributes
//   initialize    before every run of it, per device: plans, kernels, the communicator;
//                 the error record of earlier calls. Waits for no peer.
//   execute       enqueues; or is captured once and then replayed by XLA
//
// The last result of a call is its workspace, u8.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "engine/call.h"
#include "engine/cuda/cuda_engine.h"
#include "ffi/target.h"

namespace jax_ub {

std::array<Target, kNumOps> CudaTargets();

CallSiteType TheCudaCallSiteType();

// The engine that all handlers of this process use, made by the first that asks. Throws
// UnsupportedError where there is no driver or no cuBLASLt.
CudaEngine& ProcessCudaEngine();

// The cuBLASLt that it uses; throws UnsupportedError where there is none.
const CublasLt& ProcessCublasLt();

// What the engine is made with; no effect once it is there. `directories`: where else
// cuBLASLt is looked for.
void SetLibraryPaths(std::vector<std::string> directories);
// Of waits; also of the engine that is there.
void SetCudaTimeout(double timeout_s);

// Whether all-reduces may run by multicast; before the engine is there.
void SetCudaNvls(bool nvls);
bool CudaNvls();

// For tests: takes the place of the process's engine, or gives it back (nullptr).
void ReplaceCudaEngine(CudaEngine* engine);

}  // namespace jax_ub
