"""What `jax.export` has to be told about the engines' calls."""

from jax import export

from jax_ub.runtime import cuda, engine

# For jax.export.export(f, disabled_checks=ub.export_safety_checks): jax does not know
# that these calls are stable. A process that only loads what another one exported, or
# compiled ahead of time, calls ub.register_targets() first.
export_safety_checks = tuple(
    export.DisabledSafetyCheck.custom_call(target)
    for target in sorted(engine.load().targets())
)


def register_targets() -> None:
    """Hands the handlers of every engine that this process has devices for to XLA.

    Every lowering does this. Only a process that runs programs which another one
    exported or compiled calls it, before it loads them. Transformer Engine: none.
    """
    engine.register_targets()
    if cuda.local_devices() and cuda.why_not() is None:
        cuda.register_targets()
