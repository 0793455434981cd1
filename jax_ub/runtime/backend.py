"""JAX's backend: started, or the reason why it does not start in one line."""

import jax

from jax_ub.errors import UnsupportedOverlapError, shown


def start() -> list[jax.Device]:
    """Starts it where it has not, as anything does that asks for devices.

    Returns:
        The devices of all processes.

    Raises:
        UnsupportedOverlapError: if no platform that was asked for can be had.
    """
    try:
        return jax.devices()
    # An assertion of JAX's where it knows a platform, but nothing is installed for it.
    except (RuntimeError, AssertionError) as error:
        platforms = getattr(jax.config, "jax_platforms", None)
        asked = "" if platforms is None else f" on {shown(platforms)}"
        reason = str(error) or "nothing is installed for it"
        raise UnsupportedOverlapError(
            f"jax does not start{asked}: {reason.rstrip('.')}. Install what it needs, "
            "or take another platform (JAX_PLATFORMS=cpu)."
        ) from error
