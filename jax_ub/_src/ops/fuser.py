"""Fuses a list of operations, and runs and differentiates the result."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.errors import FusionError, ShapeContractError, shown
from jax_ub._src.ops import registry
from jax_ub._src.ops.channels import connect_channels, operation_label
from jax_ub._src.ops.group import OperationGroup
from jax_ub._src.ops.grouping import make_groups
from jax_ub._src.ops.operation import (
    FusedOperation,
    Fusion,
    Op,
    Operation,
    expand,
    windows,
)
from jax_ub._src.rules.fused_group import fused_group


class OperationFuser:
    """Runs a list of operations, fusing consecutive operations where possible.

    Calls are differentiable.

    Three passes apply the registered fusions: the joint fusions of forward and
    backward, then the forward fusions, then the backward fusions. Their result may
    depend on the mesh that is in scope, inside `jax.shard_map` or under `jax.set_mesh`.

    Transformer Engine: `te.ops.OperationFuser`.

    Attributes:
        ops: the operations that were passed to the constructor.
        basic_ops: the basic operations that `ops` consist of.
        extra_edges: how extra inputs and outputs are connected.
    """

    def __init__(self, ops: Iterable[Operation]):
        """Splits the operations into basic operations and connects extra tensors.

        Raises:
            ShapeContractError: if an entry is not an operation, two operations write
                the same channel, or a channel is read before it is written.
            UnknownNameError: if a channel has no producer.
        """
        self.ops = tuple(ops)
        for place, op in enumerate(self.ops):
            if not isinstance(op, Operation):
                raise ShapeContractError(
                    f"OperationFuser: entry {place} is a {type(op).__name__}, not an "
                    "operation. Pass instances of the operations in jax_ub.ops."
                )
        self.basic_ops = tuple(basic for op in self.ops for basic in op.basic_ops)
        self.extra_edges = connect_channels(self.basic_ops)

    @property
    def forward_ops(self) -> list[Op]:
        """The basic and fused operations that run in the forward, in order."""
        return self.fused("forward")

    @property
    def backward_ops(self) -> list[Op]:
        """The basic and fused operations that run in the backward.

        They are listed in forward order, and run from the last to the first.
        """
        return self.fused("backward")

    def fused(self, direction: str) -> list[Op]:
        """Returns the operations of one direction after all fusions for it have run.

        First the joint fusions run, then the fusions of the direction.

        Args:
            direction: "forward" or "backward".

        Raises:
            FusionError: if a fusion returns a list with different basic operations.
        """
        ops = self._given(direction)
        for _, _, after in self.steps(direction):
            ops = after
        return ops

    def steps(self, direction: str) -> Iterator[tuple[Fusion, list[Op], list[Op]]]:
        """Applies the fusions in order and yields each with its input and output.

        Both are lists of operations.

        Raises:
            FusionError: if a fusion returns a list with different basic operations.
        """
        ops = self._given(direction)
        for name in ("joint", direction):
            for fusion in registry.fusions(name):
                before, ops = ops, list(fusion(list(ops)))
                qualified = getattr(fusion, "__qualname__", None) or shown(fusion)
                self._check(f"the fusion {qualified}", ops)
                yield fusion, before, ops

    def _given(self, direction) -> list[Op]:
        """Returns the operations that the first fusion receives.

        A fused operation that the caller constructed stays if it overrides `direction`.
        Otherwise it is replaced by its basic operations.
        """
        ops: list[Op] = []
        for entry in (entry for op in self.ops for entry in op.entries):
            stays = not isinstance(entry, FusedOperation) or entry.overrides(direction)
            ops.extend([entry] if stays else entry.basic_ops)
        self._check("the list", ops)
        return ops

    def _check(self, name, ops):
        if expand(ops) != self.basic_ops:
            raise FusionError(
                f"OperationFuser: {name} returned {list(expand(ops))}, but "
                f"was given {list(self.basic_ops)}. A fused operation's basic_ops must "
                "be the ones it takes the place of, in their order."
            )
        for window, _ in windows(ops):
            taken = set(itertools.chain(*self.extra_edges.inputs[window]))
            for place, outputs in enumerate(
                self.extra_edges.outputs[window], window.start
            ):
                if taken.intersection(outputs):
                    raise FusionError(
                        f"OperationFuser: {name} covers both ends of a "
                        "channel that begins at "
                        f"{operation_label(self.basic_ops, place)}. Extra inputs come "
                        f"from "
                        "outside a window: fuse less."
                    )

    @property
    def groups(self) -> tuple[OperationGroup, ...]:
        """The shortest runs of operations that can be differentiated separately."""
        return make_groups(self.forward_ops, self.backward_ops, self.extra_edges)

    def __call__(
        self,
        params: Any,
        x: jax.Array,
        *extra_inputs: jax.Array,
        key: jax.Array | None = None,
        deterministic: bool = False,
    ) -> Any:
        """Applies the operations to x one after another, fused where possible.

        Args:
            params: one entry for each operation, as `Sequential.init` creates them.
            x: the input; inside `jax.shard_map`, this rank's shard.
            *extra_inputs: the extra inputs that have no channel, in the order of the
                operations.
            key: PRNG key for operations that draw random numbers.
            deterministic: whether operations that draw random numbers return x
                unchanged; then no key is needed.

        Returns:
            y, or a tuple of y and the extra outputs that are returned to the caller.

        Raises:
            ShapeContractError: if a parameter, an input or a shape is invalid.
            UnsupportedOverlapError: if an explicitly requested method cannot run here.
        """
        dealt = self._split(params)
        shapes.check_array("OperationFuser", "x", x)
        shapes.check_flag("OperationFuser", "deterministic", deterministic)
        keys = self._keys(key, deterministic)
        self._check_extra_inputs(extra_inputs)
        for op, own in zip(self.basic_ops, dealt, strict=True):
            op.claim(own)
        params = tuple({**own, **key} for own, key in zip(dealt, keys, strict=True))
        edges = dict(zip(self.extra_edges.from_caller, extra_inputs, strict=True))
        for group in self.groups:
            last = group.first + len(group.basic_ops)
            operands = {
                "x": x,
                "params": params[group.first : last],
                "wires": {edge: edges[edge] for edge in group.taken},
            }
            x, results = fused_group(group, operands)
            edges.update(results)
        public = [edges[edge] for edge in self.extra_edges.to_caller]
        return (x, *public) if public else x

    def _split(self, params):
        """Splits `params` into one dict per basic operation and checks the names."""
        if not isinstance(params, (tuple, list)) or len(params) != len(self.ops):
            is_list = isinstance(params, (tuple, list))
            found = f"{len(params)} entries" if is_list else "none"
            raise ShapeContractError(
                f"OperationFuser: params is a {type(params).__name__} of {found}, but "
                f"there are {len(self.ops)} operations. Pass the tuple that init(key) "
                "returns, with one entry for each."
            )
        dealt = [
            dict(part)
            for op, own in zip(self.ops, params, strict=True)
            for part in op.split(own)
        ]
        for place, (op, own) in enumerate(zip(self.basic_ops, dealt, strict=True)):
            wanted = set(op.specs())
            if set(own) != wanted:
                raise ShapeContractError(
                    f"{operation_label(self.basic_ops, place)}: params has "
                    f"{sorted(own)}, but "
                    f"it takes {sorted(wanted)}. Pass what init(key) returns."
                )
        return tuple(dealt)

    def _keys(self, key, deterministic):
        """Returns a dict for each basic operation: its PRNG key, if it draws numbers.

        Each key is `fold_in(key, index of the operation)`.

        `__call__` merges the dicts into the parameters of the operations.
        """
        takers = [place for place, op in enumerate(self.basic_ops) if op.takes_key]
        if takers and key is None and not deterministic:
            raise ShapeContractError(
                f"{operation_label(self.basic_ops, takers[0])}: it draws random "
                f"numbers, but "
                "key = None. Pass key=jax.random.key(...), another one every step, or "
                "deterministic=True."
            )
        if key is not None:
            shapes.check_key("OperationFuser", "key", key)
        draws = [] if deterministic else takers
        return tuple(
            {"key": jax.random.fold_in(key, place)} if place in draws else {}
            for place in range(len(self.basic_ops))
        )

    def _check_extra_inputs(self, extra_inputs):
        wanted = len(self.extra_edges.from_caller)
        if len(extra_inputs) != wanted:
            takers = [
                operation_label(self.basic_ops, place)
                for place, row in enumerate(self.extra_edges.inputs)
                if set(row) & set(self.extra_edges.from_caller)
            ]
            raise ShapeContractError(
                f"OperationFuser: {len(extra_inputs)} extra inputs, but the operations "
                f"take {wanted}: {', '.join(takers) or 'none'}. Pass one for each, in "
                "their order, after x."
            )
        for i, array in enumerate(extra_inputs):
            shapes.check_array("OperationFuser", f"extra input {i}", array)
