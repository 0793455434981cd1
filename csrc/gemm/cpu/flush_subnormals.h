// Arithmetic as XLA:CPU does it: subnormal f32 operands and results count as zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_ub {

// Holds for the calling thread until the end of the scope.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(Control()) { SetControl(saved_ | kFlush); }
  ~FlushSubnormals() { SetControl(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // results (FTZ) and operands (DAZ)
  static Word Control() { return _mm_getcsr(); }
  static void SetControl(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = Word{1} << 24;  // FPCR.FZ
  static Word Control() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void SetControl(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kFlush = 0;
  static Word Control() { return 0; }
  static void SetControl(Word) {}
#endif

  const Word saved_;
};

}  // namespace jax_ub
