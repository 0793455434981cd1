"""Maps the overlaps that `initialize_ub` configured to the passes of an op call."""

from jax_ub._src.errors import UnsupportedOverlapError, shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.parallel import PASSES, WGRAD, ParallelMode
from jax_ub._src.runtime.registry import Overlap


def choices_by_pass(
    mode: ParallelMode, label: str, found: dict[str, Overlap]
) -> dict[str, MethodChoice]:
    """Returns the methods that `initialize_ub` configured for each pass of a call.

    Args:
        mode: the call's row in the table of parallel modes.
        label: the call's name, for errors.
        found: the call's overlaps by pass, from `registry.find`.

    Returns:
        Choices by pass. A missing pass runs as it would without a name.

    Raises:
        UnsupportedOverlapError: if the op cannot run a configured overlap.
    """
    choices = {}
    for direction in PASSES:
        overlap = found.get(direction)
        if overlap is None or not mode.communications(direction):
            continue
        _check(mode, label, direction, overlap)
        # A wgrad that the user did not configure takes the dgrad's choice.
        if direction != WGRAD or overlap.is_configured:
            config = overlap.config
            choices[direction] = MethodChoice(
                Method(config.method),
                config.num_splits,
                config.kernel_options,
                is_explicit=overlap.is_configured,
            )
    return choices


def _check(mode, label, direction, overlap: Overlap):
    possible = mode.communications(direction)
    is_bulk = overlap.method == Method.BULK.value
    if (overlap.comm_type, is_bulk) in {
        (one.comm_type, one.is_bulk) for one in possible
    }:
        return
    wanted = " or ".join(map(str, possible))
    raise UnsupportedOverlapError(
        f"{label}: overlap {shown(overlap.name)} is configured for "
        f'{overlap.comm_type.value} with method "{overlap.method}", but the '
        f"{direction} of {mode.function} communicates {wanted}. Use another ub_name, "
        f"configure {shown(overlap.name)} for it, or pass method=."
    )
