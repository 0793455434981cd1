"""Simulates the engine's schedules: computes when a rank starts and ends its steps.

The duration of a step is given by a cost model of the hardware. One rank represents
all: data arrives from a peer when this rank sends the same data.

A GPU rank has two lanes: its multiprocessors, and the stream that communicates, which
launches copies, waits and sums one after the other. GEMMs are launched on other
streams, and share the multiprocessors with sums and local copies. A kernel of t tiles
on s multiprocessors takes ceil(t / s) waves. A host rank is one thread, which runs one
step after the other and blocks in waits.
"""

import collections
import dataclasses
import heapq
import math
import operator
from typing import NamedTuple

from jax_ub._src.methods import DEFAULT_SPLITS, MethodChoice
from jax_ub._src.prediction.hardware import Hardware
from jax_ub._src.runtime import cpu_engine

ALL_CHUNKS = -1
_SUMMED_PRODUCTS = ("matmul_reduce_scatter", "matmul_all_reduce")
PRODUCTS = ("all_gather_matmul", *_SUMMED_PRODUCTS)
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
_data = operator.attrgetter("payload", "chunk", "split")  # what a step reads or writes


class Gemm(NamedTuple):
    """A GEMM of one rank, [m, k] times [k, n], of `itemsize` bytes per element."""

    m: int
    n: int
    k: int
    itemsize: int = 2


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
        return self.op.startswith("all_gather")

    @property
    def width(self) -> int:
        """Returns the number of features of the array that is gathered or summed."""
        return self.N if self.op in _SUMMED_PRODUCTS else self.K

    def gemm_of(self, num_rows: int) -> Gemm:
        """Returns the sizes of the GEMM that one rank computes for `num_rows` rows."""
        if self.op in _SUMMED_PRODUCTS:
            return Gemm(num_rows, self.N, self.K // self.num_ranks, self.itemsize)
        return Gemm(num_rows, self.N // self.num_ranks, self.K, self.itemsize)

    @property
    def sent_itemsize(self) -> int:
        """Returns the bytes per element of the gathered array or the sum."""
        # Sums of FP8 products have 16 bits.
        return self.gathered_itemsize if self.gathers else max(self.itemsize, 2)

    def wire_bytes(self, payload: str, num_rows: int) -> int:
        """Returns how many bytes are sent for `num_rows` rows of a payload."""
        is_partial = payload == "partial"
        itemsize = self.partial_itemsize if is_partial else self.sent_itemsize
        return num_rows * self.width * itemsize

    def reduce_bytes(self, num_rows: int) -> int:
        """Returns the bytes read and written to sum `num_rows` rows over all ranks."""
        parts = self.num_ranks * self.partial_itemsize + self.sent_itemsize
        return num_rows * self.width * parts

    @property
    def one_shot_bytes(self) -> int:
        """Returns the bytes of a rank that sends all its rows to every peer."""
        return (self.num_ranks - 1) * self.wire_bytes("partial", self.M)

    def moved_bytes(self, itemsize: int) -> float:
        """Returns how many bytes each rank must send at `itemsize` per element."""
        share = (self.num_ranks - 1) / self.num_ranks
        once = share * self.M * self.width * itemsize
        return 2 * once if self.op.endswith("all_reduce") else once


def gemm_s(gemm: Gemm, part: Hardware) -> tuple[float, float]:
    """Returns a GEMM's seconds at a rank's full rate and in a vendor's library."""
    seconds = 2.0 * gemm.m * gemm.n * gemm.k / part.flops_of(gemm.itemsize)
    if part.is_host:
        return seconds, seconds
    num_tiles, tile_s = _tile(gemm, part, part.processors)
    return seconds, max(seconds, math.ceil(num_tiles / part.processors) * tile_s)


def _tile(gemm: Gemm, hardware: Hardware, processors: int) -> tuple[int, float]:
    """Returns the number of tiles of a GEMM, and the seconds that a tile takes.

    The tiles have the size with which the GEMM is fastest if it runs alone on a GPU.
    """
    # The rate of one multiprocessor, computed from the time of a GEMM of 8192^3, which
    # takes `waves` rounds of tiles.
    waves = math.ceil(_ANCHOR_TILES / hardware.processors)
    rate = hardware.flops_of(gemm.itemsize) * waves / _ANCHOR_TILES
    found = []
    for rows, columns, efficiency in _TILES:
        num_tiles = math.ceil(gemm.m / rows) * math.ceil(gemm.n / columns)
        tile_s = 2.0 * rows * columns * gemm.k / (rate * efficiency)
        found.append((num_tiles, tile_s))
    return min(found, key=lambda tiles: math.ceil(tiles[0] / processors) * tiles[1])


class Processors:
    """Simulates a GPU's multiprocessors and the streams that launch GEMM kernels.

    A tile of a later kernel starts as soon as a multiprocessor is free. Reserved
    multiprocessors run no tiles. The operands of a kernel are complete at `ready_s`.
    """

    def __init__(self, hardware: Hardware, streams: int):
        self._hardware = hardware
        self._count = hardware.processors - hardware.reserved_processors
        self._free = [0.0] * self._count
        self._streams = collections.deque([0.0] * streams)  # the next stream first

    def run(self, ready_s: float, gemm: Gemm) -> tuple[float, float]:
        """Simulates a GEMM kernel on the next stream; returns its start and end."""
        start = max(ready_s, self._streams.popleft()) + self._hardware.launch_s
        num_tiles, tile_s = _tile(gemm, self._hardware, self._count)
        merged = max(1, num_tiles // (self._count * _MAX_WAVES))
        whole, rest = divmod(num_tiles, merged)
        end = start
        for group in [merged] * whole + [rest] * (rest > 0):
            done = max(self._free[0], start) + tile_s * group
            heapq.heapreplace(self._free, done)
            end = max(end, done)
        self._streams.append(end)
        return start, end

    def run_on_all(self, ready_s: float, seconds: float) -> tuple[float, float]:
        """Simulates a kernel that occupies every multiprocessor for `seconds`.

        Each multiprocessor first finishes its tile. Returns the start and end.
        """
        start = ready_s + self._hardware.launch_s
        self._free = sorted(max(free, start) + seconds for free in self._free)
        return start, self._free[-1]


class Span(NamedTuple):
    """A simulated step of a schedule, with its times in seconds."""

    kind: str
    chunks: tuple[int, ...]
    start_s: float
    end_s: float


def _schedule(work, machine, choice, rank):
    # As `DefaultSplits` in csrc/engine/*/*_device.h. Only "pipeline" has splits.
    is_whole = work.gathers and not machine.is_host
    num_splits = choice.num_splits or (1 if is_whole else DEFAULT_SPLITS)
    sizes = work.op, choice.method.value, rank, work.num_ranks, num_splits
    schedule = cpu_engine.load().schedule
    try:
        return schedule(*sizes, choice.kernel_options.variant.value)
    except ValueError:  # as in the engine, a variant that the op lacks has no effect
        return schedule(*sizes)


class Replay:
    """A simulated call: the steps of a rank with their times, as `spans`.

    The call takes `end_s` seconds, and `num_launches` on a GPU. A step (see `Step` in
    `jax_ub/_cpu.pyi`) is simulated by the method named after its kind. Other steps take
    no time. Of the options of `choice`, the number of splits, the variant of the
    schedule and, on GPUs, the number of streams for GEMMs have an effect.
    """

    def __init__(self, work: Workload, machine: Hardware, choice: MethodChoice, rank=0):
        steps = _schedule(work, machine, choice, rank)
        self.spans: list[Span] = []
        self._work = work
        num_splits = 1 + max(step.split for step in steps)
        self._rows = math.ceil(work.M / (work.num_ranks * num_splits))  # of a split
        self._hardware = machine.shared_by(work.num_ranks)
        num_streams = choice.kernel_options.num_lanes
        self._gpu = None if machine.is_host else Processors(machine, num_streams)
        # A one-shot all-reduce sends, waits and sums in a single kernel, with a single
        # put for all chunks. In all other schedules, a GPU launches each step
        # separately.
        is_one_shot = any(s.kind == "put" and s.chunk == ALL_CHUNKS for s in steps)
        self._launch_s = 0.0 if machine.is_host or is_one_shot else machine.launch_s
        # The time at which the last step on a GPU's communication stream, or on a
        # host's thread, has ended.
        self._clock = 0.0
        # The times at which peers have filled this rank's slots.
        self._arrivals: dict[int, float] = {}
        # The times at which received data, products and sums are complete, by payload,
        # chunk and split. The rank's own operands are complete from the start.
        self._ready: dict[tuple, float] = collections.defaultdict(float)
        for step in steps:
            if simulate := getattr(self, step.kind, None):
                simulate(step)
        self.end_s = max((span.end_s for span in self.spans), default=0.0)
        if not machine.is_host and work.num_ranks > 1:
            last_s, self.end_s = self.end_s, self.end_s + machine.launch_s
            self.spans.append(Span("end", (), last_s, self.end_s))
        self.num_launches = sum(not is_one_shot or s.kind != "put" for s in self.spans)

    def wait_free(self, step):
        # The simulated call is the first of its communicator, so all slots are free. On
        # a GPU, one launch waits for all of them.
        if self._launch_s and all(span.kind != "wait_free" for span in self.spans):
            self._run(step, 0.0, self._launch_s)

    def wait(self, step):
        # On a GPU, one kernel waits for all data of several waits.
        if self._launch_s and self.spans[-1].kind != "wait":
            self._run(step, 0.0, self._launch_s)
        self._clock = max(self._clock, self._arrivals[step.slot])
        if step.payload != "partial":  # the sum follows the waits for partial sums
            self._ready[_data(step)] = self._clock

    def put(self, step):
        num_bytes = self._work.wire_bytes(step.payload, self._rows_of(step))
        rate = self._hardware.wire_bytes_per_s * self._hardware.wire_share
        seconds = num_bytes / rate + self._launch_s
        end = self._run(step, self._ready[_data(step)], seconds)
        self._arrivals[step.slot] = end + self._hardware.handshake_s

    def multiply(self, step):
        is_whole = step.chunk == ALL_CHUNKS
        stop = self._work.num_ranks if is_whole else step.chunk + step.num_chunks
        chunks = range(step.chunk, stop)
        gemm = self._work.gemm_of(step.num_chunks * self._rows_of(step))
        ready = max(self._ready["operand", chunk, step.split] for chunk in chunks)
        if self._gpu is None:
            seconds, _ = gemm_s(gemm, self._hardware)
            end = self._run(step, ready, seconds + self._hardware.launch_s)
        else:
            start, end = self._gpu.run(ready, gemm)
            self.spans.append(Span("multiply", tuple(chunks), start, end))
        for chunk in chunks:
            self._ready["partial", chunk, step.split] = end

    def reduce(self, step):
        num_bytes = self._work.reduce_bytes(self._rows_of(step))
        ready = max(self._clock, self._ready["partial", step.chunk, step.split])
        self._clock = self._move(step, ready, num_bytes, self._hardware.launch_s)

    def copy(self, step):
        num_bytes = 2 * self._work.wire_bytes(step.payload, self._rows)
        self._move(step, self._ready[_data(step)], num_bytes, 0.0)

    def _rows_of(self, step):
        return self._work.M if step.chunk == ALL_CHUNKS else self._rows

    def _run(self, step, ready, seconds):
        """Runs a step after the previous step and time `ready`; returns its end."""
        start = max(ready, self._clock)
        self._clock = start + seconds
        self.spans.append(Span(step.kind, (step.chunk,), start, self._clock))
        return self._clock

    def _move(self, step, ready, num_bytes, host_launch_s):
        """Runs a sum or copy, on all multiprocessors of a GPU; returns its end."""
        seconds = num_bytes / self._hardware.memory_bytes_per_s
        if self._gpu is None:
            end = self._run(step, ready, seconds + host_launch_s)
        else:
            start, end = self._gpu.run_on_all(ready, seconds)
            self.spans.append(Span(step.kind, (step.chunk,), start, end))
        self._ready[_data(step)] = end
        return end
