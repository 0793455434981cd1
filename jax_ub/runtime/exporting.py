"""What `jax.export` has to be told about the engines' calls."""

from jax import export

from jax_ub.runtime import cuda, engine

# The targets by name: importing jax_ub loads no engine, so that doctor can say
# what is missing.
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
# For jax.export.export(f, disabled_checks=ub.export_safety_checks): jax does not know
# that these calls are stable. A process that only loads what another one exported, or
# compiled ahead of time, calls ub.register_targets() first.
export_safety_checks = tuple(
    export.DisabledSafetyCheck.custom_call(f"jax_ub${target}") for target in _TARGETS
)


def register_targets() -> None:
    """Hands the handlers of every engine that this process has devices for to XLA.

    Every lowering does this. Only a process that runs programs which another one
    exported or compiled calls it, before it loads them. Transformer Engine: none.
    """
    engine.register_targets()
    if cuda.local_devices() and cuda.why_not() is None:
        cuda.register_targets()
