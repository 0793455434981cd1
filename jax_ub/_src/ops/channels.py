"""Connects extra outputs of operations to extra inputs of later operations."""

import dataclasses
import itertools
from collections.abc import Sequence

from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True)
class ExtraTensorEdges:
    """Records which extra input of an operation reads which extra output of another.

    Extra inputs and outputs are the arrays that operations take and return besides the
    activation, such as a residual connection.

    An *edge* is a number for one extra tensor: an extra input that the caller passes,
    or an extra output of an operation.

    Attributes:
        inputs: for each operation, the edges that are its extra inputs.
        outputs: for each operation, the edges that are its extra outputs.
        from_caller: the edges that the caller passes, in argument order.
        to_caller: the edges that are returned to the caller, in order.
    """

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    from_caller: tuple[int, ...]
    to_caller: tuple[int, ...]


def connect_channels(ops: Sequence[BasicOperation]) -> ExtraTensorEdges:
    """Connects each extra input to the extra output with the same channel name.

    A channel is the name of an extra output, under which later operations read it.
    Extra inputs without a channel come from the caller.

    Raises:
        ShapeContractError: if two outputs have the same channel, or an operation reads
            a channel before its producer.
        UnknownNameError: if a channel has no producer.
    """
    numbers = itertools.count()
    outputs = [tuple(itertools.islice(numbers, op.num_extra_outputs)) for op in ops]
    producers = _producers(ops, outputs)
    inputs: list[tuple[int, ...]] = []
    from_caller: list[int] = []
    to_caller: list[int] = []
    for place, op in enumerate(ops):
        row: list[int] = []
        for name in op.extra_input_channels or (None,) * op.num_extra_inputs:
            if name is None:
                from_caller.append(next(numbers))
                row.append(from_caller[-1])
            else:
                row.append(_source(ops, place, name, producers))
        inputs.append(tuple(row))
        channels = op.extra_output_channels or (None,) * op.num_extra_outputs
        for edge, channel in zip(outputs[place], channels, strict=True):
            if channel is None or channel.output_to_caller:
                to_caller.append(edge)
    return ExtraTensorEdges(
        tuple(inputs), tuple(outputs), tuple(from_caller), tuple(to_caller)
    )


def _producers(ops, outputs) -> dict[str, tuple[int, int]]:
    """Maps each channel name to the operation that writes it: (its index, the edge)."""
    producers: dict[str, tuple[int, int]] = {}
    for place, op in enumerate(ops):
        # Not strict: extra_output_channels is empty if the operation has no channels.
        for edge, channel in zip(
            outputs[place], op.extra_output_channels, strict=False
        ):
            if channel is None:
                continue
            if channel.name in producers:
                first, _ = producers[channel.name]
                raise ShapeContractError(
                    f"{operation_label(ops, place)}: the channel "
                    f"{shown(channel.name)} is "
                    f"already that of {operation_label(ops, first)}. Give every extra "
                    f"output "
                    "a name of its own."
                )
            producers[channel.name] = (place, edge)
    return producers


def _source(ops, place, name, producers) -> int:
    """Returns the number of the extra tensor that an operation reads by channel name.

    The operation has the index `place` in `ops`.
    """
    if name not in producers:
        known = nearest(name, producers) if producers else "There is none at all."
        raise UnknownNameError(
            f"{operation_label(ops, place)}: no extra output has the channel "
            f"{shown(name)}. "
            f"{known}"
        )
    producer, edge = producers[name]
    if producer >= place:
        raise ShapeContractError(
            f"{operation_label(ops, place)}: it takes the channel {shown(name)}, "
            f"which comes "
            f"from {operation_label(ops, producer)}, not before it. Move the producer "
            f"to the "
            "front."
        )
    return edge


def operation_label(ops: Sequence[BasicOperation], place: int) -> str:
    """Returns an operation's index and name, for error messages."""
    return f"operation {place} ({ops[place].label})"
