"""Which tuned choices hold in this process, and with what they must be made."""

import functools
import importlib.metadata
import os

import jax

from jax_ub.overlap_config import tuned
from jax_ub.overlap_config.tuned import Environment, TunedTable
from jax_ub.runtime import cuda, engine, overlaps, settings

_PACKAGES = ("jax", "jaxlib", "jax_ub")


@functools.cache
def environment() -> Environment:
    """The devices and libraries of this process."""
    device = jax.local_devices()[0]
    versions = {name: version_of(name) for name in _PACKAGES}
    if cuda.is_cuda(device):
        versions["CUDA"] = device.client.platform_version.splitlines()[-1]
        name = device.device_kind
    else:
        cpu = engine.load()
        cores = len(os.sched_getaffinity(0))
        name = f"{device.device_kind} {cpu.isa()}, {cores} cores"
    return Environment(name, tuple(sorted(versions.items())))


def on_axis(axis_name: tuple[str, ...], num_ranks: int) -> TunedTable | None:
    """The choices for "auto": of `initialize_ub` for this axis, else of the process.

    Raises:
        ConfigurationError: if `JAX_UB_TUNED` names a file that does not fit.
    """
    initialized_axis = overlaps.on_axis(axis_name, num_ranks)
    if initialized_axis is not None and initialized_axis.choices is not None:
        return initialized_axis.choices
    return of_process()


def on_no_axis() -> TunedTable | None:
    """The choices for "auto" of calls that communicate nothing.

    Those of `initialize_ub`, if all axes that have any have the same, else those of the
    process.

    Raises:
        ConfigurationError: if `JAX_UB_TUNED` names a file that does not fit.
    """
    found = {
        initialized_axis.choices
        for initialized_axis in overlaps.domains()
        if initialized_axis.choices
    }
    return found.pop() if len(found) == 1 else of_process()


def of_process() -> TunedTable | None:
    """The choices of the file that `JAX_UB_TUNED` names.

    Raises:
        ConfigurationError: if it does not fit.
    """
    path = settings.tuned()
    return None if path is None else read(path)


def read(path: str) -> TunedTable:
    """Reads the choices of a file that fit this process, once for each of its versions.

    Raises:
        ConfigurationError: if it has none; says what it has.
        UnknownNameError: if it names an unknown op or method.
    """
    return _read(path, settings.version_of_file(path))


@functools.lru_cache(maxsize=8)
def _read(path, version):
    return tuned.choices(path, environment())


def version_of(package: str) -> str:
    """The version of an installed package, in words where it is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"
