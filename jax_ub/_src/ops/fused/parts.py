"""Checks the basic operations from which a fused operation is constructed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.operation import BasicOperation


class Part(NamedTuple):
    """One of the basic operations that a fused operation's constructor takes.

    `name` is the constructor's keyword, `kind` the required type and `given` the
    argument that the caller passed.
    """

    name: str
    kind: type[BasicOperation]
    given: Any
    is_optional: bool = False


def collect(
    op: str, basic_ops: Sequence[BasicOperation] | None, *parts: Part
) -> tuple[Any, ...]:
    """Checks a constructor's basic operations and returns them in forward order.

    The caller passes them by keyword or in one tuple. The result has None for optional
    operations that are absent.

    Args:
        op: the name of the fused operation in error messages.
        basic_ops: the operations in forward order; None if the caller passed keywords.
        *parts: what the constructor takes, in forward order.

    Raises:
        ShapeContractError: if a part is missing or has the wrong type, or if the caller
            passed both `basic_ops` and keywords.
    """
    named = [part for part in parts if part.given is not None]
    if basic_ops is None:
        for part in parts:
            _check_type(op, part)
        return tuple(part.given for part in parts)
    if named:
        raise ShapeContractError(
            f"{op}: basic_ops is given beside {named[0].name}. Pass the operations "
            f"once: {_call(op, parts)}."
        )
    if not isinstance(basic_ops, (tuple, list)):
        raise ShapeContractError(
            f"{op}: basic_ops is a {type(basic_ops).__name__}, not a tuple of "
            f"operations. Pass {_call(op, parts)}."
        )
    return _in_order(op, basic_ops, parts)


def _check_type(op, part):
    if part.given is None and part.is_optional:
        return
    if part.given is None:
        raise ShapeContractError(
            f"{op}: {part.name} is missing. Pass {part.name}=ops.{part.kind.__name__}"
            "(...)."
        )
    if not isinstance(part.given, part.kind):
        raise ShapeContractError(
            f"{op}: {part.name} = {shown(part.given)} is a "
            f"{type(part.given).__name__}, not an ops.{part.kind.__name__}. Pass one."
        )


def _in_order(op, basic_ops, parts):
    """Assigns the operations of a tuple to the keywords, by type and in order."""
    rest = list(basic_ops)
    found: list[BasicOperation | None] = []
    for part in parts:
        fits = bool(rest) and isinstance(rest[0], part.kind)
        found.append(rest.pop(0) if fits else None)
    is_whole = all(
        part.is_optional or each is not None
        for part, each in zip(parts, found, strict=True)
    )
    if rest or not is_whole:
        kinds = ", ".join(type(each).__name__ for each in basic_ops)
        raise ShapeContractError(
            f"{op}: basic_ops has the types ({kinds}), which are not its window. Pass "
            f"{_call(op, parts)}."
        )
    return tuple(found)


def _call(op, parts):
    """Returns the expected constructor call as text, for error messages."""
    keywords = ", ".join(
        f"{part.name}={'None' if part.is_optional else '...'}" for part in parts
    )
    return f"{op}({keywords})"


def present(*ops: BasicOperation | None) -> tuple[BasicOperation, ...]:
    """Returns the operations that are not None, the value of absent optional ones."""
    return tuple(op for op in ops if op is not None)


def check_userbuffers(op: str, given: Any, kind: type) -> None:
    """Checks that `userbuffers`, an overlapped linear, has the type `kind`.

    Raises:
        ShapeContractError: if it is neither None nor an instance of `kind`.
    """
    if given is not None and not isinstance(given, kind):
        raise ShapeContractError(
            f"{op}: userbuffers = {shown(given)} is of type {type(given).__name__}. "
            f"Pass the ops.fused.{kind.__name__} of the window, or leave it out."
        )


def check_in_place(op: str, name: str, part: Any, wanted: bool) -> None:
    """Checks that the field `in_place` of an operation has the required value.

    The operation is a `MakeExtraOutput` or an `AddExtraInput`.

    Raises:
        ShapeContractError: if it differs from `wanted`.
    """
    if part.in_place != wanted:
        kind = type(part).__name__
        raise ShapeContractError(
            f"{op}: {name} = {shown(part)} has in_place = {part.in_place}. Pass "
            f"{name}=ops.{kind}(in_place={wanted}), or leave {kind} unfused."
        )


def check_mode(op: str, linear: Any, refused: str, reason: str) -> None:
    """Checks that a linear does not have a tensor-parallel mode that cannot be fused.

    `refused` is this mode, and `reason` explains it in the error message.

    Raises:
        ShapeContractError: if it is.
    """
    if linear.tensor_parallel_mode == refused:
        raise ShapeContractError(
            f'{op}: linear has tensor_parallel_mode = "{refused}": {reason}. Leave '
            "the operations unfused."
        )
