"""The interface of fused operations, and checks of what they are constructed from."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.operation import (
    BasicOperation,
    Extras,
    Operation,
    Params,
    RequestedGradients,
    Residuals,
    init_each,
    split_each,
)
from jax_ub._src.scaled_array import dequantized


@dataclasses.dataclass(frozen=True)
class FusedOperation(Operation):
    """Base class of operations that replace several consecutive basic operations.

    The replaced operations are called the window. A subclass computes their forward,
    their backward or both together, for example in one GEMM.

    A subclass overrides `forward`, `backward` or both. The methods of this class call
    the basic operations one after another. Extra inputs come from outside the window,
    so no channel may connect two operations of one window.

    A caller may also put a fused operation into `Sequential` or `OperationFuser`. It
    then runs unchanged in the passes that it overrides; in the other pass, the
    registered fusions see its basic operations. Its parameters are a tuple with one
    entry for each basic operation.
    """

    basic_ops: tuple[Any, ...]  # basic operations; each subclass fixes their types

    @property
    def entries(self) -> tuple[Any, ...]:
        return (self,)

    def init(self, key: jax.Array) -> tuple[Any, ...]:
        return init_each(self.basic_ops, key)

    def specs(self) -> tuple[Any, ...]:
        return tuple(op.specs() for op in self.basic_ops)

    def split(self, params: Any) -> tuple[Params, ...]:
        return split_each(type(self).__name__, self.basic_ops, params)

    def overrides(self, name: str) -> bool:
        """Returns whether the subclass fuses the pass "forward" or "backward"."""
        return getattr(type(self), name) is not getattr(FusedOperation, name)

    @property
    def overlaps(self) -> bool:
        """Returns whether the operation overlaps a collective with a GEMM.

        `explain()` reports it.
        """
        return False

    @classmethod
    def unfused_reasons(cls, ops: Sequence["Op"]) -> dict[int, str]:
        """Returns why operations that resemble this class's pattern are not fused.

        `explain()` reports the reasons. Their keys are indices into `ops`, the argument
        of `fuse_forward_ops` or `fuse_backward_ops`: the index of the linear, if there
        is one.
        """
        old_name = getattr(cls, "refusals", None)
        if old_name is None:
            return {}
        warnings.warn(
            f"{cls.__name__}.refusals will be ignored in the next release. Rename it "
            "to unfused_reasons.",
            DeprecationWarning,
            stacklevel=2,
        )
        return old_name(ops)

    def saved(
        self, needs: tuple[RequestedGradients, ...]
    ) -> tuple[frozenset[str], ...]:
        """Returns the names of the residuals that `backward` reads, by operation."""
        return tuple(
            op.saved(need) if need else frozenset()
            for op, need in zip(self.basic_ops, needs, strict=True)
        )

    def forward(
        self,
        params: tuple[Params, ...],
        x: jax.Array,
        extra_inputs: tuple[Extras, ...],
        saves: tuple[frozenset[str], ...],
    ) -> tuple[jax.Array, tuple[Extras, ...], tuple[Residuals, ...]]:
        """Computes the replaced operations; the base class runs them one by one.

        Parameters, extra inputs, extra outputs and residuals are tuples with one entry
        for each basic operation.
        """
        extra_outputs, residuals = [], []
        for i, op in enumerate(self.basic_ops):
            x = x if op.takes_quantized else dequantized(x)
            x, extras, saved = op.forward(params[i], x, extra_inputs[i], saves[i])
            extra_outputs.append(extras)
            residuals.append(saved)
        return x, tuple(extra_outputs), tuple(residuals)

    def backward(
        self,
        residuals: tuple[Residuals, ...],
        dy: jax.Array | None,
        d_extra_outputs: tuple[Extras, ...],
        needs: tuple[RequestedGradients, ...],
    ) -> tuple[jax.Array | None, tuple[Params, ...], tuple[Extras, ...]]:
        """Computes the replaced operations' gradients, one by one in the base class.

        Residuals, parameter gradients and extra tensors are tuples with one entry for
        each basic operation. Unlike in `BasicOperation.backward`, every gradient may be
        None. For example, `dy` is None if only an extra output inside the window has a
        gradient.
        """
        d_params: list[Params] = []
        d_extra_inputs: list[Extras] = []
        for i, op in reversed(list(enumerate(self.basic_ops))):
            need, d_extras = needs[i], d_extra_outputs[i]
            if need and (dy is not None or any(d is not None for d in d_extras)):
                dy = dy if op.takes_quantized_grad else dequantized(dy)
                dy, d_param, d_extra = op.backward(residuals[i], dy, d_extras, need)
            else:
                # The cotangent of an overwritten parameter, such as "main_grad", is its
                # new value. No gradient is added here, so it keeps the old value.
                names = op.overwritten & need.params
                d_param = {name: residuals[i][name] for name in names}
                dy, d_extra = None, (None,) * op.num_extra_inputs
            d_params.insert(0, d_param)
            d_extra_inputs.insert(0, d_extra)
        return dy, tuple(d_params), tuple(d_extra_inputs)


Op = BasicOperation | FusedOperation
AnyOp = TypeVar("AnyOp", bound=Op)
# A function that fuses operations: it takes a list, replaces runs of consecutive
# operations by fused operations, and returns the new list.
Fusion = Callable[[list[Op]], list[Op]]


def fuse_windows(
    ops: Sequence[Op], match: Callable[[Sequence[Op]], FusedOperation | None]
) -> list[Op]:
    """Replaces runs of consecutive operations in a list by fused operations.

    Args:
        ops: basic and fused operations, in forward order.
        match: takes the rest of the list. Returns a fused operation that replaces the
            first operations of the rest, or None to keep the first one.
    """
    fused: list[Op] = []
    start = 0
    while start < len(ops):
        found = match(ops[start:])
        fused.append(ops[start] if found is None else found)
        end = start + 1
        while found is not None and len(expand(ops[start:end])) < len(found.basic_ops):
            end += 1
        start = end
    return fused


def match_prefix(ops: Sequence[Op], *kinds: type) -> tuple[Any, ...] | None:
    """Returns the first operations in `ops` if their types are `kinds`, else None."""
    window = tuple(ops[: len(kinds)])
    if len(window) < len(kinds) or not all(map(isinstance, window, kinds)):
        return None
    return window


def expand(ops: Sequence[Op]) -> tuple[BasicOperation, ...]:
    """Returns the basic operations in a list, also those inside fused operations."""
    return tuple(basic for op in ops for basic in op.basic_ops)


def windows(ops: Sequence[AnyOp]) -> list[tuple[slice, AnyOp]]:
    """Pairs each operation with the slice of `expand(ops)` that it replaces."""
    found: list[tuple[slice, AnyOp]] = []
    start = 0
    for op in ops:
        found.append((slice(start, start + len(op.basic_ops)), op))
        start += len(op.basic_ops)
    return found


class Part(NamedTuple):
    """A keyword parameter of a fused operation's constructor, and its argument.

    `name` is the keyword, `kind` the type of basic operation that the parameter takes,
    and `given` the argument that the caller passed.
    """

    name: str
    kind: type[BasicOperation]
    given: Any
    is_optional: bool = False


def collect(
    op: str, basic_ops: Sequence[BasicOperation] | None, *parts: Part
) -> tuple[Any, ...]:
    """Checks the basic operations passed to a fused operation's constructor.

    Returns the operations in forward order, with None for optional ones that are
    absent. The caller passes them by keyword or in one tuple.
    """
    if basic_ops is None:
        for name, kind, given, is_optional in parts:
            if given is None and not is_optional:
                raise ShapeContractError(
                    f"{op}: {name} is missing. Pass {name}=ops.{kind.__name__}(...)."
                )
            if given is not None and not isinstance(given, kind):
                raise ShapeContractError(
                    f"{op}: {name} = {shown(given)} is a {type(given).__name__}, not "
                    f"an ops.{kind.__name__}. Pass one."
                )
        return tuple(part.given for part in parts)
    keywords = (f"{p.name}={'None' if p.is_optional else '...'}" for p in parts)
    call = f"{op}({', '.join(keywords)})"
    named = next((part.name for part in parts if part.given is not None), None)
    if named is not None:
        raise ShapeContractError(
            f"{op}: both basic_ops and {named} are given. Pass the operations once: "
            f"{call}."
        )
    if not isinstance(basic_ops, tuple | list):
        raise ShapeContractError(
            f"{op}: basic_ops is a {type(basic_ops).__name__}, not a tuple of "
            f"operations. Pass {call}."
        )
    # The operations of the tuple are assigned to the keywords, by type and in order.
    rest = list(basic_ops)
    found: list[BasicOperation | None] = []
    for part in parts:
        fits = bool(rest) and isinstance(rest[0], part.kind)
        found.append(rest.pop(0) if fits else None)
    pairs = zip(parts, found, strict=True)
    if rest or any(op is None and not part.is_optional for part, op in pairs):
        kinds = ", ".join(type(op).__name__ for op in basic_ops)
        raise ShapeContractError(
            f"{op}: basic_ops has the types ({kinds}), which do not match. Pass {call}."
        )
    return tuple(found)


def present(*ops: BasicOperation | None) -> tuple[BasicOperation, ...]:
    return tuple(op for op in ops if op is not None)


def check_userbuffers(op: str, given: Any, kind: type) -> None:
    """Raises an error unless `userbuffers` is None or of the class `kind`."""
    if given is not None and not isinstance(given, kind):
        raise ShapeContractError(
            f"{op}: userbuffers = {shown(given)} is of type {type(given).__name__}. "
            f"Pass the ops.fused.{kind.__name__} among basic_ops, or leave it out."
        )


def check_in_place(op: str, name: str, part: Any, wanted: bool) -> None:
    """Raises an error unless an extra-tensor operation has `in_place=wanted`."""
    if part.in_place != wanted:
        kind = type(part).__name__
        raise ShapeContractError(
            f"{op}: {name} = {shown(part)} has in_place = {part.in_place}. Pass "
            f"{name}=ops.{kind}(in_place={wanted}), or leave {kind} unfused."
        )


def check_mode(op: str, linear: Any, refused: str, reason: str) -> None:
    """Raises an error if a linear has the `tensor_parallel_mode` given as `refused`."""
    if linear.tensor_parallel_mode == refused:
        raise ShapeContractError(
            f'{op}: linear has tensor_parallel_mode = "{refused}": {reason}. Leave '
            "the operations unfused."
        )
