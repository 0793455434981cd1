"""How long a GEMM takes on a GPU: its tiles, scheduled on the multiprocessors.

A kernel of t tiles on s multiprocessors takes ceil(t / s) waves. Kernels of several
streams share the multiprocessors: a tile of a later kernel begins where one is free.
"""

import dataclasses
import functools
import heapq
import math

from jax_ub.simulate.hardware import Hardware

# Rows, columns and relative efficiency of the tiles that a library chooses from. The
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
# The GEMM whose rate `Hardware.flops_per_s` is.
_ANCHOR = 8192
# A kernel of more waves than this is scheduled in coarser pieces.
_WAVES = 24


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The sizes of one product, `[m, k]` times `[k, n]`."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The fastest tiles for a product on its own."""

    seconds: float
    num_tiles: int
    tile_s: float


def processor_flops(hardware: Hardware, itemsize: int) -> float:
    """The rate of one multiprocessor at full tiles, so that 8192^3 has its rate."""
    tiles = math.ceil(_ANCHOR / 128) * math.ceil(_ANCHOR / 256)
    waves = math.ceil(tiles / hardware.processors)
    filled = tiles / (waves * hardware.processors)
    return hardware.flops_of(itemsize) / filled / hardware.processors


@functools.lru_cache(maxsize=4096)
def tile(hardware: Hardware, gemm: Gemm, processors: int, itemsize: int) -> Tiling:
    """Chooses tiles: fewest seconds for the product alone on `processors`."""
    rate = processor_flops(hardware, itemsize)
    candidates = []
    for rows, columns, efficiency in _TILES:
        count = math.ceil(gemm.m / rows) * math.ceil(gemm.n / columns)
        tile_s = 2.0 * rows * columns * gemm.k / (rate * efficiency)
        candidates.append(Tiling(math.ceil(count / processors) * tile_s, count, tile_s))
    return min(candidates, key=lambda tiling: tiling.seconds)


def library_seconds(hardware: Hardware, gemm: Gemm, itemsize: int) -> float:
    """One GEMM of the vendor's library, alone; power bounds the long ones."""
    if hardware.is_host:
        return gemm.flops / hardware.flops_of(itemsize)
    whole = tile(hardware, gemm, hardware.processors, itemsize).seconds
    return max(whole, gemm.flops / hardware.flops_of(itemsize))


class Processors:
    """The multiprocessors of one rank, and the streams that kernels are issued on."""

    def __init__(
        self, hardware: Hardware, streams: int, itemsize: int, count: int | None = None
    ):
        """Everything is free at time 0; `count` defaults to those not reserved."""
        self._hardware = hardware
        self._itemsize = itemsize
        own = hardware.processors - hardware.reserved_processors
        self._count = own if count is None else count
        self._free = [0.0] * self._count
        self._streams = [0.0] * streams
        self._issued = 0

    def run(self, available: float, gemm: Gemm) -> tuple[float, float]:
        """Issues a kernel on the next stream; returns when it begins and ends."""
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
