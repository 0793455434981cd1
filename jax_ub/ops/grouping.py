"""Cuts fused lists into groups that are differentiated as one."""

from collections.abc import Sequence

from jax_ub.ops.channels import Port, Routes
from jax_ub.ops.group import FusibleGroup
from jax_ub.ops.operation import FusedOperation, Op


def make_groups(
    forward_ops: Sequence[Op], backward_ops: Sequence[Op], routes: Routes
) -> tuple[FusibleGroup, ...]:
    """Cuts two lists over the same basic operations where windows of both end."""
    forward, backward = _by_place(forward_ops), _by_place(backward_ops)
    cuts = sorted(set(forward) & set(backward))
    ends = [*cuts[1:], len(routes.sources)] if cuts else []
    return tuple(
        _group(forward, backward, routes, range(first, last))
        for first, last in zip(cuts, ends, strict=True)
    )


def _by_place(ops: Sequence[Op]) -> dict[int, FusedOperation]:
    """Each operation by the place of its first basic one; those alone as windows."""
    windows: dict[int, FusedOperation] = {}
    place = 0
    for op in ops:
        if not isinstance(op, FusedOperation):
            op = FusedOperation(op.basic_ops)
        windows[place] = op
        place += len(op.basic_ops)
    return windows


def _group(forward, backward, routes, inside):
    def source_inside(source: Port | int) -> Port | None:
        if isinstance(source, int) or source[0] not in inside:
            return None
        return source[0] - inside.start, source[1]

    sources = tuple(tuple(map(source_inside, routes.sources[i])) for i in inside)
    taken_later = {port for row in routes.sources[inside.stop :] for port in row}
    is_result = tuple(
        tuple(
            is_public or (i, j) in taken_later
            for j, is_public in enumerate(routes.is_public[i])
        )
        for i in inside
    )
    return FusibleGroup(
        tuple(forward[i] for i in inside if i in forward),
        tuple(backward[i] for i in inside if i in backward),
        inside.start,
        sources,
        is_result,
    )
