// Packs operands into panels of words (see kernels.h for the layout).
#pragma once

#include <string.h>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/simd_dtypes.h"

namespace jax_ub::JAX_UB_KERNELS {

// Template argument of PackCopied and PackTransposed that makes words of f32. A word is
// one element of a source row, converted to f32.
template <DType kDType>
struct Widened {
  static constexpr int64_t kBytes =
      kElementBytes<kDType>;                   // bytes per word in a source row
  static constexpr int64_t kRows = 1;          // source rows per word
  static constexpr int64_t kWordsPerLane = 1;  // see TransposeBlocks

  static Vec LoadWords(const char* row, int64_t) { return LoadAs<kDType>(row); }

  // Loads kVectors * kLanes neighboring elements of a row as f32 words.
  template <int kVectors>
  static void LoadRow(const char* row, int64_t, Vec (&words)[kVectors]) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      words[v] = LoadAs<kDType>(row + v * kLanes * kBytes);
    }
  }

  // Converts one element to a word. Uses a vector, as LoadWords does, so that both
  // functions give the same bits.
  static void CopyWord(const char* row, int64_t, char* word) {
    if constexpr (kDType == DType::kF32) {
      memcpy(word, row, 4);
    } else {
      char element[kLanes * kBytes] = {};
      memcpy(element, row, kBytes);
      float widened[kLanes];
      Store(widened, LoadAs<kDType>(element));
      memcpy(word, widened, 4);
    }
  }
};

// Stores the first kCount words of a vector.
template <int kCount>
inline void StoreFirst(char* to, Vec words) {
  float all[kLanes];
  Store(all, words);
  memcpy(to, all, 4 * kCount);
}

// Number of rows at the end of a full panel that must not be stored as whole vectors.
// Such a store may write beyond its row of kPanel words, into the next kHeldBack rows,
// which must still be in the panel.
template <int kPanel>
inline constexpr int64_t kHeldBack =
    ((kPanel + kLanes - 1) / kLanes * kLanes - 1) / kPanel;

// Packs a source that is contiguous along the outer dimension (M or N) into panels.
// Neighbors along K are `stride` bytes apart. Copies one source row to all panels
// before it reads the next row, since rows are on different pages. Stores rows of a
// full panel as whole vectors. Words that a vector writes beyond the end of its row are
// overwritten by the next rows.
template <typename Words, int kPanel>
void PackCopied(const void* source,
                int64_t stride,
                int64_t outer,
                int64_t num_words,
                void* panels,
                int64_t panel_bytes) {
  constexpr int64_t kRowsAhead = 16;
  const int64_t row_stride = Words::kRows * stride;
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(panels);
  for (int64_t k = 0; k < num_words; ++k, from += row_stride, to += 4 * kPanel) {
    if (k + kRowsAhead < num_words) {
      const char* ahead = from + kRowsAhead * row_stride;
      for (int64_t row = 0; row < Words::kRows; ++row, ahead += stride) {
        for (int64_t at = 0; at < outer * Words::kBytes; at += kLineBytes) {
          Prefetch(ahead + at);
        }
      }
    }
    int64_t o = 0;
    char* words = to;
    if (k < num_words - kHeldBack<kPanel>) {
      for (; o + kPanel <= outer; o += kPanel, words += panel_bytes) {
        // LoadRow is not used here: with it, packing FP8 from memory is 8 % slower (Zen
        // 5, gemm_bench).
#pragma GCC unroll 8
        for (int i = 0; i < kPanel; i += kLanes) {
          Store(words + 4 * i,
                Words::LoadWords(from + (o + i) * Words::kBytes, stride));
        }
      }
    }
    for (; o < outer; o += kPanel, words += panel_bytes) {
      const int64_t size = outer - o < kPanel ? outer - o : kPanel;
      const char* row = from + o * Words::kBytes;
      int64_t i = 0;
      if constexpr (kPanel < kLanes) {
        if (o + kLanes <= outer) {
          StoreFirst<kPanel>(words, Words::LoadWords(row, stride));
          continue;
        }
      }
      for (; i + kLanes <= size; i += kLanes) {
        Store(words + 4 * i, Words::LoadWords(row + i * Words::kBytes, stride));
      }
      for (; i < size; ++i) {
        Words::CopyWord(row + i * Words::kBytes, stride, words + 4 * i);
      }
    }
  }
}

// Converts `count` consecutive elements to f32, four vectors at a time. This is the
// WidenFunction of kernels whose words are f32. `Words` is Widened or, for FP8,
// WidenedByBytes.
template <typename Words>
void WidenRow(const void* from, int64_t count, void* to) {
  constexpr int kVectors = 4;
  const char* element = static_cast<const char*>(from);
  char* word = static_cast<char*>(to);
  int64_t i = 0;
  for (; i + kVectors * kLanes <= count; i += kVectors * kLanes) {
    Vec words[kVectors];
    Words::LoadRow(element + i * Words::kBytes, 0, words);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Store(word + 4 * (i + v * kLanes), words[v]);
  }
  for (; i + kLanes <= count; i += kLanes) {
    Store(word + 4 * i, Words::LoadWords(element + i * Words::kBytes, 0));
  }
  for (; i < count; ++i) {
    Words::CopyWord(element + i * Words::kBytes, 0, word + 4 * i);
  }
}

// Multiplies packed words by the FP8 scales `low`, one per word. This is the
// ScaleFunction of kernels whose words are f32: a word has one element, and needs no
// second scale.
inline void ScaleF32(void* words,
                     int64_t row_bytes,
                     int64_t num_rows,
                     int64_t num_words,
                     const float* low,
                     const float*) {
  char* row = static_cast<char*>(words);
  for (int64_t r = 0; r < num_rows; ++r, row += row_bytes) {
    int64_t i = 0;
    for (; i + kLanes <= num_words; i += kLanes) {
      Store(row + 4 * i, Multiply(Load(row + 4 * i), Load(low + i)));
    }
    for (; i < num_words; ++i) {
      float x;
      memcpy(&x, row + 4 * i, 4);
      x *= low[i];
      memcpy(row + 4 * i, &x, 4);
    }
  }
}

// Packs a full panel that is narrower than a vector. Rows are stored as whole vectors,
// and each row overwrites what the previous rows wrote beyond their ends. Of the last
// kHeldBack rows, only the words within the row are stored.
template <typename Words, int kPanel>
void PackNarrow(const char* from, int64_t stride, int64_t num_words, char* to) {
  for (int64_t next_k = 0; next_k < num_words; next_k += kLanes) {
    const int64_t k = next_k + kLanes <= num_words ? next_k : num_words - kLanes;
    Vec block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i < kPanel ? Words::LoadWords(from + i * stride + k * Words::kBytes, 0)
                            : Zero();
    }
    Transpose(block);
    constexpr int kSpilling = kLanes - static_cast<int>(kHeldBack<kPanel>);
#pragma GCC unroll 16
    for (int i = 0; i < kSpilling; ++i) Store(to + (k + i) * 4 * kPanel, block[i]);
#pragma GCC unroll 16
    for (int i = kSpilling; i < kLanes; ++i) {
      StoreFirst<kPanel>(to + (k + i) * 4 * kPanel, block[i]);
    }
  }
}

// Packs fewer rows than a vector has words, as at the end of an operand or in a panel
// that spans two segments. Transposes a block that is padded with zeros, and stores
// only the words of these rows.
template <typename Words, int kPanel>
void PackFewRows(
    const char* from, int64_t stride, int64_t outer, int64_t num_words, char* to) {
  for (int64_t next_k = 0; next_k < num_words; next_k += kLanes) {
    const int64_t k = next_k + kLanes <= num_words ? next_k : num_words - kLanes;
    Vec block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i < outer ? Words::LoadWords(from + i * stride + k * Words::kBytes, 0)
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

// Transposes a rectangle of at least one block: word (row, column) goes to to + column
// * to_stride + 4 * row. A block of kLanes x kLanes lanes is transposed in registers.
// The last blocks end at the end of the rectangle, so they may overlap the previous
// blocks.
//
// A lane has kWordsPerLane neighboring words of a row, which may be FP8 numbers that
// `store` converts. load(row, column) returns kLanes lanes of a row. store(lanes, to,
// to_stride) stores kLanes lanes of a column, as kWordsPerLane rows.
template <int64_t kWordsPerLane, typename LoadLanes, typename StoreLanes>
inline void TransposeBlocks(int64_t rows,
                            int64_t columns,
                            LoadLanes load,
                            StoreLanes store,
                            char* to,
                            int64_t to_stride) {
  constexpr int64_t kColumns = kWordsPerLane * kLanes;
  for (int64_t next_row = 0; next_row < rows; next_row += kLanes) {
    const int64_t row = next_row + kLanes <= rows ? next_row : rows - kLanes;
    for (int64_t next_column = 0; next_column < columns; next_column += kColumns) {
      const int64_t column =
          next_column + kColumns <= columns ? next_column : columns - kColumns;
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(row + i, column);
      Transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        store(block[i], to + (column + i * kWordsPerLane) * to_stride + 4 * row,
              to_stride);
      }
    }
  }
}

// The `store` argument of TransposeBlocks for lanes of one word. It is a lambda,
// because a pointer to a function would not be inlined.
inline constexpr auto kStoreWords = [](Vec words, char* to, int64_t) {
  Store(to, words);
};

// Packs one panel of a source that is contiguous along K. The panel is contiguous along
// the other dimension, so packing transposes the source.
template <typename Words, int kPanel>
void PackTransposedPanel(
    const char* from, int64_t stride, int64_t outer, int64_t num_words, char* to) {
  constexpr int64_t kBytes = Words::kBytes;
  constexpr int64_t kRowBytes = int64_t{4} * kPanel;
  if constexpr (kPanel < kLanes) {
    if (outer == kPanel && num_words >= kLanes) {
      PackNarrow<Words, kPanel>(from, stride, num_words, to);
      return;
    }
  }
  if (outer < kLanes && num_words >= kLanes) {
    PackFewRows<Words, kPanel>(from, stride, outer, num_words, to);
    return;
  }
  if (num_words < kLanes) {
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t k = 0; k < num_words; ++k) {
        Words::CopyWord(from + o * stride + k * kBytes, 0, to + k * kRowBytes + 4 * o);
      }
    }
    return;
  }
  if constexpr (Words::kWordsPerLane > 1) {
    if (num_words >= Words::kWordsPerLane * kLanes) {
      const auto load = [=](int64_t o, int64_t k) {
        return Load(from + o * stride + k * kBytes);
      };
      const auto store = [](Vec lanes, char* column, int64_t row_bytes) {
        Words::StoreLanes(lanes, column, row_bytes);
      };
      TransposeBlocks<Words::kWordsPerLane>(outer, num_words, load, store, to,
                                            kRowBytes);
      return;
    }
  }
  const auto load = [=](int64_t o, int64_t k) {
    return Words::LoadWords(from + o * stride + k * kBytes, 0);
  };
  TransposeBlocks<1>(outer, num_words, load, kStoreWords, to, kRowBytes);
}

// Packs rows that are contiguous along K into panels of kPanel rows. A panel is
// transposed: it has the first word of each row, then the second word of each row, and
// so on. In the source, a word has Words::kBytes bytes, and rows are `stride` bytes
// apart.
template <typename Words, int kPanel>
void PackTransposed(const void* source,
                    int64_t stride,
                    int64_t outer,
                    int64_t num_words,
                    void* panels,
                    int64_t panel_bytes) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(panels);
  for (int64_t o = 0; o < outer; o += kPanel, to += panel_bytes) {
    const int64_t size = outer - o < kPanel ? outer - o : kPanel;
    PackTransposedPanel<Words, kPanel>(from + o * stride, stride, size, num_words, to);
  }
}

}  // namespace jax_ub::JAX_UB_KERNELS
