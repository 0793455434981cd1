"""Support for `jax.export`: safety checks to disable, and registration on loading."""

from jax import export

from jax_ub._src.runtime import cuda, engine

# Listed here rather than read from the engine: importing jax_ub must not load an
# engine, so that `python -m jax_ub doctor` can report a missing one.
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
    exported or compiled has to call it first. Transformer Engine: none.
    """
    engine.register_targets()
    if cuda.local_devices() and cuda.why_not() is None:
        cuda.register_targets()
