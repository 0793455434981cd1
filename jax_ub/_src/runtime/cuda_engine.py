"""Loads the CUDA engine `jax_ub._cuda`, checks that it can run, and registers it.

It is loaded only when a CUDA device is used, or a program is lowered for one.
"""

import functools
import importlib.util
import pathlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ub._src.runtime import cpu_engine, settings

# Maximum number of ranks of a group. Must equal kMaxRanks in csrc/transport/cuda: the
# memory that a rank shares with its peers has flags for this many ranks.
MOST_RANKS = 16

_PLATFORM = "CUDA"
_BUILD = "In a clone of jax_ub, where nvcc is installed: pip install ."
# Folders in NVIDIA's wheels that contain cuBLASLt, newest first.
_LIBRARIES = ("cu13/lib", "cublas/lib")

# Compute capability that is assumed if a program is lowered for unknown devices (9.0:
# Hopper).
_ASSUMED_CAPABILITY = (9, 0)

Array = tuple[str, tuple[int, ...]]  # dtype and shape


@functools.cache
def load() -> types.ModuleType:
    """Imports the CUDA engine `jax_ub._cuda`, and checks that jaxlib supports it.

    It needs no driver and registers no handlers.

    Raises:
        ImportError: if the engine was not built, or was built for another Python,
            another system or an incompatible FFI API. Says what to do.
    """
    text = (
        "CUDA engine jax_ub._cuda is missing, since no nvcc was found when it was "
        "built."
    )
    cuda = cpu_engine.load_module("jax_ub._cuda", text, lambda: _BUILD)
    cuda.set_library_paths(library_paths())
    cuda.set_timeout_s(settings.timeout_s())
    cuda.set_nvls(settings.nvls())
    return cuda


def library_paths() -> list[str]:
    """Returns the folders of installed NVIDIA wheels that contain cuBLASLt."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = (pathlib.Path(root) / path for path in _LIBRARIES for root in roots)
    return [str(path) for path in found if any(path.glob("libcublasLt.so.*"))]


def local_devices() -> list[jax.Device]:
    """Returns the CUDA devices of this process; empty if JAX has no CUDA backend."""
    return [device for device in cpu_engine.devices_of("cuda") if is_cuda(device)]


def is_cuda(device: jax.Device) -> bool:
    """Returns whether a JAX device is an NVIDIA GPU.

    jax uses the platform "gpu" for AMD GPUs too.
    """
    if device.platform == "gpu":
        return "cuda" in device.client.platform_version.lower()
    return device.platform == "cuda"


def platform_of(device: jax.Device) -> str:
    """Returns the platform for which programs of a device are lowered, such as "cuda".

    `device.platform` is "gpu" for all kinds of GPUs.
    """
    if is_cuda(device):
        return "cuda"
    return "rocm" if device.platform == "gpu" else device.platform


def is_default() -> bool:
    """Returns whether JAX's default backend has CUDA devices."""
    return jax.default_backend() in ("gpu", "cuda") and bool(local_devices())


def is_traced_for() -> bool:
    """Returns whether JAX is tracing a program for CUDA devices.

    The devices of the current mesh decide, or the default backend if the mesh has no
    devices. This also holds for programs that `jax.export` lowers for another platform.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return is_default()
    if device.platform != "gpu":
        return device.platform == "cuda"
    # The platform "gpu" stands for NVIDIA or AMD GPUs. The mesh may belong to an
    # ahead-of-time topology, so the GPUs of this process decide which kind is meant.
    # Without GPUs, CUDA is assumed.
    return bool(local_devices()) or not cpu_engine.devices_of("rocm")


def why_not() -> str | None:
    """Returns why this process cannot run the CUDA engine, or None if it can.

    It is None for a process without CUDA devices if the engine can be loaded: such a
    process may lower programs for the GPUs of other processes.
    """
    try:
        cuda = load()
    except (ImportError, ValueError) as error:
        return str(error)
    if settings.runs_concurrently():
        return (
            "XLA_FLAGS lets XLA run captured calls in any order, but all ranks must "
            "run them in the order of the program: remove "
            "xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
        )
    return cuda.why_not() if local_devices() else None


def why_no_peers(devices: Sequence[jax.Device]) -> str | None:
    """Returns why these GPUs cannot access each other's memory, or None if they can."""
    ordinals = sorted({device.local_hardware_id for device in devices})
    return load().why_no_peers(ordinals) if len(ordinals) > 1 else None


def why_no_fp8(devices: Sequence[jax.Device], scaled_unit: str) -> str | None:
    """Returns why these GPUs cannot multiply FP8 operands, or None if they can.

    `scaled_unit` is what has one scale: "tensor", "row" or "block".
    """
    version = load().cublaslt()["version"] if local_devices() else 0
    capabilities = _compute_capabilities(devices)
    reasons = (load().why_no_fp8(each, scaled_unit, version) for each in capabilities)
    return next(filter(None, reasons), None)


def needs_contiguous_fp8(devices: Sequence[jax.Device]) -> bool:
    """Returns whether GPUs need FP8 operands contiguous along the contracted axis."""
    return any(map(load().needs_contiguous_fp8, _compute_capabilities(devices)))


def _compute_capabilities(devices):
    texts = {getattr(device, "compute_capability", None) for device in devices}
    known = {tuple(map(int, text.split("."))) for text in texts if text is not None}
    return sorted(known) or [_ASSUMED_CAPABILITY]


def _is_in_use():
    """Returns whether this process has loaded the CUDA engine and can run it."""
    is_loaded = "jax_ub._cuda" in sys.modules
    return is_loaded and bool(local_devices()) and why_not() is None


def usable_devices() -> list[dict[str, Any]]:
    """Returns one dict of CUDA properties for each GPU on which the engine can run.

    The list is empty if the CUDA engine cannot use them.
    """
    own = {device.local_hardware_id for device in local_devices()}
    if not own or why_not() is not None:
        return []
    return [one for one in load().devices() if one["ordinal"] in own]


def failures() -> dict[str, str]:
    """Returns {name: error text} for each failed communicator between GPUs."""
    return load().failures() if _is_in_use() else {}


def release_in_process() -> None:
    """Frees buffers on GPUs for groups within this process if no program uses them."""
    if _is_in_use():
        load().release_in_process()


@functools.cache
def register_targets() -> None:
    """Registers the CUDA engine's FFI handlers with XLA, if there are CUDA devices."""
    devices = local_devices()
    if not devices:
        return
    cuda = load()
    cuda.set_local_devices({one.local_hardware_id: one.id for one in devices})
    jax.ffi.register_ffi_type(
        "jax_ub$CudaCallSite", cuda.call_site_type(), platform=_PLATFORM
    )
    for name, handlers in cuda.targets(len(devices) > 1).items():
        # JAX's CUDA plugin does not accept handler traits here. Instead, the handlers
        # themselves declare whether CUDA graphs may capture them.
        jax.ffi.register_ffi_target(name, handlers, platform=_PLATFORM, api_version=1)


def workspace_bytes(
    op: str,
    attributes: Mapping[str, object],
    operands: Sequence[Array],
    results: Sequence[Array],
) -> int:
    """Returns how many bytes of scratch memory a call needs on a GPU.

    XLA allocates the scratch memory as the call's last result.
    """
    plain = {
        name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        for name, value in attributes.items()
    }
    return load().workspace_bytes(op, plain, list(operands), list(results))
