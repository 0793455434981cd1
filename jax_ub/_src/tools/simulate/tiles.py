"""Models the time of a GEMM on a GPU: its tiles, scheduled on the multiprocessors.

A kernel of t tiles on s multiprocessors takes ceil(t / s) waves. Kernels of several
streams share the multiprocessors: a tile of a later kernel starts as soon as a
multiprocessor is free.
"""

import dataclasses
import functools
import heapq
import math

from jax_ub._src.tools.simulate.hardware import Hardware

# Tiles that a library chooses from: rows, columns and relative efficiency. The
# efficiencies are assumptions.
_TILES = (
    (128, 256, 1.00),
    (256, 128, 1.00),
    (192, 128, 0.96),
    (128, 192, 0.96),
    (128, 128, 0.92),
    (64, 256, 0.88),
    (64, 128, 0.78),
    (64, 64, 0.60),
)
# `Hardware.flops_per_s` is the rate of a GEMM with M = K = N = 8192.
_ANCHOR = 8192
# A kernel of more waves than this is simulated in groups of tiles, to save time.
_WAVES = 24


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The sizes of a local GEMM that multiplies [m, k] by [k, n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Returns the floating-point operations of the GEMM, 2 m n k."""
        return 2.0 * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The fastest tile size for a GEMM that runs alone on a GPU, and its time.

    The GEMM has `num_tiles` tiles of `tile_s` seconds each.
    """

    seconds: float
    num_tiles: int
    tile_s: float


def processor_flops(hardware: Hardware, itemsize: int) -> float:
    """Returns the modeled FLOP/s of one multiprocessor of a GPU.

    The rate is chosen so that a GEMM with M = K = N = 8192 takes its measured time.
    """
    tiles = math.ceil(_ANCHOR / 128) * math.ceil(_ANCHOR / 256)
    waves = math.ceil(tiles / hardware.processors)
    filled = tiles / (waves * hardware.processors)
    return hardware.flops_of(itemsize) / filled / hardware.processors


@functools.lru_cache(maxsize=4096)
def tile(hardware: Hardware, gemm: Gemm, processors: int, itemsize: int) -> Tiling:
    """Returns the fastest tile size for a GEMM alone on `processors` processors."""
    rate = processor_flops(hardware, itemsize)
    candidates = []
    for rows, columns, efficiency in _TILES:
        count = math.ceil(gemm.m / rows) * math.ceil(gemm.n / columns)
        tile_s = 2.0 * rows * columns * gemm.k / (rate * efficiency)
        candidates.append(Tiling(math.ceil(count / processors) * tile_s, count, tile_s))
    return min(candidates, key=lambda tiling: tiling.seconds)


def library_seconds(hardware: Hardware, gemm: Gemm, itemsize: int) -> float:
    """Returns the seconds of a vendor library's GEMM on this hardware.

    On a GPU, it is at least the time that the power limit allows.
    """
    if hardware.is_host:
        return gemm.flops / hardware.flops_of(itemsize)
    whole = tile(hardware, gemm, hardware.processors, itemsize).seconds
    return max(whole, gemm.flops / hardware.flops_of(itemsize))


class Processors:
    """Simulates the multiprocessors of one GPU and the streams that launch kernels."""

    def __init__(
        self, hardware: Hardware, streams: int, itemsize: int, count: int | None = None
    ):
        """Creates idle multiprocessors at time 0.

        `count` defaults to all multiprocessors without the reserved ones.
        """
        self._hardware = hardware
        self._itemsize = itemsize
        own = hardware.processors - hardware.reserved_processors
        self._count = own if count is None else count
        self._free = [0.0] * self._count
        self._streams = [0.0] * streams
        self._issued = 0

    def run(self, available: float, gemm: Gemm) -> tuple[float, float]:
        """Simulates a kernel on the next stream; returns its start and end times.

        `available` is the time at which its operands are available.
        """
        stream = self._issued % len(self._streams)
        self._issued += 1
        start = max(available, self._streams[stream]) + self._hardware.launch_s
        tiling = tile(self._hardware, gemm, self._count, self._itemsize)
        merged = max(1, tiling.num_tiles // (self._count * _WAVES))
        whole, rest = divmod(tiling.num_tiles, merged)
        end = start
        for merged_tiles in [merged] * whole + ([rest] if rest else []):
            begin = max(heapq.heappop(self._free), start)
            done = begin + tiling.tile_s * merged_tiles
            heapq.heappush(self._free, done)
            end = max(end, done)
        self._streams[stream] = end
        return start, end
