// Packing of operands into panels of f32 words (see kernels.h for the layout).
#pragma once

#include <string.h>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/simd_dtypes.h"

namespace jax_ub::JAX_UB_KERNELS {

// One element, through a vector so that it is converted as all others are.
template <DType kDType>
inline void CopyWord(const char* source, char* word) {
  if constexpr (kDType == DType::kF32) {
    memcpy(word, source, 4);
  } else {
    uint16_t element[kLanes] = {};
    memcpy(element, source, 2);
    float widened[kLanes];
    Store(widened, LoadAs<kDType>(element));
    memcpy(word, widened, 4);
  }
}

// Rows at the end of a full panel that whole vectors would read and write past:
// `kHeldBack` later rows of kPanel words or more make up for what a vector has too much.
template <int kPanel>
inline constexpr int64_t kHeldBack =
    ((kPanel + kLanes - 1) / kLanes * kLanes - 1) / kPanel;

// The source is contiguous along the outer dimension; `stride` is that of k. A full panel
// is written in whole vectors: what spills over a row's end is overwritten by the rows
// after it.
template <DType kDType, int kPanel>
void PackCopied(
    const void* source, int64_t stride, int64_t outer, int64_t num_words, void* panel) {
  constexpr int64_t kBytes = kElementBytes<kDType>;
  constexpr int64_t kRowBytes = int64_t{4} * kPanel;
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(panel);
  int64_t k = 0;
  if (outer == kPanel) {
    for (; k < num_words - kHeldBack<kPanel>; ++k, from += stride, to += kRowBytes) {
#pragma GCC unroll 8
      for (int o = 0; o < kPanel; o += kLanes) {
        Store(to + 4 * o, LoadAs<kDType>(from + o * kBytes));
      }
    }
  }
  for (; k < num_words; ++k, from += stride, to += kRowBytes) {
    int64_t o = 0;
    for (; o + kLanes <= outer; o += kLanes) {
      Store(to + 4 * o, LoadAs<kDType>(from + o * kBytes));
    }
    for (; o < outer; ++o) CopyWord<kDType>(from + o * kBytes, to + 4 * o);
  }
}

// A full panel that is narrower than a vector: whole vectors are stored, and what spills
// over a row's end is overwritten by the rows after it. The last rows are stored exactly.
template <DType kDType, int kPanel>
void PackNarrow(const char* from, int64_t stride, int64_t num_words, char* to) {
  for (int64_t next_k = 0; next_k < num_words; next_k += kLanes) {
    const int64_t k = next_k + kLanes <= num_words ? next_k : num_words - kLanes;
    Vec block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i < kPanel
                     ? LoadAs<kDType>(from + i * stride + k * kElementBytes<kDType>)
                     : Zero();
    }
    Transpose(block);
    constexpr int kSpilling = kLanes - static_cast<int>(kHeldBack<kPanel>);
#pragma GCC unroll 16
    for (int i = 0; i < kSpilling; ++i) Store(to + (k + i) * 4 * kPanel, block[i]);
#pragma GCC unroll 16
    for (int i = kSpilling; i < kLanes; ++i) {
      float row[kLanes];
      Store(row, block[i]);
      memcpy(to + (k + i) * 4 * kPanel, row, 4 * kPanel);
    }
  }
}

// Fewer rows than a vector has words: the end of an operand, or a panel that two segments
// share. The block is filled up with zeros, and only the words of the rows are stored.
template <DType kDType, int kPanel>
void PackFewRows(
    const char* from, int64_t stride, int64_t outer, int64_t num_words, char* to) {
  for (int64_t next_k = 0; next_k < num_words; next_k += kLanes) {
    const int64_t k = next_k + kLanes <= num_words ? next_k : num_words - kLanes;
    Vec block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i < outer
                     ? LoadAs<kDType>(from + i * stride + k * kElementBytes<kDType>)
                     : Zero();
    }
    Transpose(block);
    float rows[kLanes][kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) Store(rows[i], block[i]);
    for (int i = 0; i < kLanes; ++i) {
      char* row = to + (k + i) * 4 * kPanel;
      for (int64_t o = 0; o < outer; ++o) memcpy(row + 4 * o, &rows[i][o], 4);
    }
  }
}

// The source is contiguous along K; `stride` is that of the outer dimension. Blocks of
// kLanes x kLanes words are transposed in registers; the last block of either dimension
// is moved back to end where the rectangle ends, and overlaps the one before.
template <DType kDType, int kPanel>
void PackTransposed(
    const void* source, int64_t stride, int64_t outer, int64_t num_words, void* panel) {
  constexpr int64_t kBytes = kElementBytes<kDType>;
  constexpr int64_t kRowBytes = int64_t{4} * kPanel;
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(panel);
  if constexpr (kPanel < kLanes) {
    if (outer == kPanel && num_words >= kLanes) {
      PackNarrow<kDType, kPanel>(from, stride, num_words, to);
      return;
    }
  }
  if (outer < kLanes && num_words >= kLanes) {
    PackFewRows<kDType, kPanel>(from, stride, outer, num_words, to);
    return;
  }
  if (num_words < kLanes) {
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t k = 0; k < num_words; ++k) {
        CopyWord<kDType>(from + o * stride + k * kBytes, to + k * kRowBytes + 4 * o);
      }
    }
    return;
  }
  for (int64_t next_o = 0; next_o < outer; next_o += kLanes) {
    const int64_t o = next_o + kLanes <= outer ? next_o : outer - kLanes;
    for (int64_t next_k = 0; next_k < num_words; next_k += kLanes) {
      const int64_t k = next_k + kLanes <= num_words ? next_k : num_words - kLanes;
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        block[i] = LoadAs<kDType>(from + (o + i) * stride + k * kBytes);
      }
      Transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        Store(to + (k + i) * kRowBytes + 4 * o, block[i]);
    }
  }
}

}  // namespace jax_ub::JAX_UB_KERNELS
