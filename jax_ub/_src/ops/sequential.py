"""A list of operations that are called, and fused, as one function."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp

from jax_ub._src.errors import ShapeContractError
from jax_ub._src.ops.fuser import OperationFuser
from jax_ub._src.ops.operation import (
    BasicOperation,
    Op,
    Operation,
    init_each,
    split_each,
)

if TYPE_CHECKING:
    from jax_ub._src.tools.explain.report import Table


class Sequential(Operation):
    """A mutable list of operations that are called in order, fused where possible.

        seq = ops.Sequential(ops.LayerNorm(512), ops.Linear(512, 2048), ops.GELU())
        params = seq.init(jax.random.key(0))
        y = seq(params, x)

    A Sequential with parallel operations is called inside `jax.shard_map`, with
    `seq.specs()` as the `in_specs` of the parameters. The operations are immutable, but
    the list can be changed like a Python list; a function that was traced before a
    change keeps the old list. A Sequential may contain another one.

    Transformer Engine: `te.ops.Sequential`.
    """

    def __init__(self, *ops: Operation):
        """Creates a Sequential of the given operations, in forward order.

        Raises:
            ShapeContractError: if an entry is not an operation.
        """
        self._ops: list[Operation] = []
        self.extend(ops)

    def __call__(
        self,
        params: Any,
        x: jax.Array,
        *extra_inputs: jax.Array,
        key: jax.Array | None = None,
        deterministic: bool = False,
    ) -> Any:
        """Applies the operations to x one after another and returns the last result.

        Extra inputs that have no channel are taken from `extra_inputs`, in the order of
        the operations. If operations return extra outputs to the caller, the result is
        a tuple of y and the extra outputs. Arguments and errors are those of
        `OperationFuser.__call__`.
        """
        fuser = OperationFuser(self._ops)
        return fuser(params, x, *extra_inputs, key=key, deterministic=deterministic)

    def explain(
        self,
        tokens: int | None = None,
        *,
        num_ranks: int | None = None,
        dtype: Any = jnp.bfloat16,
        hardware: Any = None,
        trace: Any = None,
    ) -> "Table":
        """Reports for each linear whether its communication overlaps, and if not, why.

        Args:
            tokens: number of tokens of all ranks together, for which times and bytes
                are predicted; None predicts nothing.
            num_ranks: size of the tensor-parallel axes; None takes it from the mesh in
                scope, or from `initialize_ub`.
            dtype: dtype of the activations.
            hardware: a machine of `jax_ub simulate` by name, or a dict of its rates;
                None takes the kind of the local devices.
            trace: a recording of `ub.trace`, or its files. Adds the measured time that
                ranks waited.

        Returns:
            A printable table with two rows for every linear: forward and backward.

        Raises:
            ShapeContractError: if `tokens` or `num_ranks` is not a positive integer.
        """
        from jax_ub._src.tools.explain import sequential  # a tool: loaded at first use

        fuser = OperationFuser(self._ops)
        return sequential.explain(fuser, tokens, num_ranks, dtype, hardware, trace)

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic operations of all entries, in forward order."""
        return tuple(basic for op in self._ops for basic in op.basic_ops)

    @property
    def entries(self) -> tuple[Op, ...]:
        """The operations of all entries that the fuser receives, in forward order.

        They are the basic operations and, unchanged, the fused operations that the
        caller constructed.
        """
        return tuple(entry for op in self._ops for entry in op.entries)

    def init(self, key: jax.Array) -> tuple[Any, ...]:
        """Creates the parameters of all operations, as a tuple with one entry for each.

        Args:
            key: PRNG key. Operation i gets `jax.random.fold_in(key, i)`.

        Returns:
            Global arrays in dicts by name. An operation without parameters has an empty
            dict.
        """
        return init_each(self._ops, key)

    def specs(self) -> tuple[Any, ...]:
        """Returns the `PartitionSpec` of every parameter, as a pytree like `init`'s."""
        return tuple(op.specs() for op in self)

    def split(self, params):
        """Splits `params` into one dict of arrays by name for each basic operation."""
        return split_each("Sequential", self._ops, params)

    def append(self, op: Operation) -> "Sequential":
        """Adds an operation at the end and returns this Sequential."""
        return self.insert(len(self), op)

    def extend(self, ops: Iterable[Operation]) -> "Sequential":
        """Adds several operations at the end and returns this Sequential."""
        for op in list(ops):
            self.append(op)
        return self

    def insert(self, index: int, op: Operation) -> "Sequential":
        """Inserts an operation before `index` and returns this Sequential.

        Raises:
            ShapeContractError: if `op` is not an operation.
        """
        self._ops.insert(index, _checked(op))
        return self

    def pop(self, index: int = -1) -> Operation:
        """Removes the operation at `index` and returns it."""
        return self._ops.pop(index)

    def __len__(self) -> int:
        """Returns the number of entries; a nested Sequential counts as one."""
        return len(self._ops)

    def __iter__(self) -> Iterator[Operation]:
        """Iterates over a copy of the entries, so the list may be changed meanwhile."""
        return iter(tuple(self._ops))

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> "Sequential": ...

    def __getitem__(self, index):
        """Returns the entry at an index, or a new Sequential for a slice."""
        found = self._ops[index]
        return Sequential(*found) if isinstance(index, slice) else found

    def __setitem__(self, index: int, op: Operation) -> None:
        """Replaces the entry at `index` by another operation."""
        self._ops[index] = _checked(op)

    def __delitem__(self, index: int | slice) -> None:
        """Removes the entry at an index, or all entries of a slice."""
        del self._ops[index]

    def __add__(self, other: Iterable[Operation]) -> "Sequential":
        """Returns a new Sequential with the entries of both operands, in order."""
        return Sequential(*self, *other)

    def __iadd__(self, other: Iterable[Operation]) -> "Sequential":
        """Adds operations at the end of this Sequential, in place."""
        return self.extend(other)

    def __eq__(self, other) -> bool:
        """Returns whether the other object is a Sequential with equal entries."""
        if not isinstance(other, Sequential):
            return NotImplemented
        return self._ops == other._ops

    def __hash__(self) -> int:
        """Hashes the current entries, which makes it a valid static argument of jit."""
        return hash(tuple(self._ops))

    def __repr__(self) -> str:
        """Returns a text that lists the entries, one per line."""
        lines = "".join(f"  ({i}): {op!r}\n" for i, op in enumerate(self))
        return f"Sequential(\n{lines})" if lines else "Sequential()"


def _checked(op):
    if not isinstance(op, Operation):
        raise ShapeContractError(
            f"Sequential: a {type(op).__name__} is not an operation. Pass instances of "
            "the operations in jax_ub.ops."
        )
    return op
