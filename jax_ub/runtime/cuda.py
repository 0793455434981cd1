"""The CUDA engine: loaded only where a CUDA device is used, or lowered for.

Whether it is here, whether it can run, and how XLA gets to know it.
"""

import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ub.runtime import engine, settings

# Pinned with csrc/transport/cuda: lines of flags in a heap.
MOST_RANKS = 16

_PLATFORM = "CUDA"
_BUILD = "In a clone of jax_ub, where nvcc is installed: pip install ."
# Where NVIDIA's wheels put cuBLASLt, newest first.
_LIBRARIES = ("cu13/lib", "cublas/lib")

Array = tuple[str, tuple[int, ...]]  # dtype and shape


@functools.cache
def load() -> types.ModuleType:
    """Imports `jax_ub._cuda` and checks it against the running jaxlib.

    No driver is needed for that, and nothing is registered.

    Raises:
        ImportError: if it was not built, or for another FFI API; says what to do.
    """
    try:
        cuda = importlib.import_module("jax_ub._cuda")
    except ModuleNotFoundError as error:
        raise ImportError(
            "jax_ub: its CUDA engine jax_ub._cuda is missing, since no nvcc was found "
            f"when it was built. {_BUILD}"
        ) from error
    built = tuple(cuda.xla_ffi_api_version)
    engine.check_ffi_api(built, engine.running_ffi_api(), jax.__version__)
    cuda.set_library_paths(library_paths())
    timeout_s = settings.timeout_s()
    if timeout_s is not None:
        cuda.set_timeout_s(timeout_s)
    if settings.nvls():
        cuda.set_nvls(True)
    return cuda


def library_paths() -> list[str]:
    """The directories in which NVIDIA's wheels have cuBLASLt, if they are installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = (pathlib.Path(root) / path for path in _LIBRARIES for root in roots)
    return [str(path) for path in found if any(path.glob("libcublasLt.so.*"))]


def local_devices() -> list[jax.Device]:
    """The CUDA devices of this process; none where jax has no such backend."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return []
    return [device for device in devices if is_cuda(device)]


def is_cuda(device: jax.Device) -> bool:
    """Whether a device is NVIDIA's: AMD's are "gpu" to jax as well."""
    if device.platform == "gpu":
        return "cuda" in device.client.platform_version.lower()
    return device.platform == "cuda"


def ordinals(devices: Sequence[jax.Device]) -> dict[int, int]:
    """The numbers that the driver knows devices of this process by, by global id."""
    return {device.id: device.local_hardware_id for device in devices}


def platform_of(device: jax.Device) -> str:
    """What a device is to a lowering rule: to jax all kinds of GPUs are "gpu"."""
    if is_cuda(device):
        return "cuda"
    return "rocm" if device.platform == "gpu" else device.platform


def is_default() -> bool:
    """Whether programs of this process run on CUDA devices, unless they say where."""
    return jax.default_backend() in ("gpu", "cuda") and bool(local_devices())


def is_traced_for() -> bool:
    """Whether the program that is traced is for CUDA devices: those of the mesh.

    Without a mesh of devices it is for the default backend. A program that `jax.export`
    lowers for another platform is traced for its mesh, too.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return is_default()
    if device.platform != "gpu":
        return device.platform == "cuda"
    # AMD's are "gpu", too. A topology's GPUs are no devices of this process.
    return bool(local_devices()) or not _has_other_gpus()


def _has_other_gpus():
    try:
        return bool(jax.local_devices(backend="rocm"))
    except RuntimeError:
        return False


def why_not() -> str | None:
    """Why no call can run on the CUDA devices of this process; None if they can.

    Where there are no such devices, a program may still be lowered for others.
    """
    try:
        cuda = load()
    except (ImportError, ValueError) as error:
        return str(error)
    if settings.runs_concurrently():
        return (
            "XLA_FLAGS lets XLA run captured calls in any order, but every rank must "
            "run them in that of the program: leave out "
            "xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
        )
    return cuda.why_not() if local_devices() else None


def why_no_peers(devices: Sequence[jax.Device]) -> str | None:
    """Why these devices of this process cannot reach each other; None if they can."""
    ordinals = sorted({device.local_hardware_id for device in devices})
    return load().why_no_peers(ordinals) if len(ordinals) > 1 else None


def is_loaded() -> bool:
    """Whether something of this process has used the engine."""
    return "jax_ub._cuda" in sys.modules


def usable_devices() -> list[dict[str, Any]]:
    """What the driver says of this process's GPUs; none where it cannot use them."""
    own = {device.local_hardware_id for device in local_devices()}
    if not own or why_not() is not None:
        return []
    return [one for one in load().devices() if one["ordinal"] in own]


def failures() -> dict[str, str]:
    """Why communicators on GPUs have failed, by name."""
    if is_loaded() and local_devices() and why_not() is None:
        return load().failures()
    return {}


def release_in_process() -> None:
    """Returns the heaps of calls inside this process that no program needs."""
    if is_loaded() and local_devices() and why_not() is None:
        load().release_in_process()


@functools.cache
def register_targets() -> None:
    """Hands the engine's handlers to XLA, once, where jax has CUDA devices."""
    devices = local_devices()
    if not devices:
        return
    cuda = load()
    cuda.set_local_devices({n: i for i, n in ordinals(devices).items()})
    jax.ffi.register_ffi_type(
        "jax_ub$CudaCallSite", cuda.call_site_type(), platform=_PLATFORM
    )
    for name, handlers in cuda.targets().items():
        # That calls may be captured is a trait of the handlers themselves: JAX's plugin
        # for CUDA refuses any that is passed here.
        jax.ffi.register_ffi_target(name, handlers, platform=_PLATFORM, api_version=1)


def workspace_bytes(
    target: str,
    attributes: Mapping[str, object],
    operands: Sequence[Array],
    results: Sequence[Array],
) -> int:
    """How large the last result of a call has to be.

    Args:
        target: of the call.
        attributes: of the call.
        operands: dtypes and shapes.
        results: the same, without the workspace.
    """
    plain = {name: _plain(value) for name, value in attributes.items()}
    op = target.removeprefix("jax_ub$")
    return load().workspace_bytes(op, plain, list(operands), list(results))


def _plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
