"""Starts JAX's default backend, and explains in one line why it cannot start."""

import jax

from jax_ub._src.errors import UnsupportedOverlapError, shown


def start() -> list[jax.Device]:
    """Starts JAX's default backend (CPU or GPU), unless it is running already.

    Returns:
        The devices of all processes.

    Raises:
        UnsupportedOverlapError: if none of the requested platforms is available.
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
