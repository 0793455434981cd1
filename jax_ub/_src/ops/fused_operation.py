"""The interface of fused operations, and how they replace operations in a list."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax

from jax_ub._src import arguments, lowering_log
from jax_ub._src.errors import FusionError, ShapeContractError, shown
from jax_ub._src.ops.operation import (
    BasicOperation,
    Extras,
    Operation,
    Params,
    RequestedGradients,
    Residuals,
    read_operations,
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

    Transformer Engine: `te.ops.FusedOperation`.
    """

    basic_ops: tuple[Any, ...]

    def __post_init__(self):
        basic_ops = self.basic_ops
        if not isinstance(basic_ops, tuple | list) or not all(
            isinstance(op, BasicOperation) for op in basic_ops
        ):
            raise ShapeContractError(
                f"{type(self).__name__}: basic_ops = {shown(basic_ops)} is not a tuple "
                "of basic operations. Pass those that are replaced; a composite such "
                "as ops.Linear has them in its attribute basic_ops."
            )
        object.__setattr__(self, "basic_ops", tuple(basic_ops))

    def overrides(self, name: str) -> bool:
        """Returns whether the subclass overrides `name`, "forward" or "backward"."""
        return getattr(type(self), name) is not getattr(FusedOperation, name)

    @property
    def overlaps(self) -> bool:
        """Returns whether the operation overlaps a collective with a GEMM.

        `explain()` reports it.
        """
        return False

    @classmethod
    def unfused_reasons(cls, ops: Sequence["Op"]) -> dict[int, str]:
        """Returns, by index, why operations that resemble the pattern are not fused.

        `explain()` reports the reasons. Their keys are indices into `ops`, the argument
        of `fuse_forward_ops` or `fuse_backward_ops`: the index of the linear, if there
        is one.
        """
        old_name = getattr(cls, "refusals", None)
        if old_name is None:
            return {}
        lowering_log.warn(
            f"{cls.__name__}.refusals will be ignored in the next release. Rename it "
            "to unfused_reasons.",
            DeprecationWarning,
        )
        return old_name(ops)

    def saved(
        self, needs: tuple[RequestedGradients, ...]
    ) -> tuple[frozenset[str], ...]:
        """Returns the names of the residuals that each operation's backward reads."""
        pairs = zip(self.basic_ops, needs, strict=True)
        return tuple(op.saved(need) if need else frozenset() for op, need in pairs)

    def forward(
        self,
        params: tuple[Params, ...],
        x: jax.Array,
        extra_inputs: tuple[Extras, ...],
        saves: tuple[frozenset[str], ...],
    ) -> tuple[jax.Array, tuple[Extras, ...], tuple[Residuals, ...]]:
        """Computes the forward pass of the basic operations that are fused here.

        The base class calls their `forward` methods one after another. Parameters,
        extra inputs, extra outputs and residuals are tuples with one entry for each
        basic operation.
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
        """Computes the gradients of the basic operations that are fused here.

        The base class calls their `backward` methods, from the last to the first.
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
                # The cotangent of a gradient accumulator, such as "main_grad", is its
                # new value. If there is no gradient to add, the new value equals the
                # old value.
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

    Transformer Engine: none; each of its fusion functions has such a loop.

    Args:
        ops: basic and fused operations, in forward order.
        match: takes the rest of the list. Returns a fused operation that replaces the
            first operations of the rest, or None to keep the first one.

    Returns:
        The list of operations, some of them fused.

    Raises:
        ShapeContractError: if `ops` is not a list of operations, or `match` is not a
            function.
        FusionError: if `match` returns neither a fused operation nor None.
    """
    arguments.check_function("fuse_windows", "match", match)
    rest: list[Any] = list(read_operations("fuse_windows", ops))
    fused: list[Op] = []
    while rest:
        found = match(list(rest))
        if not isinstance(found, Op | None):
            raise FusionError(
                f"fuse_windows: match returned {shown(found)}. Return a fused "
                "operation, or None to keep the first operation."
            )
        fused.append(rest[0] if found is None else found)
        num_left = len(fused[-1].basic_ops) - len(rest.pop(0).basic_ops)
        while rest and num_left > 0:
            num_left -= len(rest.pop(0).basic_ops)
    return fused


def expand(ops: Sequence[Operation]) -> tuple[BasicOperation, ...]:
    """Returns the basic operations of a list, including those in fused operations."""
    return tuple(basic for op in ops for basic in op.basic_ops)


def without_composites(ops: Sequence[Operation]) -> list[Op]:
    """Replaces composites, such as a `Linear`, by the operations that they contain."""
    return [
        entry
        for op in ops
        for entry in ([op] if isinstance(op, Op) else without_composites(op.parts))
    ]


def windows(ops: Sequence[AnyOp]) -> list[tuple[slice, AnyOp]]:
    """Returns each operation as (slice of `expand(ops)` that it covers, operation)."""
    found: list[tuple[slice, AnyOp]] = []
    start = 0
    for op in ops:
        found.append((slice(start, start + len(op.basic_ops)), op))
        start += len(op.basic_ops)
    return found


def pattern_field(*kinds: type, is_optional: bool = False) -> Any:
    """Returns a dataclass field that holds one operation of a `FusedPattern`.

    The operation must be an instance of one of `kinds`. If it is optional, the field
    may be None.
    """
    return dataclasses.field(
        default=None,
        kw_only=True,
        metadata={"kinds": kinds, "is_optional": is_optional},
    )


@dataclasses.dataclass(frozen=True)
class FusedPattern(FusedOperation):
    """Base class of fused operations that replace a fixed sequence of operation types.

    A subclass declares these operations as fields, in forward order, with
    `pattern_field` as default. A caller passes them by keyword, or all in the tuple
    `basic_ops`.
    """

    _needed: ClassVar[tuple[str, ...]] = ()  # optional fields that a fusion requires

    basic_ops: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self):
        """Sets `basic_ops` from the pattern's fields, or these from `basic_ops`."""
        given = [getattr(self, field.name) for field in self._parts()]
        basic_ops = expand([op for op in given if isinstance(op, Operation)])
        # `dataclasses.replace` passes `basic_ops` as well as the fields. This is not an
        # error if both have equal operations.
        is_replaced = isinstance(self.basic_ops, tuple) and self.basic_ops == basic_ops
        if self.basic_ops is None or is_replaced:
            found = self._operations_from_keywords()
        else:
            found = self._operations_from_tuple()
        basic_ops = expand(_present(found))
        for name, value in {**found, "basic_ops": basic_ops}.items():
            object.__setattr__(self, name, value)
        reason = self.mismatch(**found)
        if reason:
            raise ShapeContractError(f"{type(self).__name__}: {reason}.")

    @classmethod
    def mismatch(cls, **parts: Any) -> str:
        """Returns why the operations in `parts` cannot be fused, or "" if they can.

        `parts` has the operations by the names of the fields. Their types have been
        checked; their attributes, such as the parallel mode of a linear, have not.
        """
        return ""

    @classmethod
    def match_prefix(cls, ops: Sequence[Any]) -> dict[str, Any] | None:
        """Returns {field name: operation} if `ops` starts with the pattern, else None.

        The pattern is the sequence of the fields' types. Optional operations that are
        absent are None.
        """
        rest, found = list(ops), {}
        for field in cls._parts():
            fits = bool(rest) and isinstance(rest[0], field.metadata["kinds"])
            if not fits and not field.metadata["is_optional"]:
                return None
            found[field.name] = rest.pop(0) if fits else None
        return found

    @classmethod
    def replacement(cls, ops: Sequence[Op]) -> "FusedPattern | None":
        """Returns a fused operation if `ops` begins with the pattern, else None."""
        found = cls.match_prefix(ops)
        if found is None or cls.mismatch(**found):
            return None
        has_needed = all(found[name] is not None for name in cls._needed)
        return cls(tuple(_present(found))) if has_needed else None

    @classmethod
    def _parts(cls):
        return [f for f in dataclasses.fields(cls) if "kinds" in f.metadata]

    def _operations_from_keywords(self):
        op, found = type(self).__name__, {}
        for field in self._parts():
            given, kinds = getattr(self, field.name), field.metadata["kinds"]
            kind = kinds[0].__name__
            if given is None and not field.metadata["is_optional"]:
                raise ShapeContractError(
                    f"{op}: {field.name} is missing. Pass {field.name}=ops.{kind}(...)."
                )
            if given is not None and not isinstance(given, kinds):
                raise ShapeContractError(
                    f"{op}: {field.name} = {shown(given)} is a {type(given).__name__}, "
                    f"not an ops.{kind}. Pass one."
                )
            found[field.name] = given
        return found

    def _operations_from_tuple(self):
        op, parts = type(self).__name__, self._parts()
        values = ("None" if f.metadata["is_optional"] else "..." for f in parts)
        keywords = (f"{f.name}={v}" for f, v in zip(parts, values, strict=True))
        call = f"{op}({', '.join(keywords)})"
        if not isinstance(self.basic_ops, tuple | list):
            raise ShapeContractError(
                f"{op}: basic_ops is a {type(self.basic_ops).__name__}, not a tuple of "
                f"operations. Pass {call}."
            )
        found = self.match_prefix(self.basic_ops)
        if found is None or len(_present(found)) < len(self.basic_ops):
            kinds = ", ".join(type(each).__name__ for each in self.basic_ops)
            raise ShapeContractError(
                f"{op}: basic_ops has the types ({kinds}), which do not match. Pass "
                f"{call}."
            )
        for name, value in found.items():
            if getattr(self, name) not in (None, value):
                raise ShapeContractError(
                    f"{op}: both basic_ops and {name} are given, and they differ. Pass "
                    f"the operations once: {call}."
                )
        return found


class ForwardPattern(FusedPattern):
    """Base class of fused operations that replace a pattern in the forward pass."""

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each match of the class's pattern in `ops` by one fused operation.

        Returns a new list; the other operations stay in it.
        """
        return fuse_windows(read_operations(cls.__name__, ops), cls.replacement)


class BackwardPattern(FusedPattern):
    """Base class of fused operations that replace a pattern in the backward pass."""

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each match of the class's pattern in `ops` by one fused operation.

        Returns a new list; the other operations stay in it.
        """
        return fuse_windows(read_operations(cls.__name__, ops), cls.replacement)


def _present(found):
    return [op for op in found.values() if op is not None]
