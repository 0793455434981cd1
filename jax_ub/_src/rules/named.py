"""Maps the overlaps that `initialize_ub` configured to the passes of an op call.

What each pass communicates. "Bulk" communication overlaps a GEMM that does not depend
on it; all other communication is fused with the GEMM.

| op | fprop | dgrad | wgrad |
|---|---|---|---|
| all_gather_matmul | AG | bulk AG of x, or RS | bulk RS of dx |
| matmul_reduce_scatter | RS | AG | AG, unless the dgrad has gathered dy |
| matmul_all_reduce | RS | local | local |
| linear, column, not sequence parallel | local | RS | local |
"""

from jax_ub._src.config.overlap_config import CommOverlapType
from jax_ub._src.config.resolve import DGRAD, FPROP, WGRAD
from jax_ub._src.errors import UnsupportedOverlapError, shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.runtime.registry import Overlap

_AG, _RS = CommOverlapType.AG, CommOverlapType.RS
# Maps each op and pass to the collectives that the pass may run. Passes that are not in
# the table do not communicate.
_COMMUNICATES: dict[str, dict[str, tuple[CommOverlapType, ...]]] = {
    "all_gather_matmul": {FPROP: (_AG,), DGRAD: (_AG, _RS), WGRAD: (_RS,)},
    "matmul_reduce_scatter": {FPROP: (_RS,), DGRAD: (_AG,), WGRAD: (_AG,)},
    "matmul_all_reduce": {FPROP: (_RS,)},
    "linear": {DGRAD: (_RS,)},
}


def choices_by_pass(
    op: str, label: str, found: dict[str, Overlap]
) -> dict[str, MethodChoice]:
    """Returns the methods that `initialize_ub` configured for each pass of a call.

    Args:
        op: the op's name.
        label: the call's name, for errors.
        found: the call's overlaps by pass, from `overlaps.find`.

    Returns:
        Choices by pass. A missing pass runs as it would without a name.

    Raises:
        UnsupportedOverlapError: if the op cannot run a configured overlap.
    """
    choices = {}
    for direction, possible in _COMMUNICATES.get(op, {}).items():
        overlap = found.get(direction)
        if overlap is None:
            continue
        _check(label, op, direction, possible, overlap)
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


def _check(label, op, direction, possible, overlap: Overlap):
    is_bulk = overlap.method == Method.BULK.value
    if overlap.comm_type in possible and is_bulk == _is_beside(
        op, direction, overlap.comm_type
    ):
        return
    wanted = " or ".join(
        f"{one.value} ({'bulk' if _is_beside(op, direction, one) else 'not bulk'})"
        for one in possible
    )
    raise UnsupportedOverlapError(
        f"{label}: overlap {shown(overlap.name)} is configured for "
        f'{overlap.comm_type.value} with method "{overlap.method}", but the '
        f"{direction} of {op} communicates {wanted}. Use another ub_name, configure "
        f"{shown(overlap.name)} for it, or pass method=."
    )


def _is_beside(op, direction, comm_type):
    """Returns whether an op's pass overlaps its collective with an independent GEMM."""
    if op != "all_gather_matmul":
        return False
    return (direction, comm_type) in ((DGRAD, _AG), (WGRAD, _RS))
