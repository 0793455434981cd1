"""A list of operations, called one after another."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, overload

import jax
import jax.numpy as jnp

from jax_ub.errors import ShapeContractError
from jax_ub.explain.program import assumed, exposed, machine
from jax_ub.explain.table import Table
from jax_ub.ops.explaining import Sizes, explain
from jax_ub.ops.fuser import OperationFuser
from jax_ub.ops.operation import (
    BasicOperation,
    Op,
    Operation,
    init_each,
    split_each,
)


class Sequential(Operation):
    """A list of operations that are fused where that is possible.

        seq = ops.Sequential(ops.LayerNorm(512), ops.Linear(512, 2048), ops.GELU())
        params = seq.init(jax.random.key(0))
        y = seq(params, x)

    With parallel operations it is called inside `jax.shard_map`, with the parameters
    sharded as `seq.specs()` says. The operations themselves never change; the list
    does, as a Python list, so a program that was traced before a change keeps the old
    one. A Sequential may be an entry of another.

    Transformer Engine: `te.ops.Sequential`.
    """

    def __init__(self, *ops: Operation):
        """Makes a list of `ops`.

        Raises:
            ShapeContractError: if one is no operation.
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
        """Runs the operations; see `OperationFuser.__call__`."""
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
    ) -> Table:
        """Says which linears are overlapped, which are not, and why; print it.

        Args:
            tokens: of all ranks together, to predict times and bytes for.
            num_ranks: of the tensor-parallel axes; None takes that of the mesh in
                reach, or of `initialize_ub`.
            dtype: of the activations.
            hardware: a name or a machine of `jax_ub.simulate`; None takes the devices'
                own kind.
            trace: what `ub.trace` recorded of it, or its files: adds how long ranks
                waited.

        Returns:
            A table with a row for the forward and for the backward of every linear.

        Raises:
            ShapeContractError: if `tokens` or `num_ranks` is no positive integer.
        """
        chosen = hardware or machine()
        sizes = Sizes(tokens, num_ranks, dtype, chosen, exposed(trace))
        table = explain(OperationFuser(self._ops), sizes)
        notes = (*table.notes, *assumed(hardware, table.rows))
        return dataclasses.replace(table, notes=notes)

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """Those of all entries."""
        return tuple(basic for op in self._ops for basic in op.basic_ops)

    @property
    def entries(self) -> tuple[Op, ...]:
        """Those of all entries of the list."""
        return tuple(entry for op in self._ops for entry in op.entries)

    def init(self, key: jax.Array) -> tuple[Any, ...]:
        """Creates the parameters: a tuple with one entry for each operation.

        Args:
            key: PRNG key; each operation is_batchable in its place.

        Returns:
            Global arrays, in dicts by name, which are empty for operations without.
        """
        return init_each(self._ops, key)

    def specs(self) -> tuple[Any, ...]:
        """The `PartitionSpec` of every parameter, in the tree of `init`."""
        return tuple(op.specs() for op in self)

    def split(self, params):
        """Deals the parameters out to the basic operations."""
        return split_each("Sequential", self._ops, params)

    def append(self, op: Operation) -> "Sequential":
        """Adds an operation at the end; returns the list itself."""
        return self.insert(len(self), op)

    def extend(self, ops: Iterable[Operation]) -> "Sequential":
        """Adds operations at the end; returns the list itself."""
        for op in list(ops):
            self.append(op)
        return self

    def insert(self, index: int, op: Operation) -> "Sequential":
        """Adds an operation before `index`; returns the list itself.

        Raises:
            ShapeContractError: if it is no operation.
        """
        self._ops.insert(index, _checked(op))
        return self

    def pop(self, index: int = -1) -> Operation:
        """Takes an operation out, and returns it."""
        return self._ops.pop(index)

    def __len__(self) -> int:
        """The number of entries."""
        return len(self._ops)

    def __iter__(self) -> Iterator[Operation]:
        """The entries."""
        return iter(tuple(self._ops))

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> "Sequential": ...

    def __getitem__(self, index):
        """An entry, or a new Sequential of a slice."""
        found = self._ops[index]
        return Sequential(*found) if isinstance(index, slice) else found

    def __setitem__(self, index: int, op: Operation) -> None:
        """Replaces an entry."""
        self._ops[index] = _checked(op)

    def __delitem__(self, index: int | slice) -> None:
        """Takes an entry, or a slice, out."""
        del self._ops[index]

    def __add__(self, other: Iterable[Operation]) -> "Sequential":
        """A new Sequential with the entries of both."""
        return Sequential(*self, *other)

    def __iadd__(self, other: Iterable[Operation]) -> "Sequential":
        """Adds entries at the end."""
        return self.extend(other)

    def __eq__(self, other) -> bool:
        """Whether the entries are equal now."""
        if not isinstance(other, Sequential):
            return NotImplemented
        return self._ops == other._ops

    def __hash__(self) -> int:
        """That of the entries now, so that it can be a static argument of jax.jit."""
        return hash(tuple(self._ops))

    def __repr__(self) -> str:
        """The entries, one a line."""
        lines = "".join(f"  ({i}): {op!r}\n" for i, op in enumerate(self))
        return f"Sequential(\n{lines})" if lines else "Sequential()"


def _checked(op):
    if not isinstance(op, Operation):
        raise ShapeContractError(
            f"Sequential: a {type(op).__name__} is not an operation. Pass instances of "
            "the operations in jax_ub.ops."
        )
    return op
