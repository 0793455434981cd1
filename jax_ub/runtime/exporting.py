"""What `jax.export` has to be told about the engine's calls."""

from jax import export

from jax_ub.runtime import engine

# For jax.export.export(f, disabled_checks=ub.export_safety_checks): jax does not know
# that these calls are stable. A process that only loads what another one exported, or
# compiled ahead of time, calls ub.register_targets() first.
export_safety_checks = tuple(
    export.DisabledSafetyCheck.custom_call(target)
    for target in sorted(engine.load().targets())
)
