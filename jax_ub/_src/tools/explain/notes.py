"""Notes below the table of `explain`, about XLA's collectives that have no row."""

import collections
import math
from collections.abc import Collection, Iterator, Sequence

from jax_ub._src import lowering_log
from jax_ub._src.lowering_log import LoweredCall
from jax_ub._src.tables import format_bytes
from jax_ub._src.tools.explain import hlo

_GATHERS_NOTE = (
    "all-gathers are of activations or their gradients: on an explicit mesh, shard the "
    "tokens over the axis after the embedding"
)
_GATHERS_HINT = "shard kernels and activations as these calls do"


def about_collectives(
    found: Sequence[hlo.Found],
    lowered: Sequence[LoweredCall],
    axes: Collection[str] | None,
) -> Iterator[str]:
    """Yields the notes about XLA's collectives that have no row in the table.

    The arguments are described at `program.table_of`.
    """
    others: collections.Counter[str] = collections.Counter()
    for one in found:
        others.update(one.others)
        others.update(
            each.collective for each in one.unpaired if not note_of(each, axes)
        )
    if others:
        listed = ", ".join(f"{kind} x {num}" for kind, num in sorted(others.items()))
        yield f"XLA's collectives without a dot next to them: {listed}"
    yield from _parameters(found, axes)
    yield from _gathers_around_calls(found, axes)
    gathers = _num_activation_gathers(found, lowered)
    if gathers > 1:  # one is needed for the gradient of the embedding
        yield f"{gathers} {_GATHERS_NOTE}"


def note_of(one: hlo.Pair | hlo.Unpaired, axes: Collection[str] | None) -> str | None:
    """Returns the start of the note that counts an array of a collective, or None.

    Notes count gradients of parameters that are summed, and parameters that are
    gathered, because no call of jax_ub could overlap them. Over mesh axes that are not
    in `axes`, the axes of tensor parallelism, this is data parallelism.
    """
    if lowering_log.fallback_in(one.scope) is not None or not one.axes:
        return None
    names = ", ".join(one.axes)
    if one.is_of_kernel and axes is not None and not set(one.axes) & set(axes):
        what = "parameters" if one.collective == "all-gather" else "gradients"
        return f"data parallelism over {names}: {one.collective} of {what}"
    if one.sums_parameter_gradient:
        return f"tokens sharded over {names}: {one.collective} of gradients"
    return None


def _parameters(found, axes) -> Iterator[str]:
    """Yields notes about collectives that sum gradients or gather parameters.

    There is a note for each combination of collective and mesh axes.
    """
    moved: dict[str, list[int]] = {}
    for each in found:
        for one in (*each.pairs, *each.unpaired):
            if note := note_of(one, axes):
                moved.setdefault(note, []).append(one.moved_bytes)
    for note, sizes in moved.items():
        yield f"{note} x {len(sizes)}, sends {format_bytes(sum(sizes))}"


def _gathers_around_calls(found, axes) -> Iterator[str]:
    """Yields a note if XLA adds all-gathers next to jax_ub's calls, over their axes."""
    calls = [
        one.call
        for each in found
        for one in each.reshards
        if one.collective == "all-gather" and set(one.axes) & set(axes or ())
    ]
    if calls:
        names = ", ".join(dict.fromkeys(calls))
        yield f"XLA adds all-gather x {len(calls)} next to {names}: {_GATHERS_HINT}"


def _num_activation_gathers(found, lowered) -> int:
    """Returns the number of all-gathers of activations that are not next to a dot.

    Their result has as many rows as x has tokens in one of the calls, and not the shape
    of a kernel, because the gradients of kernels are gathered, too.
    """
    sizes = [one.call.global_sizes(one.operands)[1:] for one in lowered]
    tokens = {M for M, _, _ in sizes}
    kernels = {shape for _, K, N in sizes for shape in ((K, N), (N, K))}
    return sum(
        len(shape) > 1 and math.prod(shape[:-1]) in tokens and shape not in kernels
        for one in found
        for shape in one.gathered
    )
