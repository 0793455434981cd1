// Sets the floating-point mode of XLA:CPU: subnormal f32 operands and results are
// flushed to zero, and inexact results are rounded to nearest.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_ub {

// Sets the floating-point mode for the calling thread, and restores the previous mode
// at the end of the scope. This is necessary because a thread inherits the mode of the
// thread that starts it, which may be another mode.
class ArithmeticMode {
 public:
  ArithmeticMode() : saved_(Control()) { SetControl(kControl); }
  ~ArithmeticMode() { SetControl(saved_); }
  ArithmeticMode(const ArithmeticMode&) = delete;
  ArithmeticMode& operator=(const ArithmeticMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  // Value of MXCSR: flushes subnormal results (FTZ) and operands (DAZ) to zero, masks
  // all exceptions, and rounds to nearest.
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
