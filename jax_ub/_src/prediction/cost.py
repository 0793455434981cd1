"""Models the cost of a call: the sizes of its GEMM, its bytes, and a GPU's GEMMs.

A GPU's kernel of t tiles on s multiprocessors takes ceil(t / s) waves.
"""

import collections
import dataclasses
import heapq
import math

from jax_ub._src.prediction.hardware import Hardware

PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_GATHERS = ("all_gather_matmul", "all_gather")
# Tile sizes from which a GEMM library chooses: rows, columns and relative efficiency.
# The efficiencies are assumptions, not measurements.
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
# Number of tiles, of 128 x 256, in the GEMM with M = K = N = 8192 whose measured rate
# is `Hardware.flops_per_s`.
_ANCHOR_TILES = (8192 // 128) * (8192 // 256)
# Largest number of waves (rounds in which each multiprocessor computes one tile) that
# are simulated tile by tile. A larger GEMM is simulated in groups of tiles.
_MAX_WAVES = 24


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The sizes of a GEMM on one rank, which multiplies [m, k] by [k, n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True)
class Workload:
    """A simulated call: its op, its global sizes, and the sizes of its elements.

    There are M tokens, K contracted features and N output features. Operands have
    `itemsize` bytes per element, partial sums on the wire `partial_itemsize`, and an
    all-gathered array `gathered_itemsize`.
    """

    op: str
    M: int
    K: int
    N: int
    num_ranks: int
    itemsize: int = 2
    partial_itemsize: int = 2
    gathered_itemsize: int = 2

    @property
    def gathers(self) -> bool:
        return self.op in _GATHERS

    @property
    def has_product(self) -> bool:
        return self.op in PRODUCTS

    def gemm_of(self, num_rows: int) -> Gemm:
        """Returns the sizes of the GEMM that one rank computes for `num_rows` rows."""
        if self.gathers:
            return Gemm(num_rows, self.N // self.num_ranks, self.K)
        return Gemm(num_rows, self.N, self.K // self.num_ranks)

    def split_rows(self, num_splits: int) -> int:
        """Returns the number of rows in a split of a chunk (one rank's rows)."""
        return math.ceil(self.M / (self.num_ranks * num_splits))

    @property
    def result_itemsize(self) -> int:
        """Returns the bytes per element of a result: 2 if the operands are FP8."""
        return max(self.itemsize, 2)

    def wire_bytes(self, payload: str, num_rows: int) -> int:
        """Returns how many bytes are sent for `num_rows` rows of a payload."""
        if self.gathers:
            return num_rows * self.K * self.gathered_itemsize
        is_partial = payload == "partial"
        size = self.partial_itemsize if is_partial else self.result_itemsize
        return num_rows * self.N * size

    def reduce_bytes(self, num_rows: int) -> int:
        """Returns the bytes read and written to sum `num_rows` rows over all ranks."""
        parts = self.num_ranks * self.partial_itemsize + self.result_itemsize
        return num_rows * self.N * parts

    @property
    def one_shot_bytes(self) -> int:
        """Returns the bytes that a rank sends if every peer gets all its rows."""
        return (self.num_ranks - 1) * self.wire_bytes("partial", self.M)

    def moved_bytes(self, itemsize: int) -> float:
        """Returns the minimum number of bytes that each rank sends in this op.

        The array that is gathered or summed has `itemsize` bytes per element.
        """
        share = (self.num_ranks - 1) / self.num_ranks
        once = share * self.M * (self.K if self.gathers else self.N) * itemsize
        return 2 * once if self.op.endswith("all_reduce") else once


def gemm_s(gemm: Gemm, part: Hardware, itemsize: int) -> tuple[float, float]:
    """Returns a GEMM's seconds at the peak rate and in a vendor's library.

    `part` has the rates of one rank.
    """
    seconds = gemm.flops / part.flops_of(itemsize)
    if part.is_host:
        return seconds, seconds
    return seconds, max(seconds, _tiling(part, gemm, part.processors, itemsize)[0])


def _tiling(
    hardware: Hardware, gemm: Gemm, processors: int, itemsize: int
) -> tuple[float, int, float]:
    """Finds the tiles with which a GEMM is fastest if it runs alone on a GPU.

    Returns the seconds of the GEMM, its number of tiles, and the seconds of a tile.
    """
    # The rate of one multiprocessor, computed from the time of a GEMM of 8192^3, which
    # takes `waves` rounds of tiles.
    waves = math.ceil(_ANCHOR_TILES / hardware.processors)
    rate = hardware.flops_of(itemsize) * waves / _ANCHOR_TILES
    found = []
    for rows, columns, efficiency in _TILES:
        num_tiles = math.ceil(gemm.m / rows) * math.ceil(gemm.n / columns)
        tile_s = 2.0 * rows * columns * gemm.k / (rate * efficiency)
        seconds = math.ceil(num_tiles / processors) * tile_s
        found.append((seconds, num_tiles, tile_s))
    return min(found, key=lambda tiling: tiling[0])


class Processors:
    """Simulates a GPU's multiprocessors and the streams that launch GEMM kernels.

    A tile of a later kernel starts as soon as a multiprocessor is free. Reserved
    multiprocessors run no tiles.
    """

    def __init__(self, hardware: Hardware, streams: int, itemsize: int):
        self._hardware, self._itemsize = hardware, itemsize
        self._count = hardware.processors - hardware.reserved_processors
        self._free = [0.0] * self._count
        self._streams = collections.deque([0.0] * streams)  # the next stream first

    def run(self, available: float, gemm: Gemm) -> tuple[float, float]:
        """Simulates a GEMM kernel on the next stream; returns its start and end time.

        The operands of the GEMM are available at the time `available`.
        """
        start = max(available, self._streams.popleft()) + self._hardware.launch_s
        _, total, tile_s = _tiling(self._hardware, gemm, self._count, self._itemsize)
        merged = max(1, total // (self._count * _MAX_WAVES))
        whole, rest = divmod(total, merged)
        end = start
        for num_tiles in [merged] * whole + [rest] * (rest > 0):
            done = max(self._free[0], start) + tile_s * num_tiles
            heapq.heapreplace(self._free, done)
            end = max(end, done)
        self._streams.append(end)
        return start, end

    def run_on_all(self, available: float, seconds: float) -> tuple[float, float]:
        """Simulates a kernel that occupies every multiprocessor for `seconds`.

        Each multiprocessor first finishes its tile. Returns the start and end.
        """
        start = available + self._hardware.launch_s
        self._free = sorted(max(free, start) + seconds for free in self._free)
        return start, self._free[-1]
