"""The CPU engine, in C++: FFI targets, settings, communicators, traces, schedules."""

from collections.abc import Sequence
from typing import Any, TypedDict

class Stages(TypedDict):
    """The XLA FFI handlers of one target, as capsules."""

    instantiate: Any
    execute: Any

class QuantizeStages(TypedDict):
    """The XLA FFI handler of `jax_ub.amax` or `jax_ub.cast`, as a capsule."""

    execute: Any

class CallSiteType(TypedDict):
    """The XLA FFI type of an instantiated call's state, as capsules."""

    type_id: Any
    type_info: Any

class Op(TypedDict):
    """A row of the engine's table of ops.

    `attributes` are the FFI attributes that only some ops have. `collective` names the
    op's schedule, as in `schedule`, and is empty if the op communicates nothing.
    """

    attributes: list[str]
    collective: str
    has_gemm: bool

class DType(TypedDict):
    """A row of the engine's table of dtypes."""

    numpy: str
    size_bytes: int
    is_operand: bool
    is_result: bool

class Counters(TypedDict):
    """Counters of this process: calls by op, failed collective calls, bytes in use."""

    calls: dict[str, int]
    failed_calls: int
    scratch_bytes: int
    slot_bytes: int
    peak_slot_bytes: int

# (begin, end, call, kind, rank, chunk, split, peer, payload). The times are nanoseconds
# of the system's monotonic clock. An index of -1 means that the span has none, or that
# it covers all of them.
Span = tuple[int, int, int, str, int, int, int, int, str]

class TracedCall(TypedDict):
    """One execution of a collective call by the ranks of a group."""

    label: str
    op: str
    method: str
    variant: str
    num_ranks: int
    num_splits: int
    devices: list[int]
    operands: str

class Trace(TypedDict):
    """The calls of this process and the spans of each thread since `start_trace`.

    Spans that did not fit into a thread's buffer are counted in `num_dropped`.
    """

    calls: list[TracedCall]
    threads: list[list[Span]]
    num_dropped: int

class Step:
    """One step of a rank's schedule.

    Attributes:
        kind: ``multiply``, ``copy``, ``reduce``, ``put``, ``publish``, ``wait``,
            ``release`` or ``wait_free``.
        payload: the data: ``operand``, ``partial`` (partial sum) or ``sum``.
        chunk: index of the chunk, which is the rank that owns its rows; -1 means all.
        split: index of the split within the chunk.
        peer: the other rank, or -1.
        slot: index of the slot, or -1. For ``put``, ``publish`` and ``wait_free`` it is
            a slot of the peer, otherwise of this rank.
        num_chunks: for ``multiply``: the number of consecutive chunks, beginning with
            ``chunk``, that it reads from consecutive slots, beginning with ``slot``.
    """

    @property
    def kind(self) -> str: ...
    @property
    def payload(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...

default_splits: int
default_timeout_s: float
xla_ffi_api_version: tuple[int, int]

def targets() -> dict[str, Stages]:
    """Returns the handlers by target name, such as ``jax_ub$all_gather_matmul``."""

def quantize_targets() -> dict[str, QuantizeStages]:
    """Returns the handlers of ``jax_ub.amax`` and ``jax_ub.cast``, by target name."""

def call_site_type() -> CallSiteType:
    """Returns the type ``jax_ub$CallSite``; register it before any target."""

def ops() -> dict[str, Op]:
    """Returns the table of ops by name, such as ``all_gather_matmul``."""

def dtypes() -> dict[str, DType]:
    """Returns the table of dtypes, by short name, such as ``bf16``."""

def isa() -> str:
    """Returns the instruction set of the kernels in use."""

def isas() -> list[str]:
    """Returns the instruction sets that this machine supports, slowest first."""

def set_isa(name: str) -> None:
    """Sets the instruction set of the kernels.

    Raises:
        ValueError: the name is unknown, or this machine does not support it.
    """

def set_timeout_s(timeout_s: float) -> None:
    """Sets how long a rank waits for its peers.

    Raises:
        ValueError: the time is not positive.
    """

def set_first_call_timeout_s(timeout_s: float) -> None:
    """Sets the minimum timeout for other processes at the first call of a call site.

    Raises:
        ValueError: the time is not positive.
    """

def has_engine() -> bool:
    """Returns whether the engine exists. The first call or setting creates it."""

def set_num_threads(num_threads: int, cores: Sequence[int] = ()) -> None:
    """Sets how many threads compute at a time, and on which cores.

    Args:
        num_threads: number of threads.
        cores: ids of the cores; empty means all cores.

    Raises:
        ValueError: the number is less than one, or a core id is out of range.
    """

def cpu_set() -> list[int]:
    """Returns the cores that were passed to `set_num_threads`."""

def num_threads() -> int:
    """Returns how many threads compute at a time."""

def default_num_threads() -> int:
    """Returns how many threads compute by default: the cores, or the CPU quota."""

def peak_gflops(dtype: str, duration_s: float) -> float:
    """Measures the compute-bound peak rate of the GEMM kernels, on all threads.

    Both panels of every tile stay in the L1 cache, so the rate is an upper bound that
    no GEMM reaches. Time in which other processes occupy the cores is not counted.

    Args:
        dtype: dtype of both operands, ``f32``, ``bf16`` or ``f16``.
        duration_s: duration of the measurement in seconds, at most 60.

    Returns:
        Rate in GFLOP/s.

    Raises:
        ValueError: the dtype is unknown, or the duration is out of range.
    """

def release_slots() -> None:
    """Frees the memory of slots that no call uses. Later calls allocate new slots."""

def counters() -> Counters:
    """Returns the counters of this process."""

def set_local_devices(devices: list[int]) -> None:
    """Sets the global ids of this process's devices."""

def begin_program(channel: str) -> None:
    """Restarts the count of a channel's call sites; called when a program is lowered.

    A compiled program may have several call sites with the same channel. They are
    numbered in the order in which XLA creates them after this call.
    """

class Endpoint:
    """A listening socket for the peers, and the token that they must send."""

    @property
    def address(self) -> str: ...
    @property
    def token(self) -> int: ...

class Communicator:
    """Connects the ranks of a group that spans several processes."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int:
        """Bytes of this process's memory that its peers map."""

    @property
    def failure(self) -> str | None:
        """Why the communicator has failed and rejects all calls, or None."""

    @property
    def calls(self) -> int:
        """Number of calls that have started."""

    def barrier_seconds(self, count: int) -> float:
        """Measures the duration of a barrier.

        All processes must call this at the same time, while no collective call runs.

        Args:
            count: number of consecutive barriers to time.

        Returns:
            Seconds per barrier.

        Raises:
            ValueError: the count is less than 1.
            RuntimeError: the communicator is closed, or a process was lost or has
                closed it.
        """

    def close(self) -> None:
        """Sends a close message to the peers. Pending calls fail.

        Never waits for a peer. Repeated calls have no effect.
        """

def endpoint() -> Endpoint:
    """Opens a listening socket for one `connect`.

    Raises:
        RuntimeError: the system cannot open a socket.
    """

def connect(
    endpoint: Endpoint,
    *,
    name: str,
    devices: list[int],
    processes: list[int],
    process: int,
    addresses: dict[int, str],
    tokens: dict[int, int],
    buffer_bytes: int,
    timeout_s: float,
    generation: int = 1,
) -> Communicator:
    """Connects the ranks of a group. All its processes must call it.

    Args:
        endpoint: endpoint of this process. It cannot be used again.
        name: name of the communicator in messages.
        devices: global device id of each rank.
        processes: process index of each rank.
        process: index of this process.
        addresses: addresses of the other processes' endpoints.
        tokens: tokens of the other processes' endpoints.
        buffer_bytes: bytes of shared memory of a rank for one call. Twice as much is
            allocated, since the memory is double-buffered.
        timeout_s: how long to wait for the other processes, in seconds.
        generation: generation of the communicator. It rejects calls that were lowered
            for another generation.

    Raises:
        RuntimeError: a process did not arrive, rejected the connection or died. Names
            the process.
        ValueError: the arguments contradict each other.
    """

def start_trace(events_per_thread: int = ...) -> None:
    """Discards the recorded trace and starts a new one.

    Args:
        events_per_thread: number of spans that a thread can record.

    Raises:
        ValueError: the number is less than one.
    """

def stop_trace() -> None:
    """Stops recording."""

def read_trace() -> Trace:
    """Returns what was recorded since `start_trace`."""

def schedule(
    op: str,
    method: str,
    rank: int,
    num_ranks: int,
    num_splits: int,
    variant: str = "plain",
) -> list[Step]:
    """Returns the schedule of a rank, as a list of steps.

    Raises:
        ValueError: the op has no such method or variant, or a number is out of range.
    """

def check_schedule(
    op: str, method: str, num_ranks: int, num_splits: int, variant: str = "plain"
) -> list[str]:
    """Proves a schedule by symbolic execution of all ranks.

    The call is checked twice in a row, and before and after every other schedule.

    Returns:
        The first 20 errors; empty if the schedule is correct.
    """
