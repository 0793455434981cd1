// Random products that a GPU supports: operands of one dtype, one replica of the
// result, and all arrays in one allocation, where some segments are adjacent and others
// are barely aligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>

#include "compare_gemm.h"
#include "random_gemm.h"

namespace jax_ub {

// Returns problem number `seed`, or the next one whose operands have one dtype.
inline std::unique_ptr<RandomGemm> MakeDeviceGemm(uint64_t seed, Values values) {
  Random random(seed);
  // The sizes are small, because only the boundaries between pieces matter.
  const GemmSizes sizes = {.m = Pick(random, 1, Pick(random, 1, 40)),
                           .n = Pick(random, 1, Pick(random, 1, 40)),
                           .k = Pick(random, 0, Pick(random, 0, 60)),
                           .max_parts = Pick(random, 1, 4)};
  std::unique_ptr<RandomGemm> gemm;
  do {
    gemm = MakeGemm(seed, sizes, values);
    seed += 1000003;
  } while (gemm->problem.a.dtype != gemm->problem.b.dtype);
  ResultView& c = gemm->problem.c;
  const size_t num_segments = c.segments.size() / c.num_replicas;
  c.num_replicas = 1;
  c.segments.resize(num_segments);
  for (AddendView& addend : gemm->problem.addends) {
    addend.segments.resize(num_segments);
  }
  return gemm;
}

inline int64_t ArenaBytes(const RandomGemm& gemm) {
  int64_t size_bytes = 0;
  for (const Buffers::Buffer& buffer : gemm.buffers.all()) {
    size_bytes += buffer.size_bytes + 256;
  }
  return size_bytes;
}

// Copies the buffers into `arena`, which has ArenaBytes, and points the problem to the
// copies.
inline void MoveInto(std::byte* arena, Random& random, RandomGemm& gemm) {
  std::map<const std::byte*, std::byte*> moved;
  for (const Buffers::Buffer& buffer : gemm.buffers.all()) {
    const int64_t gaps[] = {0, 0, 4, 8, 16, 128};
    arena += gaps[Pick(random, 0, 5)];
    std::memcpy(arena, buffer.data.get(), buffer.size_bytes);
    moved[buffer.data.get()] = arena;
    // Keeps the elements of every dtype aligned to their size.
    arena += (buffer.size_bytes + 3) / 4 * 4;
  }
  GemmProblem& problem = gemm.problem;
  for (OperandView* view : {&problem.a, &problem.b}) {
    for (ConstSegment& segment : view->segments) segment.data = moved.at(segment.data);
  }
  for (Segment& segment : problem.c.segments) segment.data = moved.at(segment.data);
  for (AddendView& addend : problem.addends) {
    for (AddendSegment& segment : addend.segments) {
      segment.data = moved.at(segment.data);
    }
  }
}

}  // namespace jax_ub
