// Emulates the AMX intrinsics that amx_tile_kernel.h uses in plain C++, so that its
// tiles run in a unit test on machines without AMX. See also emulated_avx512.h.
// Follows Intel's description of each operation. Configured registers have 16 rows of
// 64 bytes; using one that is not configured ends the program.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <bit>

struct EmulatedTile {
  static constexpr int kRows = 16;
  static constexpr int kRowBytes = 64;

  char bytes[kRows][kRowBytes];

  float* Floats(int row) { return reinterpret_cast<float*>(bytes[row]); }
  const uint16_t* Halves(int row) const {
    return reinterpret_cast<const uint16_t*>(bytes[row]);
  }
};

struct EmulatedTiles {
  bool are_configured = false;
  alignas(64) EmulatedTile tiles[8];

  EmulatedTile& operator[](int i) {
    if (!are_configured) abort();
    return tiles[i];
  }
};

inline thread_local EmulatedTiles emulated_tiles;

// Supports only the configuration of the kernels: palette 1 and all registers of full
// size.
inline void _tile_loadconfig(const void* configuration) {
  const uint8_t* bytes = static_cast<const uint8_t*>(configuration);
  if (bytes[0] != 1 || bytes[1] != 0) abort();
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    if (row_bytes != EmulatedTile::kRowBytes) abort();
    if (bytes[48 + i] != EmulatedTile::kRows) abort();
  }
  memset(emulated_tiles.tiles, 0, sizeof emulated_tiles.tiles);
  emulated_tiles.are_configured = true;
}

inline void _tile_release() { emulated_tiles.are_configured = false; }

inline void _tile_zero(int tile) { emulated_tiles[tile] = {}; }

inline void _tile_loadd(int tile, const void* base, int64_t stride) {
  for (int r = 0; r < EmulatedTile::kRows; ++r) {
    memcpy(emulated_tiles[tile].bytes[r], static_cast<const char*>(base) + r * stride,
           EmulatedTile::kRowBytes);
  }
}

inline void _tile_stored(int tile, void* base, int64_t stride) {
  for (int r = 0; r < EmulatedTile::kRows; ++r) {
    memcpy(static_cast<char*>(base) + r * stride, emulated_tiles[tile].bytes[r],
           EmulatedTile::kRowBytes);
  }
}

// sums[m][n] += sum over the pairs k of a[m][2k] b[k][2n] and of a[m][2k + 1] b[k][2n + 1],
// which are summed separately.
inline void _tile_dpbf16ps(int sums, int a, int b) {
  auto widen = [](uint16_t buffer) {
    return std::bit_cast<float>(static_cast<uint32_t>(buffer) << 16);
  };
  for (int m = 0; m < EmulatedTile::kRows; ++m) {
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        const uint16_t* x = emulated_tiles[a].Halves(m) + 2 * k;
        const uint16_t* y = emulated_tiles[b].Halves(k) + 2 * n;
        even += widen(x[0]) * widen(y[0]);
        odd += widen(x[1]) * widen(y[1]);
      }
      emulated_tiles[sums].Floats(m)[n] += even + odd;
    }
  }
}
