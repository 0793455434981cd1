"""Starts JAX's backend, and registers the engines' FFI handlers with XLA."""

import contextlib

import jax

# This import registers `ScaledArray` with JAX, so that programs that take or return a
# `ScaledArray` can be deserialized.
from jax_ub._src import scaled_array  # noqa: F401
from jax_ub._src.errors import UnsupportedOverlapError, shown
from jax_ub._src.runtime import cpu_engine, cuda_engine


def register_targets() -> None:
    """Registers the FFI handlers of all ops with XLA, so that exported programs run.

    The CUDA engine's handlers are registered only if this process has CUDA devices.
    Every lowering does this. Only a process that loads a program which another process
    exported or compiled has to call it first, before it deserializes the program.
    Transformer Engine: none.
    """
    cpu_engine.register_targets()
    if cuda_engine.local_devices() and cuda_engine.why_not() is None:
        cuda_engine.register_targets()


def request_cpu_devices(count: int) -> None:
    """Requests at least `count` CPU devices. Has no effect after JAX has started."""
    if jax.config.values["jax_num_cpu_devices"] < count:
        # The number of devices cannot change after JAX has started: the update then
        # raises RuntimeError.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def start() -> list[jax.Device]:
    """Starts JAX's default backend (CPU or GPU), unless it is running already.

    Returns:
        The devices of all processes.
    """
    try:
        return jax.devices()
    # JAX raises AssertionError for a known platform whose plugin is not installed.
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        asked = "" if platforms is None else f" on {shown(platforms)}"
        reason = str(error) or "nothing is installed for it"
        raise UnsupportedOverlapError(
            f"jax does not start{asked}: {reason.rstrip('.')}. Install what it needs, "
            "or take another platform (JAX_PLATFORMS=cpu)."
        ) from error
