"""The engine for NVIDIA GPUs, in C++: FFI targets, settings and communicators.

The module can be imported without a CUDA driver. Functions that need a driver raise
`NotImplementedError` if there is none or it is too old, and if the devices lack a
required capability.
"""

from typing import Any, TypedDict

class Stages(TypedDict):
    """The XLA FFI handlers of one target, as capsules."""

    instantiate: Any
    initialize: Any
    execute: Any

class CallSiteType(TypedDict):
    """The XLA FFI type of an instantiated call's state, as capsules."""

    type_id: Any
    type_info: Any

class Counters(TypedDict):
    """Counters of this process: calls by op, failed calls, and bytes of all heaps."""

    calls: dict[str, int]
    failed_calls: int
    heap_bytes: int

class Device(TypedDict):
    """Properties of a GPU, as the driver reports them."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    num_copy_engines: int
    memory_bytes: int
    has_multicast: bool

class CublasLt(TypedDict):
    """The cuBLASLt library, used for GEMMs. The version is 130100 for 13.1.0."""

    path: str
    version: int

xla_ffi_api_version: tuple[int, int]

def set_library_paths(directories: list[str]) -> None:
    """Sets directories to search for cuBLASLt in addition to the system's."""

def why_not() -> str | None:
    """Returns why this process cannot use any GPU, or None if it can."""

def driver_version() -> int:
    """Returns the CUDA version that the driver supports: 13000 for 13.0."""

def devices() -> list[Device]:
    """Returns the GPUs that are visible to this process, indexed by ordinal."""

def cublaslt() -> CublasLt:
    """Returns the path and version of cuBLASLt; loads it at the first call."""

def may_corrupt_concurrent_gemms(major: int) -> bool:
    """Returns whether this cuBLASLt may corrupt concurrent GEMMs on some GPUs.

    `major` is the major number of their compute capability. The engine runs the GEMMs
    of such GPUs on one stream.
    """

fp8_multiple: int  # all sizes of an FP8 GEMM are multiples of it
max_ranks: int  # of a group

def why_no_fp8(
    compute_capability: tuple[int, int], scaled_unit: str, cublaslt_version: int
) -> str | None:
    """Returns why GPUs cannot multiply FP8 operands, or None if they can.

    Args:
        compute_capability: of the GPUs.
        scaled_unit: what has one scale: "tensor", "row" or "block".
        cublaslt_version: version of cuBLASLt, such as 130100; 0 if it is unknown.
    """

def needs_contiguous_fp8(compute_capability: tuple[int, int]) -> bool:
    """Returns whether FP8 operands must be contiguous along the contracted axis."""

def peers(ordinals: list[int]) -> list[list[bool]]:
    """Returns whether device i can access the memory of device j, as `[i][j]`."""

def why_no_peers(ordinals: list[int]) -> str | None:
    """Returns which device cannot access which other's memory, or None if all can."""

def targets(has_several_devices: bool) -> dict[str, Stages]:
    """Returns the handlers by target name, such as ``jax_ub$all_gather_matmul``.

    XLA may capture them in CUDA graphs only if the process has one device.
    """

def call_site_type() -> CallSiteType:
    """Returns the type ``jax_ub$CudaCallSite``; register it before any target."""

def workspace_bytes(
    op: str,
    attributes: dict[str, Any],
    operands: list[tuple[str, tuple[int, ...]]],
    results: list[tuple[str, tuple[int, ...]]],
) -> int:
    """Returns the bytes of a call's workspace, which is its last result. Needs no GPU.

    Args:
        op: name of the op, such as ``all_gather_matmul``.
        attributes: FFI attributes of the call, as Python values.
        operands: dtype and shape of each operand.
        results: dtype and shape of each result, without the workspace.

    Raises:
        ValueError: an attribute is missing or out of range, or the op or dtype is
            unknown.
        RuntimeError: the operands or results do not match the op.
        NotImplementedError: the op does not support these attributes on GPUs.
    """

def set_local_devices(devices: dict[int, int]) -> None:
    """Sets the global ids of this process's devices, by CUDA ordinal."""

def set_timeout_s(timeout_s: float) -> None:
    """Sets how long a rank waits for its peers.

    Raises:
        ValueError: the time is not positive.
    """

def set_nvls(nvls: bool) -> None:
    """Sets whether all-reduces may use multicast. Call it before any device is used."""

def counters() -> Counters:
    """Returns the counters of this process."""

def failures() -> dict[str, str]:
    """Returns the failures of all open communicators, by communicator name."""

def release_in_process() -> None:
    """Frees the heaps of calls within this process that no program needs any more."""

class Endpoint:
    """The heaps of this process's ranks of a group, and the socket for their peers."""

    @property
    def address(self) -> str: ...
    @property
    def token(self) -> int: ...
    @property
    def capabilities(self) -> dict[str, str]:
        """The capabilities of this process, which all processes exchange.

        They are the host, the GPUs, and for each sharing mode either what a peer needs
        to use it, or why it is unavailable.
        """

class Communicator:
    """Connects the ranks of a group."""

    @property
    def name(self) -> str: ...
    @property
    def sharing_mode(self) -> str:
        """The sharing mode: ``in_process``, ``vmm``, ``fabric`` or ``ipc``."""

    @property
    def fallbacks(self) -> list[tuple[str, str]]:
        """The preferred sharing modes that failed, with the reason of each fallback."""

    @property
    def has_multicast(self) -> bool:
        """Whether all-reduces use multicast."""

    @property
    def size_bytes(self) -> int:
        """Bytes of device memory that this process has allocated for its heaps."""

    @property
    def failure(self) -> str | None:
        """Why the communicator has failed and rejects all calls, or None."""

    def close(self) -> None:
        """Waits until local devices and peers have finished, then frees the memory.

        Repeated calls have no effect.
        """

def endpoint(ordinals: list[int], slots_bytes: int, host: str) -> Endpoint:
    """Allocates the heaps of this process's ranks of a group, for one `connect`.

    Args:
        ordinals: CUDA ordinals of the local ranks' devices, in rank order.
        slots_bytes: bytes of slots that a call may need on each rank.
        host: identity of the host. It must be equal in processes that share a host.

    Raises:
        RuntimeError: a device does not have enough memory.
    """

def why_not_connected(
    processes: list[int], capabilities: dict[int, dict[str, str]]
) -> str:
    """Returns why these processes cannot share memory, or "" if they can.

    The result is the same in all processes.

    Args:
        processes: process index of each rank.
        capabilities: `Endpoint.capabilities` of each process.
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
    capabilities: dict[int, dict[str, str]],
    timeout_s: float,
) -> Communicator:
    """Connects the ranks of a group. All its processes must call it.

    Args:
        endpoint: endpoint of this process. It cannot be used again.
        name: name of the communicator in messages.
        devices: global device id of each rank.
        processes: process index of each rank.
        process: index of this process.
        addresses: addresses of the endpoints of other processes on this host.
        tokens: tokens of the endpoints of other processes on this host.
        capabilities: `Endpoint.capabilities` of each process.
        timeout_s: how long to wait for the other processes, in seconds.

    Raises:
        NotImplementedError: all sharing modes failed.
        RuntimeError: a process did not arrive, rejected the connection or died. Names
            the process.
        ValueError: the arguments contradict each other.
    """

def connect_in_process(
    *, name: str, devices: list[int], ordinals: list[int], slots_bytes: int
) -> Communicator:
    """Creates the communicator and heaps of a group within this process.

    Args:
        name: name of the communicator in messages.
        devices: global device id of each rank.
        ordinals: CUDA ordinal of each rank's device.
        slots_bytes: bytes of slots that a call may need on each rank.

    Raises:
        NotImplementedError: the devices cannot access each other's memory.
        RuntimeError: a device does not have enough memory.
        ValueError: the arguments contradict each other.
    """
