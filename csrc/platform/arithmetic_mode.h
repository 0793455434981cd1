// Arithmetic as XLA:CPU does it: subnormal f32 operands and results count as zero, and what
// is not exact is rounded to the nearest.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_ub {

// Holds for the calling thread until the end of the scope, whatever mode it is in: a thread
// inherits that of the one that started it.
class ArithmeticMode {
 public:
  ArithmeticMode() : saved_(Control()) { SetControl(kControl); }
  ~ArithmeticMode() { SetControl(saved_); }
  ArithmeticMode(const ArithmeticMode&) = delete;
  ArithmeticMode& operator=(const ArithmeticMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  // Results (FTZ) and operands (DAZ); no exception traps.
  static constexpr Word kControl = 0x8000 | 0x0040 | 0x1f80;
  static Word Control() { return _mm_getcsr(); }
  static void SetControl(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kControl = Word{1} << 24;  // FPCR.FZ
  static Word Control() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void SetControl(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kControl = 0;
  static Word Control() { return 0; }
  static void SetControl(Word) {}
#endif

  const Word saved_;
};

}  // namespace jax_ub
