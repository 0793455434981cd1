// Row-major matrices of f32, and their products, for expected results.
#pragma once

#include <cstdint>
#include <vector>

namespace jax_ub_test {

struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values = std::vector<float>(rows * columns);
};

inline Matrix Transposed(const Matrix& matrix) {
  Matrix transposed{matrix.columns, matrix.rows};
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.columns; ++j) {
      transposed.values[j * matrix.rows + i] = matrix.values[i * matrix.columns + j];
    }
  }
  return transposed;
}

// Adds a [m, k] times b [k, n] to sums [m, n], row-major, in the order of k.
//
// Most of the time of tests under ThreadSanitizer would be spent here. The matrices must
// be copies that no other thread accesses, so that no race can be missed.
[[gnu::no_sanitize("thread")]] inline void AddProduct(
    const float* a, const float* b, int64_t m, int64_t n, int64_t k, float* sums) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      const float left = a[i * k + p];
      for (int64_t j = 0; j < n; ++j) sums[i * n + j] += left * b[p * n + j];
    }
  }
}

// Adds a times b to `sums`.
inline void AddProduct(const Matrix& a, const Matrix& b, Matrix& sums) {
  AddProduct(a.values.data(), b.values.data(), a.rows, b.columns, a.columns,
             sums.values.data());
}

// Adds an addend to `sums`. An addend of one row is added to every row.
inline void Add(const Matrix& addend, Matrix& sums) {
  for (int64_t i = 0; i < sums.rows * sums.columns; ++i) {
    sums.values[i] += addend.values[i % addend.values.size()];
  }
}

}  // namespace jax_ub_test
