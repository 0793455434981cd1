"""Splits a list of fused operations into groups that JAX differentiates in turn."""

import itertools
from collections.abc import Sequence

from jax_ub._src.ops.channels import ExtraTensorEdges
from jax_ub._src.ops.group import OperationGroup
from jax_ub._src.ops.operation import FusedOperation, Op, windows


def make_groups(
    forward_ops: Sequence[Op], backward_ops: Sequence[Op], extra_edges: ExtraTensorEdges
) -> tuple[OperationGroup, ...]:
    """Splits operations into the shortest runs that can be differentiated separately.

    The forward and the backward may be fused differently. A run ends wherever a fused
    operation of the forward and one of the backward end together.
    """
    forward, backward = _by_place(forward_ops), _by_place(backward_ops)
    cuts = sorted(set(forward) & set(backward))
    ends = [*cuts[1:], len(extra_edges.inputs)] if cuts else []
    return tuple(
        _group(forward, backward, extra_edges, range(first, last))
        for first, last in zip(cuts, ends, strict=True)
    )


def _by_place(ops: Sequence[Op]) -> dict[int, FusedOperation]:
    """Returns the fused operations by the index of their first basic operation.

    A basic operation that is not fused becomes a fused operation of one.
    """
    return {
        window.start: op
        if isinstance(op, FusedOperation)
        else FusedOperation(op.basic_ops)
        for window, op in windows(ops)
    }


def _group(forward, backward, extra_edges, inside):
    taken_later = itertools.chain(*extra_edges.inputs[inside.stop :])
    wanted = {*extra_edges.to_caller, *taken_later}
    outputs = extra_edges.outputs[inside.start : inside.stop]
    return OperationGroup(
        tuple(forward[i] for i in inside if i in forward),
        tuple(backward[i] for i in inside if i in backward),
        inside.start,
        extra_edges.inputs[inside.start : inside.stop],
        outputs,
        tuple(edge for edge in itertools.chain(*outputs) if edge in wanted),
    )
