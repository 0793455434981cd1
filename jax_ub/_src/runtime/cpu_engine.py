"""Loads the CPU engine `jax_ub._cpu`, and registers it at the first lowering."""

import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable

import jax

from jax_ub._src.errors import ConfigurationError, UbError, nearest, shown
from jax_ub._src.runtime import settings

_PLATFORM = "cpu"
_BUILD = "In a clone of jax_ub, build it with: pip install . (docs/install.md)"


class NoEngineError(UbError, ImportError):
    """Raised if an engine is needed, and this installation of jax_ub has none."""


@functools.cache
def why_not() -> str | None:
    """Returns why this installation has no compiled engine; None if it should have one.

    The pure-Python wheel has none: calls of method "auto" run as plain `jax.lax`. In
    other installations, a missing engine is an error of `load`.
    """
    try:
        wheel = importlib.metadata.distribution("jax_ub").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    is_built = "jax_ub._cpu" in sys.modules or importlib.util.find_spec("jax_ub._cpu")
    if is_built or "Root-Is-Purelib: true" not in wheel:
        return None
    return "the pure-Python wheel has no engine (see docs/install.md)"


@functools.cache
def load() -> types.ModuleType:
    """Imports the CPU engine `jax_ub._cpu`, and checks that jaxlib supports it.

    It neither registers handlers nor starts a backend: if jaxlib rejects a handler, the
    whole backend fails to start.

    Raises:
        ImportError: if the engine was not built, or was built for another Python,
            another system or an incompatible FFI API. Says what to install.
            `NoEngineError` in the pure-Python wheel.
    """
    text = "compiled engine jax_ub._cpu is missing."
    return load_module("jax_ub._cpu", text, _how_to_get_it)


def load_module(
    name: str, missing: str, how_to_get_it: Callable[[], str]
) -> types.ModuleType:
    """Imports a compiled engine, and checks that jaxlib supports its FFI API version.

    `missing` is the text of the error for an engine that was not built. `how_to_get_it`
    returns the advice for an engine that is missing or that the dynamic linker rejects.
    """
    reason = why_not()
    if reason is not None:
        raise NoEngineError(f"jax_ub: {reason}")
    try:
        engine = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"jax_ub: its {missing} {how_to_get_it()}") from error
    except ImportError as error:
        running = "Python {}.{}".format(*sys.version_info)
        raise ImportError(
            f"jax_ub: {running} cannot load its engine {name}, which may have been "
            f"built for another Python or system: {error}. {how_to_get_it()}"
        ) from error
    check_ffi_api(tuple(engine.xla_ffi_api_version), running_ffi_api(), jax.__version__)
    return engine


def _how_to_get_it() -> str:
    """Returns advice for a missing engine: build it, or import the installed copy."""
    imported = pathlib.Path(__file__).parents[3]
    try:
        found = importlib.metadata.distribution("jax_ub").locate_file("")
    except importlib.metadata.PackageNotFoundError:
        return _BUILD
    installed = pathlib.Path(str(found))
    if installed == imported or not any(installed.glob("jax_ub/_cpu*")):
        return _BUILD
    return (
        f"Python imports the sources in {imported}, which hide the package in "
        f"{installed}. Run Python in another folder, or as python -P; or install the "
        "sources with: pip install -e ."
    )


def check_ffi_api(
    built: tuple[int, int], running: tuple[int, int], jax_version: str
) -> None:
    """Raises an error unless the installed jaxlib accepts the engine's FFI handlers."""
    if built[0] != running[0] or built[1] > running[1]:
        raise ImportError(
            f"jax_ub: its engine was built for XLA FFI API {built[0]}.{built[1]}, but "
            f"jax {jax_version} has {running[0]}.{running[1]}. Install a newer jax "
            f"(pip install -U jax), or build jax_ub for this one. {_BUILD}"
        )


def running_ffi_api() -> tuple[int, int]:
    """Returns the FFI API version of the installed jaxlib, as (major, minor).

    It is read from the header that jaxlib installs.
    """
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    pattern = r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)"
    major, minor = re.findall(pattern, header.read_text())
    return int(major), int(minor)


def devices_of(backend: str) -> list[jax.Device]:
    """Returns this process's devices of a JAX backend; empty if there is none."""
    try:
        return jax.local_devices(backend=backend)
    except RuntimeError:
        return []


@functools.cache
def register_targets() -> None:
    """Configures the CPU engine and registers its FFI handlers, once per process."""
    # JAX's backend fails to start if FFI targets with state have been registered
    # before. So it is started first, by jax.devices().
    jax.devices()
    cpu = load()
    configure()
    cpu.set_local_devices([device.id for device in devices_of("cpu")])
    jax.ffi.register_ffi_type(
        "jax_ub$CallSite", cpu.call_site_type(), platform=_PLATFORM
    )
    for name, handlers in (cpu.targets() | cpu.quantize_targets()).items():
        jax.ffi.register_ffi_target(name, handlers, platform=_PLATFORM, api_version=1)


def check_isa() -> None:
    """Raises an error if the engine has no kernels for `JAX_UB_ISA`."""
    name = settings.isa()
    if name is None or why_not() is not None:
        return
    known = load().isas()
    if name not in known:
        raise ConfigurationError(
            f"JAX_UB_ISA = {shown(name)} is not available on this machine. "
            f"{nearest(name, known)} Set one of them, or unset it."
        )


@functools.cache
def configure() -> None:
    """Passes the `JAX_UB_` environment variables to the CPU engine, once per process.

    Before this call, the engine reports the default instruction set and number of
    threads.
    """
    cpu = load()
    check_isa()
    given = {
        cpu.set_timeout_s: settings.timeout_s(),
        cpu.set_first_call_timeout_s: settings.first_call_timeout_s(),
        cpu.set_num_threads: settings.num_threads(),
        cpu.set_isa: settings.isa(),
    }
    for hand_over, value in given.items():
        if value is not None:
            hand_over(value)
