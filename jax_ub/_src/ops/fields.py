"""Checks of the fields of operations and of the results of their initializers."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax

from jax_ub._src import arguments, methods
from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.primitives import mesh


@dataclasses.dataclass(frozen=True)
class OutputChannel:
    """The name under which later operations read an extra output of an operation.

    Attributes:
        name: the channel's name, by which later operations read the extra output.
        output_to_caller: whether the extra output is also returned to the caller.
    """

    name: str
    output_to_caller: bool = True


def check_fields(op: Any) -> None:
    """Checks the constructor arguments of a basic operation: types, names, hashing.

    Raises:
        ShapeContractError: if a field has the wrong type or is not hashable.
        UnknownNameError: if `method` is unknown, or a flag is not a bool.
    """
    fields = {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}
    arguments.check(op.label, **fields)
    methods.resolve(op.label, fields.get("method"), None)
    if fields.get("axis_name") is not None:
        mesh.check_axis_name(op.label, fields["axis_name"])
    for kind, number, entry in (
        ("input", op.num_extra_inputs, str),
        ("output", op.num_extra_outputs, OutputChannel),
    ):
        name = f"extra_{kind}_channels"
        channels = _read_channels(op.label, name, fields[name], number, entry)
        object.__setattr__(op, name, channels)
    for field in dataclasses.fields(op):
        name, value = field.name, getattr(op, field.name)
        try:
            hash(value if field.compare else None)
        except Exception as error:
            raise ShapeContractError(
                f"{op.label}: {name} = {shown(value)} does not hash, but an operation "
                "is a key of JAX's caches. Pass a value that does."
            ) from error


def _read_channels(label, field, channels, number, kind):
    is_list = isinstance(channels, tuple | list) and len(channels) in (0, number)
    if not is_list or not all(isinstance(each, kind | None) for each in channels):
        raise ShapeContractError(
            f"{label}: {field} = {shown(channels)} is not a tuple of {number} entries, "
            f"each {kind.__name__} or None. Use with_extra_input_channel and "
            "with_extra_output_channel."
        )
    for channel in channels:
        if channel is not None:
            check_channel_name(label, getattr(channel, "name", channel))
    return tuple(channels)


def check_channel_name(label: str, name: Any) -> None:
    """Checks that the name of an extra output is a string without spaces.

    Raises:
        ShapeContractError: if it is not.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\S+", name):
        raise ShapeContractError(
            f"{label}: {shown(name)} is not the name of a channel. Pass a string "
            "without spaces."
        )


def initialize(
    op: Any, name: str, make: Callable, key: Any, shape: tuple[int, ...]
) -> jax.Array:
    """Creates one parameter with its initializer, and checks the array's shape.

    Args:
        op: the operation.
        name: the name of the initializer field, such as "kernel_init".
        make: the initializer.
        key: PRNG key.
        shape: the global shape.

    Raises:
        ShapeContractError: if `key` is not a PRNG key, or the initializer does not
            return an array of this shape.
    """
    shapes.check_key(op.label, "key", key)
    values = make(key, shape, op.param_dtype)
    shapes.check_initial(op.label, name, values, shape)
    return values
