"""The C++ engine of NVIDIA GPUs: FFI targets, and what they share memory by.

Importing it needs no driver. What asks for one and finds none, or one that is too old,
raises `NotImplementedError`; so does what these devices cannot do.
"""

from typing import Any, TypedDict

class Stages(TypedDict):
    """Capsules of a target's handlers."""

    instantiate: Any
    initialize: Any
    execute: Any

class CallSiteType(TypedDict):
    """Capsules of the state that an instantiated call has."""

    type_id: Any
    type_info: Any

class Counters(TypedDict):
    """What this process did so far."""

    calls: dict[str, int]
    failed_calls: int
    heap_bytes: int

class Device(TypedDict):
    """What the driver says of a GPU."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    num_copy_engines: int
    memory_bytes: int
    has_multicast: bool

class CublasLt(TypedDict):
    """The library that multiplies; its version is 130100 for 13.1.0."""

    path: str
    version: int

xla_ffi_api_version: tuple[int, int]

def set_library_paths(directories: list[str]) -> None:
    """Says where else to look for cuBLASLt, besides where the system does."""

def why_not() -> str | None:
    """Returns why no device can be used here, or None."""

def driver_version() -> int:
    """Returns the CUDA version that the driver is for: 13000 is 13.0."""

def devices() -> list[Device]:
    """Returns what the driver shows this process, by ordinal."""

def cublaslt() -> CublasLt:
    """Loads cuBLASLt, if that has not happened yet."""

def peers(ordinals: list[int]) -> list[list[bool]]:
    """Returns which device can reach which other's memory."""

def why_no_peers(ordinals: list[int]) -> str | None:
    """Returns which device cannot reach which other's memory, or None."""

def targets() -> dict[str, Stages]:
    """Returns the handlers by target name, such as ``jax_ub$all_gather_matmul``."""

def call_site_type() -> CallSiteType:
    """Returns the type ``jax_ub$CudaCallSite``, to be registered before any target."""

def workspace_bytes(
    op: str,
    attributes: dict[str, Any],
    operands: list[tuple[str, tuple[int, ...]]],
    results: list[tuple[str, tuple[int, ...]]],
) -> int:
    """Returns how large the last result of a call has to be; needs no GPU.

    Args:
        op: its name.
        attributes: of the call, in Python's types.
        operands: dtypes and shapes.
        results: the same, without the workspace.

    Raises:
        ValueError: an attribute is missing or out of range, or the op or dtype unknown.
        RuntimeError: operands and results are not those of the op.
        NotImplementedError: the op does not run like that on GPUs.
    """

def set_local_devices(devices: dict[int, int]) -> None:
    """Tells the engine the global ids of this process's devices, by ordinal."""

def set_timeout_s(timeout_s: float) -> None:
    """Sets how long a rank waits for its peers.

    Raises:
        ValueError: the time is not positive.
    """

def set_nvls(nvls: bool) -> None:
    """Says whether all-reduces may run by multicast; before any device is used."""

def counters() -> Counters:
    """Returns what this process did so far."""

def failures() -> dict[str, str]:
    """Returns why communicators have failed that still exist, by name."""

def release_in_process() -> None:
    """Returns the heaps of calls inside this process that no program needs."""

class Endpoint:
    """The heaps of this process's ranks of a group, and where peers find them."""

    @property
    def address(self) -> str: ...
    @property
    def token(self) -> int: ...
    @property
    def offer(self) -> dict[str, str]:
        """In which ways the heaps can be shared, and why not in others."""

class Communicator:
    """What connects the ranks of a group."""

    @property
    def name(self) -> str: ...
    @property
    def how(self) -> str:
        """``in_process``, ``vmm``, ``fabric`` or ``ipc``."""

    @property
    def step_downs(self) -> list[tuple[str, str]]:
        """Ways that would have been preferred, and why they were not taken."""

    @property
    def has_multicast(self) -> bool:
        """Whether all-reduces run by multicast."""

    @property
    def size_bytes(self) -> int:
        """Device memory of this process."""

    @property
    def failure(self) -> str | None:
        """Why no more calls can run, or None."""

    def close(self) -> None:
        """Waits until devices and peers are done, and gives the memory back.

        Nothing happens the second time.
        """

def endpoint(ordinals: list[int], slots_bytes: int, host: str) -> Endpoint:
    """Makes the heaps of the own ranks of a group, for one `connect`.

    Args:
        ordinals: of their devices, in the order of the ranks.
        slots_bytes: what a call may need for slots, on each rank.
        host: equal where processes share one.

    Raises:
        RuntimeError: the devices have no room.
    """

def why_not_connected(processes: list[int], offers: dict[int, dict[str, str]]) -> str:
    """Says why these processes cannot share memory, alike in all of them, or nothing.

    Args:
        processes: by rank.
        offers: of their endpoints, by process.
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
    offers: dict[int, dict[str, str]],
    timeout_s: float,
) -> Communicator:
    """Connects the ranks of a group, all its processes together.

    Args:
        endpoint: of this process; used up.
        name: in messages.
        devices: global ids, by rank.
        processes: where each rank lies, by rank.
        process: the own one.
        addresses: of the other processes' endpoints on this host.
        tokens: of those.
        offers: of all processes' endpoints.
        timeout_s: how long to wait for the other processes.

    Raises:
        NotImplementedError: no way to share memory is left.
        RuntimeError: a process is missing, refused or died; names it.
        ValueError: the arguments do not fit each other.
    """

def connect_in_process(
    *, name: str, devices: list[int], ordinals: list[int], slots_bytes: int
) -> Communicator:
    """Makes the heaps of a group that lies in this process.

    Args:
        name: in messages.
        devices: global ids, by rank.
        ordinals: their numbers in this process, by rank.
        slots_bytes: what a call may need for slots, on each rank.

    Raises:
        NotImplementedError: the devices cannot reach each other's memory.
        RuntimeError: they have no room.
        ValueError: the arguments do not fit each other.
    """
