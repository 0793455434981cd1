"""Checks packages, environment variables and the loaded engine."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator

from jax_ub._src.errors import nearest
from jax_ub._src.methods import resolve
from jax_ub._src.runtime import cpu_engine, settings
from jax_ub._src.tools.doctor.finding import Finding, State

_PACKAGES = ("jax_ub", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")
_REQUIRED = _PACKAGES[1:4]


def packages() -> Iterator[Finding]:
    """Yields findings with the versions of Python and of the packages that matter.

    A required package that is not installed is a fault.
    """
    yield Finding("python", State.FINE, platform.python_version())
    for name in _PACKAGES:
        try:
            yield Finding(name, State.FINE, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            state = State.FAULT if name in _REQUIRED else State.NOTE
            yield Finding(name, state, "not installed")


def environment() -> Iterator[Finding]:
    """Yields findings about jax_ub's environment variables that are set.

    Reports unknown names, with the nearest known one, and invalid values.
    """
    for name, value in settings.given().items():
        if name in settings.NAMES:
            yield Finding(name, State.NOTE, value)
        else:
            known = nearest(name, settings.NAMES)
            yield Finding(name, State.WARNING, f"is no variable of jax_ub's. {known}")
    readers: tuple[Callable[[], object], ...] = (
        _method,
        _isa,
        settings.timeout_s,
        settings.first_call_timeout_s,
        settings.num_threads,
        settings.pool_threads,
        settings.allow_tf32,
        settings.nvls,
    )
    for reader in readers:
        try:
            reader()
        except ValueError as error:
            yield Finding("environment", State.FAULT, str(error))


def _method():
    resolve("doctor", None, settings.method())


def _isa():
    with contextlib.suppress(ImportError):  # `ffi_api` reports it
        cpu_engine.check_isa()


def ffi_api() -> Iterator[Finding]:
    """Yields a finding: whether the engine fits the XLA FFI API of this jaxlib."""
    running = ".".join(map(str, cpu_engine.running_ffi_api()))
    try:
        built = ".".join(map(str, cpu_engine.load().xla_ffi_api_version))
    except ImportError as error:
        yield Finding("XLA FFI API", State.FAULT, f"{error} (jaxlib has {running})")
    else:
        text = f"engine built for {built}, jaxlib has {running}"
        yield Finding("XLA FFI API", State.FINE, text)


def engine_here() -> Iterator[Finding]:
    """Yields findings about the CPU engine's instruction set and number of threads."""
    try:
        cpu = cpu_engine.load()
    except ImportError:
        return
    others = [isa for isa in cpu.isas() if isa != cpu.isa()]
    also = f"; also possible here: {', '.join(others)}" if others else ""
    yield Finding("instruction set", State.FINE, f"{cpu.isa()}{also}")
    cores, threads = len(os.sched_getaffinity(0)), cpu.num_threads()
    text = f"{threads} compute, on {cores} cores"
    if threads > cores:
        more = f"{text}: they would take turns. Set JAX_UB_NUM_THREADS={cores}."
        yield Finding("engine threads", State.WARNING, more)
    else:
        yield Finding("engine threads", State.FINE, text)
