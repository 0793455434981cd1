"""Notes below the table of `explain`, about XLA's collectives that have no row."""

import collections
import itertools
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
    if others:
        listed = ", ".join(f"{kind} x {num}" for kind, num in sorted(others.items()))
        yield f"XLA's collectives without a dot next to them: {listed}"
    yield from _data_parallelism(found, axes)
    yield from _gathers_around_calls(found, axes)
    gathers = _num_activation_gathers(found, lowered)
    if gathers > 1:  # one is needed for the gradient of the embedding
        yield f"{gathers} {_GATHERS_NOTE}"


def is_data_parallel(pair: hlo.Pair, axes: Collection[str] | None) -> bool:
    """Returns whether a collective next to a dot belongs to data parallelism.

    Then it sums the gradient of a kernel, or gathers a kernel, over mesh axes that are
    not in `axes`, the axes of tensor parallelism. The result is False if the axes are
    unknown.
    """
    is_fallback = lowering_log.fallback_in(pair.scope) is not None
    known = pair.is_of_kernel and pair.axes and axes is not None and not is_fallback
    return bool(known) and not set(pair.axes) & set(axes or ())


def _data_parallelism(found, axes) -> Iterator[str]:
    """Yields notes about collectives that sum gradients or gather kernels.

    These are over mesh axes of data parallelism; there is a note for each combination
    of collective and mesh axes. `axes` are the axes of tensor parallelism.
    """
    moved: dict[tuple[str, str], list[int]] = {}
    for pair in itertools.chain.from_iterable(one.pairs for one in found):
        if is_data_parallel(pair, axes):
            key = (pair.collective, ", ".join(pair.axes))
            moved.setdefault(key, []).append(pair.moved_bytes)
    for (collective, names), sizes in moved.items():
        what = "kernels" if collective == "all-gather" else "gradients"
        yield (
            f"data parallelism over {names}: {collective} of {what} x {len(sizes)}, "
            f"sends {format_bytes(sum(sizes))}"
        )


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
