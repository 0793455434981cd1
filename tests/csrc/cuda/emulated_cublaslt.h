// Emulates cuBLASLt without a GPU, on the streams of emulated_driver.h, and checks that
// its rules are kept. Every algorithm adds in f32, in the order of the contraction.
#pragma once

#include <cstdint>

#include "gemm/cuda/cublaslt.h"

namespace jax_ub {

const CublasLt& EmulatedCublasLt();

struct EmulatedCublasLtState {
  int64_t num_handles = 0;
  int64_t num_objects = 0;  // live descriptions, layouts, preferences
  int64_t num_heuristics = 0;
  int64_t num_matmuls = 0;     // enqueued or captured
  int64_t last_algorithm = 0;  // of the last of them: its place among those proposed
};
EmulatedCublasLtState ReadEmulatedCublasLt();

// Makes the library behave as another version, such as 120100, at the next heuristic.
void SetEmulatedCublasLtVersion(size_t version);

// Makes later heuristics find no algorithm if `no_algorithms`, and later matmuls return
// `result`.
void RefuseEmulatedMatmuls(bool no_algorithms,
                           lt::Status result = lt::Status::kSuccess);

}  // namespace jax_ub
