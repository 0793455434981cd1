"""Which extra output becomes which extra input."""

import dataclasses
from collections.abc import Sequence

from jax_ub.errors import ShapeContractError, UnknownNameError, nearest
from jax_ub.ops.operation import BasicOperation

# An extra output: the place of its operation, and its number there.
Port = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Routes:
    """The ways of the extra tensors of a list of basic operations.

    Attributes:
        sources: for each operation and extra input, the output that it takes, or the
            number of the caller's extra input.
        is_public: for each operation and extra output, whether the caller gets it.
        num_extra_inputs: how many the caller passes.
    """

    sources: tuple[tuple[Port | int, ...], ...]
    is_public: tuple[tuple[bool, ...], ...]
    num_extra_inputs: int


def find_routes(ops: Sequence[BasicOperation]) -> Routes:
    """Connects the channels, and counts what is left for the caller.

    Raises:
        ShapeContractError: if two outputs have one name, or a consumer comes before its
            producer.
        UnknownNameError: if no output has a name.
    """
    producers = _producers(ops)
    sources: list[tuple[Port | int, ...]] = []
    passed = 0
    for place, op in enumerate(ops):
        row: list[Port | int] = []
        channels = op.extra_input_channels or (None,) * op.num_extra_inputs
        for name in channels:
            if name is None:
                row.append(passed)
                passed += 1
            else:
                row.append(_source(ops, place, name, producers))
        sources.append(tuple(row))
    return Routes(tuple(sources), tuple(map(_public, ops)), passed)


def _producers(ops) -> dict[str, Port]:
    producers: dict[str, Port] = {}
    for place, op in enumerate(ops):
        for number, channel in enumerate(op.extra_output_channels):
            if channel is None:
                continue
            if channel.name in producers:
                first = producers[channel.name][0]
                raise ShapeContractError(
                    f"{describe(ops, place)}: the channel {channel.name!r} is already "
                    f"that of {describe(ops, first)}. Give every extra output a name "
                    "of its own."
                )
            producers[channel.name] = (place, number)
    return producers


def _source(ops, place, name, producers) -> Port:
    if name not in producers:
        known = nearest(name, producers) if producers else "There is none at all."
        raise UnknownNameError(
            f"{describe(ops, place)}: no extra output has the channel {name!r}. {known}"
        )
    source = producers[name]
    if source[0] >= place:
        raise ShapeContractError(
            f"{describe(ops, place)}: it takes the channel {name!r}, which comes from "
            f"{describe(ops, source[0])}, not before it. Move the producer to the "
            "front."
        )
    return source


def _public(op) -> tuple[bool, ...]:
    channels = op.extra_output_channels or (None,) * op.num_extra_outputs
    return tuple(channel is None or channel.output_to_caller for channel in channels)


def describe(ops: Sequence[BasicOperation], place: int) -> str:
    """How errors name one operation of a list."""
    return f"operation {place} ({ops[place].label})"
