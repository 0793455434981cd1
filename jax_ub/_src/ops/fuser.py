"""Fuses a list of operations, and runs the result."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jax_ub._src import arguments, checks
from jax_ub._src.errors import (
    FusionError,
    ShapeContractError,
    UnknownNameError,
    nearest,
    shown,
)
from jax_ub._src.fp8.state import names_of
from jax_ub._src.ops.fused import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from jax_ub._src.ops.fused_operation import (
    FusedOperation,
    Fusion,
    Op,
    expand,
    windows,
    without_composites,
)
from jax_ub._src.ops.group import ExtraTensorEdges, OperationGroup, run_group
from jax_ub._src.ops.operation import (
    BasicOperation,
    Operation,
    read_operations,
    split_each,
)
from jax_ub._src.ops.quantize import quantized_boundaries, with_quantizers
from jax_ub._src.ops.userbuffers import UserbuffersForwardLinear
from jax_ub._src.ops.userbuffers_backward import UserbuffersBackwardLinear
from jax_ub._src.primitives import vma
from jax_ub._src.runtime import registry

# The registered fusions of each pass, in Transformer Engine's order. They run in this
# order, and a fusion cannot fuse operations that an earlier fusion has fused.
_FUSIONS: dict[str, list[Fusion]] = {
    "joint": [],
    "forward": [
        UserbuffersForwardLinear.fuse_forward_ops,
        ForwardLinearBiasAdd.fuse_forward_ops,
        ForwardLinearBiasActivation.fuse_forward_ops,
        ForwardLinearScaleAdd.fuse_forward_ops,
    ],
    "backward": [
        UserbuffersBackwardLinear.fuse_backward_ops,
        BackwardLinearAdd.fuse_backward_ops,
        BackwardLinearScale.fuse_backward_ops,
        BackwardActivationBias.fuse_backward_ops,
        BackwardAddRMSNorm.fuse_backward_ops,
    ],
}
# The (pass, fusion) pairs that are disabled inside a block `with without_fusions()`.
_DISABLED: list[tuple[str, Fusion]] = []


def register_joint_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a function that fuses operations in both passes, forward and backward.

    Joint fusions run before the fusions of one direction.

    Transformer Engine: the joint fusions of its `OperationFuser`.

    Args:
        fusion: takes a list of basic and fused operations in forward order; returns a
            list of the same basic operations, some of them fused. See
            `ops.fuse_windows`.
        prepend: whether the fusion runs before the other registered joint fusions.

    Raises:
        FusionError: if `fusion` is not callable.
    """
    _register("joint", fusion, prepend)


def register_forward_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a function that fuses operations in the forward pass only.

    Transformer Engine: `te.ops.register_forward_fusion`.

    Args:
        fusion: as in `register_joint_fusion`.
        prepend: whether the fusion runs before the other registered forward fusions.

    Raises:
        FusionError: if `fusion` is not callable.
    """
    _register("forward", fusion, prepend)


def register_backward_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a function that fuses operations in the backward pass only.

    Transformer Engine: `te.ops.register_backward_fusion`.

    Args:
        fusion: as in `register_joint_fusion`.
        prepend: whether the fusion runs before the other registered backward fusions.

    Raises:
        FusionError: if `fusion` is not callable.
    """
    _register("backward", fusion, prepend)


def unregister_fusion(fusion: Fusion) -> None:
    """Removes a registered fusion function from all passes.

    Transformer Engine: none.

    Args:
        fusion: the function. One that is not registered is ignored.

    Raises:
        FusionError: if `fusion` is not callable.
    """
    _check_fusion("unregister_fusion", "fusion", fusion)
    for registered in _FUSIONS.values():
        if fusion in registered:
            registered.remove(fusion)


def fusions(name: str) -> tuple[Fusion, ...]:
    """Returns the enabled fusions for "forward", "backward" or "joint" (both passes).

    The fuser tries them in this order.
    """
    return tuple(each for each in _FUSIONS[name] if (name, each) not in _DISABLED)


@contextlib.contextmanager
def without_fusions() -> Iterator[None]:
    """Disables all registered fusions for calls that are traced inside the context.

    Use it to measure what fusion saves, or to find out whether a fusion causes an
    error. Fused operations that the caller constructed still run. A jitted function
    that was traced before is not traced again, so it keeps its fusions.

    Transformer Engine: none.
    """
    before = list(_DISABLED)
    _DISABLED[:] = [(name, each) for name, found in _FUSIONS.items() for each in found]
    try:
        yield
    finally:
        _DISABLED[:] = before


def _register(name, fusion, prepend):
    _check_fusion(f"register_{name}_fusion", "fusion", fusion)
    checks.check_flag(f"register_{name}_fusion", "prepend", prepend)
    if (name, fusion) in _DISABLED:
        _DISABLED.remove((name, fusion))
    if fusion not in _FUSIONS[name]:
        _FUSIONS[name].insert(0 if prepend else len(_FUSIONS[name]), fusion)


_check_fusion = checks.option_check(
    callable,
    "callable",
    "Pass a function that takes and returns a list of operations.",
    FusionError,
)
_check_direction = checks.option_check(
    lambda value: isinstance(value, str) and value in ("forward", "backward"),
    "the name of a pass",
    'Pass "forward" or "backward".',
    UnknownNameError,
)


def connect_channels(ops: Sequence[BasicOperation]) -> ExtraTensorEdges:
    """Connects each extra input to the extra output that has the same channel name.

    Extra inputs without a channel come from the caller.
    """
    numbers = itertools.count()
    outputs = [tuple(itertools.islice(numbers, op.num_extra_outputs)) for op in ops]
    producers: dict[str, tuple[int, int]] = {}  # index of the operation, edge
    to_caller: list[int] = []
    for i, op in enumerate(ops):
        channels = op.extra_output_channels or (None,) * op.num_extra_outputs
        for edge, channel in zip(outputs[i], channels, strict=True):
            if channel is None or channel.output_to_caller:
                to_caller.append(edge)
            if channel is None:
                continue
            if channel.name in producers:
                other = operation_label(ops, producers[channel.name][0])
                raise ShapeContractError(
                    f"{operation_label(ops, i)}: the channel {shown(channel.name)} is "
                    f"already written by {other}. Give each extra output another "
                    "channel."
                )
            producers[channel.name] = (i, edge)
    inputs = [
        tuple(
            next(numbers) if name is None else _edge_of(name, ops, i, producers)
            for name in op.extra_input_channels or (None,) * op.num_extra_inputs
        )
        for i, op in enumerate(ops)
    ]
    return ExtraTensorEdges(tuple(inputs), tuple(outputs), tuple(to_caller))


def _edge_of(name, ops, reader, producers) -> int:
    if name not in producers:
        known = nearest(name, producers) if producers else "No operation writes one."
        raise UnknownNameError(
            f"{operation_label(ops, reader)}: no extra output has the channel "
            f"{shown(name)}. {known}"
        )
    producer, edge = producers[name]
    if producer >= reader:
        raise ShapeContractError(
            f"{operation_label(ops, reader)}: it reads the channel {shown(name)}, "
            f"which {operation_label(ops, producer)} writes later. Put the producer "
            "first."
        )
    return edge


def operation_label(ops: Sequence[BasicOperation], index: int) -> str:
    """Returns "operation 3 (Bias)" for `ops[3]`, for use in error messages."""
    return f"operation {index} ({ops[index].label})"


class OperationFuser(arguments.KeywordsChecked):
    """Runs a list of operations, fusing consecutive operations where possible.

    Calls are differentiable. Three passes apply the registered fusions: the joint
    fusions, the forward fusions, then the backward fusions. Their result may depend on
    the mesh in scope, inside `jax.shard_map` or under `jax.set_mesh`.

    Transformer Engine: `te.ops.OperationFuser`.

    Attributes:
        ops: the operations that were passed to the constructor.
        basic_ops: the basic operations that `ops` consist of.
        extra_edges: how extra inputs and outputs are connected.
    """

    _op_prefix = "ops."

    def __init__(self, ops: Iterable[Operation]):
        """Expands composite operations, and connects the channels between operations.

        A `Linear` with a bias, for example, becomes a `BasicLinear` and a `Bias`. An
        operation that writes a channel is connected to the operation that reads it.

        Raises:
            ShapeContractError: if `ops` is not iterable, an entry is not an operation,
                two operations write the same channel, or a channel is read before it is
                written.
            UnknownNameError: if a channel has no producer.
        """
        self.ops = read_operations("OperationFuser", ops)
        entries = without_composites(self.ops)
        self._entries, self._passed_states = with_quantizers(entries)
        self.basic_ops = expand(self._entries)
        self.extra_edges = connect_channels(self.basic_ops)

    @property
    def forward_ops(self) -> list[Op]:
        """Returns the basic and fused operations of the forward pass, in order."""
        return self.fused("forward")

    @property
    def backward_ops(self) -> list[Op]:
        """Returns the operations of the backward pass, the last one to run first."""
        return self.fused("backward")

    def fused(self, direction: str) -> list[Op]:
        """Returns the operations that run in the "forward" or "backward" pass.

        Raises:
            UnknownNameError: if `direction` is another value.
            FusionError: if a fusion returns no list of operations, or a list with
                different basic operations.
        """
        steps = list(self.fusion_steps(direction))
        return steps[-1][-1] if steps else self._unfused(direction)

    def fusion_steps(
        self, direction: str
    ) -> Iterator[tuple[Fusion, list[Op], list[Op]]]:
        """Applies each fusion in turn, and yields (fusion, old list, new list)."""
        _check_direction("OperationFuser", "direction", direction)
        ops = self._unfused(direction)
        for fusion in (*fusions("joint"), *fusions(direction)):
            before, found = ops, fusion(list(ops))
            owner = getattr(fusion, "__self__", fusion)
            name = getattr(owner, "__qualname__", None) or shown(fusion)
            is_list = isinstance(found, list | tuple)
            if not is_list or not all(isinstance(op, Op) for op in found):
                raise FusionError(
                    f"OperationFuser: the fusion {name} returned {shown(found)}, which "
                    "is not a list of basic and fused operations. Return the list that "
                    "it was given, in which some operations may be fused."
                )
            ops = list(found)
            self._check(f"the fusion {name}", ops)
            yield fusion, before, ops

    def _unfused(self, direction) -> list[Op]:
        """Returns the list of operations to which the fusions are applied.

        If a fused operation of the caller does not override `direction`, its basic
        operations replace it.
        """
        ops: list[Op] = []
        for entry in self._entries:
            stays = not isinstance(entry, FusedOperation) or entry.overrides(direction)
            ops.extend([entry] if stays else entry.basic_ops)
        self._check("the list", ops)
        return ops

    def _check(self, source, ops):
        if expand(ops) != self.basic_ops:
            raise FusionError(
                f"OperationFuser: {source} returned {list(expand(ops))}, but was given "
                f"{list(self.basic_ops)}. A fused operation's basic_ops must be the "
                "operations that it replaces, in their order."
            )
        for window, _ in windows(ops):
            read = set(itertools.chain(*self.extra_edges.inputs[window]))
            for i in range(window.start, window.stop):
                if read.intersection(self.extra_edges.outputs[i]):
                    raise FusionError(
                        f"OperationFuser: {source} fuses the producer and a reader of "
                        "a channel; the producer is "
                        f"{operation_label(self.basic_ops, i)}. The extra inputs of a "
                        "fused operation must come from outside its window: fuse fewer "
                        "operations."
                    )

    @property
    def groups(self) -> tuple[OperationGroup, ...]:
        """Splits the operations into groups, each differentiated by one `custom_vjp`.

        The groups are as small as fused operations and quantized tensors allow.
        """
        forward, backward = (
            {
                window.start: op
                if isinstance(op, FusedOperation)
                else FusedOperation(op.basic_ops)
                for window, op in windows(ops)
            }
            for ops in (self.forward_ops, self.backward_ops)
        )
        shared = forward.keys() & backward.keys()
        starts = sorted(shared - quantized_boundaries(self.basic_ops))
        return tuple(
            OperationGroup(
                tuple(forward[i] for i in range(start, end) if i in forward),
                tuple(backward[i] for i in range(start, end) if i in backward),
                start,
                self.extra_edges.within(start, end),
            )
            for start, end in itertools.pairwise([*starts, len(self.basic_ops)])
        )

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
        own_params = self._split(params)
        checks.check_array("OperationFuser", "x", x)
        checks.check_flag("OperationFuser", "deterministic", deterministic)
        keys = self._keys(key, deterministic)
        self._check_extra_inputs(extra_inputs)
        own_params = [
            dict(op.claim(own))
            for op, own in zip(self.basic_ops, own_params, strict=True)
        ]
        for i, own_key in keys.items():
            own_params[i]["key"] = own_key
        for linear, quantize, role in self._passed_states:
            for name in names_of(role):
                own_params[quantize][name] = own_params[linear].pop(name)
        edges = dict(zip(self.extra_edges.from_outside, extra_inputs, strict=True))
        x_aval = jax.typeof(x)
        for group in self.groups:
            operands = {
                "x": x,
                "params": tuple(own_params[group.first :][: len(group.basic_ops)]),
                "edges": {edge: edges[edge] for edge in group.edges.from_outside},
            }
            with jax.disable_jit(False):  # see `run_group`
                x, results, _ = run_group(
                    registry.configuration(), group, vma.unsharded(operands)
                )
            edges.update(results)
        x = vma.with_rows_of(x_aval, x)
        public = [edges[edge] for edge in self.extra_edges.to_outside]
        return (x, *public) if public else x

    def _split(self, params) -> list[dict[str, jax.Array]]:
        """Returns `params` as one checked dict of arrays for each basic operation."""
        split = [dict(each) for each in split_each("OperationFuser", self.ops, params)]
        for i, (op, own) in enumerate(zip(expand(self.ops), split, strict=True)):
            if set(own) != set(op.specs()):
                raise ShapeContractError(
                    f"{operation_label(self.basic_ops, i)}: params has {sorted(own)}, "
                    f"but the operation has the parameters {sorted(op.specs())}. Pass "
                    "what init(key) returns."
                )
        return split

    def _keys(self, key, deterministic) -> dict[int, jax.Array]:
        """Returns {index: PRNG key} for the operations that draw random numbers."""
        ops = () if deterministic else self.basic_ops
        drawing = [i for i, op in enumerate(ops) if op.takes_key]
        if drawing and key is None:
            raise ShapeContractError(
                f"{operation_label(self.basic_ops, drawing[0])}: it draws random "
                "numbers, but key = None. Pass key=jax.random.key(...), a different "
                "key every step, or deterministic=True."
            )
        if key is not None:
            checks.check_key("OperationFuser", "key", key)
        return {i: jax.random.fold_in(key, i) for i in drawing}

    def _check_extra_inputs(self, extra_inputs):
        from_caller = self.extra_edges.from_outside
        if len(extra_inputs) != len(from_caller):
            readers = [
                operation_label(self.basic_ops, i)
                for i, row in enumerate(self.extra_edges.inputs)
                if set(row) & set(from_caller)
            ]
            raise ShapeContractError(
                f"OperationFuser: {len(extra_inputs)} extra inputs, but the operations "
                f"take {len(from_caller)}: {', '.join(readers) or 'none'}. Pass one "
                "for each, in their order, after x."
            )
        for i, array in enumerate(extra_inputs):
            checks.check_array("OperationFuser", f"extra input {i}", array)
