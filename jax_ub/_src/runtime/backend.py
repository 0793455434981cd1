"""Starts JAX's backend, and registers the engines' FFI handlers with XLA."""

import contextlib

import jax
from jax import export

# `ScaledArray` is imported so that programs that take or return it can be deserialized.
from jax_ub._src import scaled_array  # noqa: F401
from jax_ub._src.errors import UnsupportedOverlapError, shown
from jax_ub._src.runtime import cpu_engine, cuda_engine

# The targets are listed here, because reading them from the engine would load it.
# `import jax_ub` must not load an engine, so that `python -m jax_ub doctor` can report
# a missing one.
_TARGETS = (
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "wgrad",
)
# For jax.export.export(f, disabled_checks=ub.export_safety_checks): jax rejects custom
# calls that it does not know to be stable. A process that only loads an exported or
# ahead-of-time compiled program must call ub.register_targets() first.
export_safety_checks = tuple(
    export.DisabledSafetyCheck.custom_call(f"jax_ub${target}") for target in _TARGETS
)


def register_targets() -> None:
    """Registers all FFI handlers with XLA, so that an exported program can run.

    The CUDA engine's handlers are registered only if this process has CUDA devices.
    Every lowering does this. Only a process that loads a program which another process
    exported or compiled has to call it first, before it deserializes the program.
    Transformer Engine: none.
    """
    cpu_engine.register_targets()
    if cuda_engine.local_devices() and cuda_engine.why_not() is None:
        cuda_engine.register_targets()


def request_cpu_devices(count: int) -> None:
    """Configures JAX for at least `count` CPU devices, unless JAX has started."""
    if getattr(jax.config, "jax_num_cpu_devices", 0) < count:
        # After JAX's start, its number of devices cannot be changed.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def start() -> list[jax.Device]:
    """Starts JAX's default backend (CPU or GPU), unless it is already running.

    Returns:
        The devices of all processes.
    """
    try:
        return jax.devices()
    # JAX raises AssertionError for a platform that it knows but has no plugin for.
    except (RuntimeError, AssertionError) as error:
        platforms = getattr(jax.config, "jax_platforms", None)
        asked = "" if platforms is None else f" on {shown(platforms)}"
        reason = str(error) or "nothing is installed for it"
        raise UnsupportedOverlapError(
            f"jax does not start{asked}: {reason.rstrip('.')}. Install what it needs, "
            "or take another platform (JAX_PLATFORMS=cpu)."
        ) from error
