"""The C++ engine of the CPU: FFI targets, and its settings."""

from collections.abc import Sequence
from typing import Any, TypedDict

class Stages(TypedDict):
    """Capsules of a target's handlers."""

    instantiate: Any
    execute: Any

class CallSiteType(TypedDict):
    """Capsules of the state that an instantiated call has."""

    type_id: Any
    type_info: Any

class Counters(TypedDict):
    """What this process did so far."""

    calls: dict[str, int]
    failed_gangs: int
    scratch_bytes: int
    slot_bytes: int
    peak_slot_bytes: int

# begin and end in nanoseconds of the system's monotonic clock, call, kind, rank, chunk,
# split, peer, payload. -1: none, or all of them.
Span = tuple[int, int, int, str, int, int, int, int, str]

class TracedCall(TypedDict):
    """One execution of a call by the ranks of a group."""

    label: str
    op: str
    method: str
    variant: str
    num_ranks: int
    num_splits: int
    devices: list[int]
    operands: str

class Trace(TypedDict):
    """What this process did since the trace was started."""

    calls: list[TracedCall]
    threads: list[list[Span]]
    num_dropped: int

class Step:
    """What a rank does at one point of a schedule.

    Attributes:
        kind: ``multiply``, ``copy``, ``reduce``, ``put``, ``publish``, ``wait``,
            ``release`` or ``wait_free``.
        payload: ``operand``, ``partial`` or ``sum``.
        chunk: whose rows; -1 for everything.
        split: which piece of the chunk.
        peer: the other rank, or -1.
        slot: the slot, the peer's for ``put``, ``publish`` and ``wait_free``, or -1.
        num_chunks: of a product: so many chunks, out of as many slots, from these on.
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

xla_ffi_api_version: tuple[int, int]

def targets() -> dict[str, Stages]:
    """Returns the handlers by target name, such as ``jax_ub$all_gather_matmul``."""

def call_site_type() -> CallSiteType:
    """Returns the type ``jax_ub$CallSite``, to be registered before any target."""

def isa() -> str:
    """Returns the instruction set in use."""

def isas() -> list[str]:
    """Returns the instruction sets that this machine can use, slowest first."""

def set_isa(name: str) -> None:
    """Chooses an instruction set.

    Raises:
        ValueError: the name is unknown, or this machine does not have it.
    """

def set_timeout_s(timeout_s: float) -> None:
    """Sets how long a rank waits for its peers.

    Raises:
        ValueError: the time is not positive.
    """

def set_first_call_timeout_s(timeout_s: float) -> None:
    """Sets how long the first call of a call site waits for other processes at least.

    Raises:
        ValueError: the time is not positive.
    """

def has_engine() -> bool:
    """Says whether a call, or one of the settings, has made the engine."""

def set_num_threads(num_threads: int, cores: Sequence[int] = ()) -> None:
    """Sets how many threads compute at a time, and on which cores; none: on all.

    Raises:
        ValueError: fewer than one, or a core that no machine has.
    """

def part_of_cores() -> list[int]:
    """The cores that set_num_threads was given."""

def num_threads() -> int:
    """Returns how many threads compute at a time."""

def peak_gflops(dtype: str, duration_s: float) -> float:
    """Measures what the kernels reach where no memory is waited for, on all threads.

    Both panels of every tile stay in the first cache, as those of no product can. Time
    in which other processes have the cores does not count.

    Args:
        dtype: of both operands, ``f32``, ``bf16`` or ``f16``.
        duration_s: how long, at most 60.

    Returns:
        Billion operations a second.

    Raises:
        ValueError: there is no such dtype, or the duration is out of range.
    """

def release_slots() -> None:
    """Returns the memory of slots that no call uses; later calls take new ones."""

def counters() -> Counters:
    """Returns what this process did so far."""

def set_local_devices(devices: list[int]) -> None:
    """Tells the engine the global ids of this process's devices."""

def begin_program(channel: str) -> None:
    """Says that a program with calls of this channel has been lowered.

    A compiled program may have several call sites of one channel. They are told apart
    by how many there were since then.
    """

class Endpoint:
    """Where this process listens for its peers, and what it wants to hear from them."""

    @property
    def address(self) -> str: ...
    @property
    def token(self) -> int: ...

class Communicator:
    """What connects the ranks of a group that lie in several processes."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int:
        """Memory of this process that its peers share."""

    @property
    def failure(self) -> str | None:
        """Why no more calls can run, or None."""

    @property
    def calls(self) -> int:
        """How many calls were begun."""

    def barrier_seconds(self, count: int) -> float:
        """Times so many barriers in a row, which every process makes, and no call.

        Returns:
            Seconds of one.

        Raises:
            ValueError: the count is less than 1.
            RuntimeError: it is closed, or a process died or left.
        """

    def close(self) -> None:
        """Says goodbye to the peers; calls that are pending fail.

        Never waits for a peer. Nothing happens the second time.
        """

def endpoint() -> Endpoint:
    """Opens a private socket for one `connect`.

    Raises:
        RuntimeError: the system refuses.
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
    half_bytes: int,
    timeout_s: float,
    generation: int = 1,
) -> Communicator:
    """Connects the ranks of a group, all its processes together.

    Args:
        endpoint: of this process; used up.
        name: in messages.
        devices: global ids, by rank.
        processes: where each rank lies, by rank.
        process: the own one.
        addresses: of the other processes' endpoints.
        tokens: of those.
        half_bytes: how much a rank may put into shared memory for one call; there is
            twice as much.
        timeout_s: how long to wait for the other processes.
        generation: calls that were lowered for another one are refused.

    Raises:
        RuntimeError: a process is missing, refused or died; names it.
        ValueError: the arguments do not fit each other.
    """

def start_trace(events_per_thread: int = ...) -> None:
    """Forgets the trace and begins a new one.

    Raises:
        ValueError: fewer than one event.
    """

def stop_trace() -> None:
    """Records nothing more."""

def read_trace() -> Trace:
    """Returns what was recorded since the last start."""

def schedule(
    op: str,
    method: str,
    rank: int,
    num_ranks: int,
    num_splits: int,
    variant: str = "plain",
) -> list[Step]:
    """Returns what a rank does, step by step.

    Raises:
        ValueError: the op has no such method or variant, or a number is out of range.
    """

def check_schedule(
    op: str, method: str, num_ranks: int, num_splits: int, variant: str = "plain"
) -> list[str]:
    """Executes a schedule symbolically, all ranks together, before and after others.

    Returns:
        What is wrong with it; empty when it is proven.
    """
