#include "gemm/cpu/peak.h"

#include <time.h>

#include <algorithm>
#include <cstdint>

#include "gemm/cpu/isa.h"
#include "platform/deadline.h"

namespace jax_ub {

namespace {

// Number of tiles that are computed between two reads of the clock. It is large enough
// that reading the clock takes little time.
constexpr int kTilesPerLook = 16;
// Size of the panels of A and B together, in bytes. They and the sums must fit into the
// L1 cache, which has at least 32 KiB. Within it, longer panels are faster, because
// sums are stored less often. On Zen 3 (tiles of 6 x 16), panels of 64 words reach 0.97
// of the rate of 320 words, and panels of 352 words 0.99.
constexpr int64_t kPanelsBytes = 28 << 10;

}  // namespace

double ThreadCpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

double MeasureTiles(const KernelSet& kernels, double duration_s, Scratch& scratch) {
  const int64_t rows = kernels.tile_rows;
  const int64_t columns = kernels.tile_columns;
  const int64_t num_steps = kPanelsBytes / (4 * kStepWords * (rows + columns));
  const int64_t num_words = kStepWords * num_steps;
  const int64_t panels_bytes = 4 * num_words * (rows + columns);
  std::byte* b = scratch.Reserve(panels_bytes + 4 * rows * columns);
  std::byte* a = b + 4 * num_words * columns;
  // With bytes 0x3f, every f32 or bf16 in A and B is about 0.75, so that no product or
  // sum is subnormal or infinite.
  std::fill_n(b, panels_bytes, std::byte{0x3f});
  const TileOutput sums = {.to = b + panels_bytes, .to_stride = 4 * columns};
  const bool is_of_rows = kernels.panel_of_a == 1;
  const TileFunction tile =
      (is_of_rows ? kernels.tile_of_rows : kernels.tile_of_columns)[rows - 1];
  const int64_t a_stride = 4 * (is_of_rows ? num_words : rows);
  const ScopedKernelState at_work(kernels);
  PrefetchCursor nothing;
  int64_t num_tiles = 0;
  const Deadline deadline = Deadline::After(duration_s);
  const double start_s = ThreadCpuSeconds();
  do {
    for (int i = 0; i < kTilesPerLook; ++i) {
      tile(a, a_stride, {b}, num_words, sums, nothing);
    }
    num_tiles += kTilesPerLook;
  } while (!deadline.Expired());
  const double elapsed_s = ThreadCpuSeconds() - start_s;
  return 2.0 * num_tiles * rows * columns * num_words * kernels.k_per_word / elapsed_s;
}

}  // namespace jax_ub
