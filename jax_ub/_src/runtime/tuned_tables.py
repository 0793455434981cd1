"""Finds the method that was measured fastest for a call on this machine."""

import functools
import importlib.metadata

import jax

from jax_ub._src.config import tuned_file
from jax_ub._src.config.tuned_file import Environment, TunedTable
from jax_ub._src.runtime import cpu_engine, cuda_engine, hosts, registry, settings

_PACKAGES = ("jax", "jaxlib", "jax_ub")


@functools.cache
def environment() -> Environment:
    """Returns device kind and library versions, the key of entries in a tuned file."""
    device = jax.local_devices()[0]
    versions = {name: version_of(name) for name in _PACKAGES}
    if cuda_engine.is_cuda(device):
        versions["CUDA"] = device.client.platform_version.splitlines()[-1]
        name = device.device_kind
    else:
        isa = "without an engine"
        if cpu_engine.why_not() is None:
            cpu_engine.configure()
            isa = cpu_engine.load().isa()
        name = f"{device.device_kind} {isa}, {len(hosts.cores())} cores"
    return Environment(name, tuple(sorted(versions.items())))


def of_ranks(axis_name: tuple[str, ...], num_ranks: int) -> TunedTable | None:
    """Returns the table of fastest methods for "auto" calls on a mesh axis, or None.

    A table that `initialize_ub` was given for this axis takes precedence over the file
    `JAX_UB_TUNED`. A GEMM that does not communicate has the axis (). For such a GEMM,
    the table of all initialized axes that have one takes precedence, if it is the same.
    """
    axes = [registry.on_axis(axis_name, num_ranks)] if axis_name else registry.axes()
    found = {axis.choices for axis in axes if axis is not None and axis.choices}
    return found.pop() if len(found) == 1 else of_process()


def of_process() -> TunedTable | None:
    """Returns the table of fastest methods in the file `JAX_UB_TUNED`, or None."""
    path = settings.tuned()
    return None if path is None else read(path)


def read(path: str) -> TunedTable:
    """Reads the table of fastest methods for this process's devices from a tuned file.

    The result is cached until the file changes.
    """
    return _read(path, settings.version_of_file(path))


@functools.lru_cache(maxsize=8)
def _read(path, version):
    return tuned_file.choices(path, environment())


def version_of(package: str) -> str:
    """Returns the version of a package; "of a source tree" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"
