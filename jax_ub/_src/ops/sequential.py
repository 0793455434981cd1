"""`Sequential`: a list of operations that are called as one function."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp

from jax_ub._src import checks
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.fp8 import state as fp8_state
from jax_ub._src.ops.fused_operation import expand
from jax_ub._src.ops.fuser import OperationFuser
from jax_ub._src.ops.operation import (
    BasicOperation,
    Operation,
    check_operation,
    read_operations,
)
from jax_ub._src.scalars import is_integer
from jax_ub._src.scaled_array import is_scaled

if TYPE_CHECKING:
    from jax_ub._src.tools.explain.report import Table


_check_index = checks.option_check(
    is_integer, "an integer", "Pass the index of an operation."
)


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
        """Applies all operations to x in order; returns y, or y and extra outputs.

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
        """Reports for each linear whether its collective overlaps, and if not, why.

        Args:
            tokens: number of tokens of all ranks together, for which times and bytes
                are predicted; None predicts nothing.
            num_ranks: size of the tensor-parallel axes; None takes it from the mesh in
                scope, or from `initialize_ub`.
            dtype: dtype of the activations.
            hardware: a machine of `python -m jax_ub simulate` by name, or a dict of its
                rates; None takes the kind of the local devices.
            trace: a recording of `ub.trace`, or its files. Adds the measured time that
                ranks waited.

        Returns:
            A printable table with two rows for every linear: forward and backward.

        Raises:
            ShapeContractError: if `tokens` or `num_ranks` is not a positive integer,
                `dtype` is not a dtype, or the ranks do not divide the tokens of a
                sequence-parallel linear.
        """
        from jax_ub._src.tools.explain import sequential  # a tool: loaded at first use

        fuser = OperationFuser(self._ops)
        return sequential.explain(fuser, tokens, num_ranks, dtype, hardware, trace)

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        return expand(self._ops)

    @property
    def parts(self) -> list[Operation]:
        return self._ops

    def init(self, key: jax.Array) -> tuple[Any, ...]:
        """Creates the parameters: for each operation, a dict of global arrays by name.

        Args:
            key: PRNG key. Operation i gets `jax.random.fold_in(key, i)`.
        """
        return super().init(key)

    def append(self, op: Operation) -> "Sequential":
        """Adds an operation at the end and returns this Sequential."""
        return self.insert(len(self), op)

    def extend(self, ops: Iterable[Operation]) -> "Sequential":
        """Adds several operations at the end and returns this Sequential.

        Raises:
            ShapeContractError: if `ops` is not iterable, or if one of them is not an
                operation, or is or contains this Sequential. Then none is added.
        """
        entries = read_operations("Sequential", ops)
        for op in entries:
            self._check(op)
        self._ops.extend(entries)
        return self

    def insert(self, index: int, op: Operation) -> "Sequential":
        """Inserts an operation before `index` and returns this Sequential.

        Raises:
            ShapeContractError: if `index` is not an integer, or if `op` is not an
                operation, or is or contains this Sequential.
        """
        _check_index("Sequential.insert", "index", index)
        self._check(op)
        self._ops.insert(index, op)
        return self

    def _check(self, op: Operation) -> None:
        """Checks that `op` may become an entry of this Sequential."""
        check_operation("Sequential: an entry", op)
        inside: list[Operation] = [op]
        while inside:
            found = inside.pop()
            if found is self:
                raise ShapeContractError(
                    "Sequential: an entry is, or contains, the Sequential to which it "
                    "is added. Pass a copy, ops.Sequential(*seq), or add its "
                    "operations with seq.extend(seq)."
                )
            inside.extend(found if isinstance(found, Sequential) else ())

    def pop(self, index: int = -1) -> Operation:
        """Removes the operation at `index` and returns it.

        Raises:
            ShapeContractError: if `index` is not an integer.
            IndexError: if it is out of range.
        """
        _check_index("Sequential.pop", "index", index)
        return self._ops.pop(index)

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Operation]:
        return iter(tuple(self._ops))  # a copy: the list may change meanwhile

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> "Sequential": ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Sequential(*self._ops[index])
        _check_index("Sequential", "index", index)
        return self._ops[index]

    def __setitem__(self, index: int, op: Operation) -> None:
        _check_index("Sequential", "index", index)
        self._check(op)
        self._ops[index] = op

    def __delitem__(self, index: int | slice) -> None:
        if not isinstance(index, slice):
            _check_index("Sequential", "index", index)
        del self._ops[index]

    def __add__(self, other: Iterable[Operation]) -> "Sequential":
        return Sequential(*self).extend(other)

    def __iadd__(self, other: Iterable[Operation]) -> "Sequential":
        return self.extend(other)

    def __eq__(self, other) -> bool:
        if not isinstance(other, Sequential):
            return NotImplemented
        return self._ops == other._ops

    def __hash__(self) -> int:
        return hash(tuple(self._ops))

    def __repr__(self) -> str:
        lines = "".join(f"  ({i}): {op!r}\n" for i, op in enumerate(self))
        return f"Sequential(\n{lines})" if lines else "Sequential()"


def split_main_grads(params: Any) -> tuple[Any, Any]:
    """Splits parameters into weights and gradient accumulators ("main_grad").

    The cotangent of a "main_grad" is its new value. A loop over microbatches passes it
    from one microbatch to the next, while the weights stay constant:

        weights, main_grads = ops.split_main_grads(params)
        for x in microbatches:
            loss = lambda m: loss_of(seq(ops.merge_main_grads(weights, m), x))
            main_grads = jax.grad(loss)(main_grads)

    Transformer Engine: none.

    Args:
        params: the result of `Sequential.init`, or of `specs()`.

    Returns:
        The weights and the main_grads, each in the tree of `params`. Leaves that belong
        to the other tree are None.
    """
    return _split(params, {"main_grad"})


def split_fp8_states(params: Any) -> tuple[Any, Any]:
    """Splits parameters into weights and FP8 scaling states (`DelayedScaling`).

    The gradient of a state is its new value, which `ub.fp8.apply_updates` stores:

        weights, states = ops.split_fp8_states(params)
        loss = lambda w, s: loss_of(seq(ops.merge_fp8_states(w, s), x))
        gradients, new = jax.grad(loss, (0, 1))(weights, states)
        states = ub.fp8.apply_updates(states, new)

    Transformer Engine: none.

    Args:
        params: the result of `Sequential.init`, or of `specs()`.

    Returns:
        The weights and the states, each in the tree of `params`. Leaves that belong to
        the other tree are None.
    """
    return _split(params, fp8_state.NAMES)


def _split(params, names):
    is_own = jax.tree.map_with_path(lambda path, _: _key_of(path) in names, params)
    others = jax.tree.map(lambda own, p: None if own else p, is_own, params)
    return others, jax.tree.map(lambda own, p: p if own else None, is_own, params)


def merge_main_grads(weights: Any, main_grads: Any) -> Any:
    """Merges weights and "main_grad" accumulators: the inverse of `split_main_grads`.

    Transformer Engine: none.

    Args:
        weights: the weights.
        main_grads: the main_grads, in the same tree.

    Returns:
        The parameters, as `Sequential.init` returns them.

    Raises:
        ShapeContractError: if the trees differ.
    """
    return _merge("merge_main_grads", weights, main_grads)


def merge_fp8_states(weights: Any, states: Any) -> Any:
    """Merges weights and FP8 scaling states: the inverse of `split_fp8_states`.

    Transformer Engine: none.

    Args:
        weights: the weights.
        states: the states, in the same tree.

    Returns:
        The parameters, as `Sequential.init` returns them.

    Raises:
        ShapeContractError: if the trees differ.
    """
    return _merge("merge_fp8_states", weights, states)


def _merge(op, weights, others):
    def is_leaf(node):
        return node is None or is_scaled(node)

    for tree in (weights, others):
        jax.tree.structure(tree, is_leaf=is_leaf)  # raises the errors of its nodes
    try:
        return jax.tree.map(
            lambda weight, other: other if weight is None else weight,
            weights,
            others,
            is_leaf=is_leaf,
        )
    # Only the comparison of the trees can fail. All exceptions are caught, because
    # JAX's message prints the keys of the trees, and a key's `repr` may raise any
    # exception.
    except Exception as error:
        raise ShapeContractError(
            f"{op}: the arguments are different trees: {error}. Pass both results of "
            f"{op.replace('merge', 'split')}, or trees like them."
        ) from error


def gradients_of_main_grads(gradients: Any, main_grads: Any) -> Any:
    """Replaces the gradient of each kernel that has a "main_grad" by that "main_grad".

    Transformer Engine: none. Megatron-LM's optimizer reads `main_grad` itself.

    Args:
        gradients: gradients of the weights, in the tree that `split_main_grads`
            returns. They are zero for kernels with a main_grad.
        main_grads: the main_grads after the last microbatch, in f32.

    Returns:
        The gradients of the weights, for an optimizer.

    Raises:
        ShapeContractError: if `gradients` lacks the kernel of a main_grad.
    """
    left = {
        path: leaf
        for path, leaf in jax.tree.leaves_with_path(main_grads)
        if _key_of(path) == "main_grad"
    }

    def accumulated(path, gradient):
        if _key_of(path) != "kernel":
            return gradient
        return left.pop((*path[:-1], jax.tree_util.DictKey("main_grad")), gradient)

    replaced = jax.tree.map_with_path(accumulated, gradients, is_leaf=is_scaled)
    for path in left:
        kernel = jax.tree_util.keystr((*path[:-1], jax.tree_util.DictKey("kernel")))
        raise ShapeContractError(
            f"gradients_of_main_grads: main_grads has {jax.tree_util.keystr(path)}, "
            f"but gradients has no {kernel}. Pass gradients in the tree that "
            "split_main_grads returns; set the main_grads of frozen kernels to None."
        )
    return replaced


def _key_of(path):
    """Returns a leaf's key in its dict, or None if the leaf is not in a dict."""
    return getattr(path[-1], "key", None) if path else None
