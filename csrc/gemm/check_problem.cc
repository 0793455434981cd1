#include <stdexcept>
#include <string>

#include "gemm/gemm.h"

namespace jax_ub {

namespace {

[[noreturn]] void Refuse(const std::string& what) {
  throw std::invalid_argument("GEMM: " + what);
}

void CheckBounds(const std::vector<int64_t>& bounds, int64_t size, const char* name) {
  if (bounds.size() < 2 || bounds.front() != 0 || bounds.back() != size) {
    std::string found;
    for (int64_t bound : bounds)
      found += (found.empty() ? "" : ", ") + std::to_string(bound);
    Refuse(std::string(name) + " bounds {" + found + "} must run from 0 to " +
           std::to_string(size));
  }
  for (size_t i = 1; i < bounds.size(); ++i) {
    if (bounds[i] < bounds[i - 1]) {
      Refuse(std::string(name) + " bounds fall from " + std::to_string(bounds[i - 1]) +
             " to " + std::to_string(bounds[i]));
    }
  }
}

void CheckCount(size_t found, size_t expected, const char* name) {
  if (found != expected) {
    Refuse(std::string(name) + " has " + std::to_string(found) +
           " segments, expected " + std::to_string(expected));
  }
}

void CheckOperand(const OperandView& view,
                  int64_t outer,
                  int64_t k,
                  const char* outer_name,
                  const char* k_name) {
  CheckBounds(view.outer_bounds, outer, outer_name);
  CheckBounds(view.inner_bounds, k, k_name);
  if (!InfoOf(view.dtype).is_operand || (!view.scales.empty() && !IsFp8(view.dtype))) {
    Refuse(std::string(outer_name) + " operand is " +
           std::string(DTypeName(view.dtype)) +
           (view.scales.empty() ? ", which GEMMs do not read" : " with scales"));
  }
  const size_t num_outer = view.outer_bounds.size() - 1;
  const size_t num_inner = view.inner_bounds.size() - 1;
  CheckCount(view.segments.size(), num_outer * num_inner, outer_name);
  if (!view.scales.empty()) {
    CheckCount(view.scales.size(), view.segments.size(), "the scales");
  }
  for (size_t i = 0; i < num_outer; ++i) {
    for (size_t j = 0; j < num_inner; ++j) {
      const ConstSegment& segment = view.segments[i * num_inner + j];
      const bool is_empty = view.outer_bounds[i] == view.outer_bounds[i + 1] ||
                            view.inner_bounds[j] == view.inner_bounds[j + 1];
      if (is_empty) continue;
      if (segment.data == nullptr) Refuse(std::string(outer_name) + " segment is null");
      if (segment.outer_stride != 1 && segment.inner_stride != 1) {
        Refuse(std::string(outer_name) + " segment has strides " +
               std::to_string(segment.outer_stride) + " and " +
               std::to_string(segment.inner_stride) + ", one of them must be 1");
      }
    }
  }
}

}  // namespace

void CheckProblem(const GemmProblem& problem) {
  if (problem.m < 0 || problem.n < 0 || problem.k < 0) {
    Refuse("sizes M=" + std::to_string(problem.m) + " N=" + std::to_string(problem.n) +
           " K=" + std::to_string(problem.k) + " must not be negative");
  }
  CheckOperand(problem.a, problem.m, problem.k, "A's M", "A's K");
  CheckOperand(problem.b, problem.n, problem.k, "B's N", "B's K");
  const ResultView& c = problem.c;
  if (!InfoOf(c.dtype).is_result) {
    Refuse("C is " + std::string(DTypeName(c.dtype)) + ", which GEMMs do not store");
  }
  CheckBounds(c.row_bounds, problem.m, "C's M");
  CheckBounds(c.column_bounds, problem.n, "C's N");
  if (c.num_replicas < 1) {
    Refuse("C has " + std::to_string(c.num_replicas) +
           " replicas, expected at least 1");
  }
  const size_t num_segments =
      c.num_replicas * (c.row_bounds.size() - 1) * (c.column_bounds.size() - 1);
  CheckCount(c.segments.size(), num_segments, "C");
  if (problem.addends.size() > kMaxAddends) {
    Refuse(std::to_string(problem.addends.size()) + " addends, at most " +
           std::to_string(kMaxAddends) + " are supported");
  }
  for (const AddendView& addend : problem.addends) {
    CheckCount(addend.segments.size(), num_segments, "an addend");
  }
  if (problem.factors.size() > kMaxFactors) {
    Refuse(std::to_string(problem.factors.size()) + " factors, at most " +
           std::to_string(kMaxFactors) + " are supported");
  }
  const size_t num_parts =
      problem.has_factors_by_k ? problem.a.inner_bounds.size() - 1 : 1;
  for (const FactorView& factor : problem.factors) {
    CheckCount(factor.segments.size(), num_parts * num_segments / c.num_replicas,
               "a factor");
  }
}

}  // namespace jax_ub
