"""The contract of fusible operations.

A *basic operation* is an immutable description of one function of an activation: what
parameters it has, and its pure forward and backward. A *fused operation* covers a
window of basic operations and computes the same, forward, backward or both, in another
way. `OperationFuser` chooses the windows; `rules/fused_group.py` differentiates them.

Between a forward and a backward lie only *residuals*: arrays by name, one dict for each
basic operation, so that every backward, fused or not, can follow every forward. Their
names and meanings belong to the basic operation.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jax_ub import shapes
from jax_ub.errors import ShapeContractError, shown
from jax_ub.ops.fields import OutputChannel, check_channel_name, check_fields

Params = Mapping[str, jax.Array]
Residuals = Mapping[str, jax.Array]
# Extra inputs or outputs of one operation, or their gradients (None: known to be zero).
Extras = tuple[jax.Array | None, ...]


@dataclasses.dataclass(frozen=True)
class RequestedGradients:
    """Which gradients of one basic operation somebody asked for."""

    x: bool = False
    params: frozenset[str] = frozenset()
    extra_inputs: tuple[bool, ...] = ()

    def __bool__(self) -> bool:
        """Whether any is wanted."""
        return self.x or bool(self.params) or any(self.extra_inputs)


class Operation:
    """What `Sequential` holds: a basic operation, or a composite of several."""

    if TYPE_CHECKING:
        # At run time an inherited property would shadow the field of FusedOperation.

        @property
        def basic_ops(self) -> tuple["BasicOperation", ...]:
            """The basic operations that this one stands for, in forward order."""
            raise NotImplementedError

    @property
    def entries(self) -> tuple["Op", ...]:
        """The basic operations, and fused ones where the caller constructed them."""
        return self.basic_ops

    def init(self, key: jax.Array) -> Any:
        """Creates the parameters: global arrays, in a plain pytree."""
        raise NotImplementedError

    def specs(self) -> Any:
        """The `PartitionSpec` of every parameter, in the same tree."""
        raise NotImplementedError

    def split(self, params: Any) -> tuple[Params, ...]:
        """Deals the parameters out: one dict for each basic operation."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class BasicOperation(Operation):
    """One function of an activation, and its derivative.

    A subclass is a frozen dataclass (`@dataclasses.dataclass(frozen=True, repr=False)`)
    whose fields hash. It runs inside `jax.shard_map` where it is parallel: parameters
    and activations are then this rank's shards.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    # Whether `params["key"]` is a PRNG key in forward; it is absent in a deterministic
    # run. Never a key of `init` or `specs`.
    takes_key: ClassVar[bool] = False
    # Parameters whose cotangent is their new value, such as main_grad. Each is also the
    # name of a residual, the old value.
    overwritten: ClassVar[frozenset[str]] = frozenset()

    extra_input_channels: tuple[str | None, ...] = dataclasses.field(
        default=(), kw_only=True
    )
    extra_output_channels: tuple[OutputChannel | None, ...] = dataclasses.field(
        default=(), kw_only=True
    )

    def __post_init__(self):
        """Checks the fields by their names; subclasses call it for their own."""
        check_fields(self)

    @property
    def basic_ops(self) -> tuple["BasicOperation", ...]:
        """Itself."""
        return (self,)

    @property
    def label(self) -> str:
        """How errors name it."""
        return type(self).__name__

    @property
    def comm_name(self) -> str | None:
        """The name of its overlap; None where it has none."""
        return None

    def __repr__(self) -> str:
        """The constructor's call, without what is left at its default."""
        return constructor_call(self)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Creates the parameters, as global arrays; none by default."""
        return {}

    def specs(self) -> dict[str, PartitionSpec]:
        """How the parameters lie on the mesh, by name; none by default."""
        return {}

    def split(self, params: Params) -> tuple[Params, ...]:
        """The parameters themselves."""
        check_params(self.label, params)
        return (params,)

    def claim(self, params: Params) -> None:
        """Sees the caller's own parameters, before the differentiated call begins."""

    def saved(self, needs: RequestedGradients) -> frozenset[str]:
        """Names the residuals that `backward` reads for these needs.

        More needs never need fewer residuals.
        """
        raise NotImplementedError

    def forward(
        self, params: Params, x: jax.Array, extra_inputs: Extras, saves: frozenset[str]
    ) -> tuple[jax.Array, Extras, Residuals]:
        """Computes the result.

        Args:
            params: this operation's parameters, in their own dtype.
            x: the activation.
            extra_inputs: `num_extra_inputs` arrays.
            saves: the residuals that a backward will read. Others are dropped, so that
                nothing has to be computed for them alone.

        Returns:
            y, the extra outputs, and the residuals by name.
        """
        raise NotImplementedError

    def backward(
        self,
        residuals: Residuals,
        dy: jax.Array | None,
        d_extra_outputs: Extras,
        needs: RequestedGradients,
    ) -> tuple[jax.Array | None, Params, Extras]:
        """Computes the gradients that are needed.

        It is called only if something is needed, and if `dy` or one of
        `d_extra_outputs` is not None. The caller casts the gradients to the dtypes of
        their operands, and sums them over mesh axes that the operand does not vary over
        (`jax.shard_map(check_vma=True)`).

        Args:
            residuals: what `saved(needs)` names.
            dy: gradient of y; None where it is known to be zero.
            d_extra_outputs: gradients of the extra outputs, None likewise.
            needs: what to compute. The rest may be None, or left out of the dict.

        Returns:
            dx, gradients of the parameters by name, and one of each extra input.
        """
        raise NotImplementedError

    def with_extra_input_channel(self, index: int, name: str) -> "BasicOperation":
        """A copy whose extra input `index` is the extra output named `name`.

        Raises:
            ShapeContractError: if there is no such extra input, or no such name.
        """
        self._check_channel("input", index, self.num_extra_inputs, name)
        channels = self.extra_input_channels or (None,) * self.num_extra_inputs
        changed = (*channels[:index], name, *channels[index + 1 :])
        return dataclasses.replace(self, extra_input_channels=changed)

    def with_extra_output_channel(
        self, index: int, name: str, output_to_caller: bool = True
    ) -> "BasicOperation":
        """A copy whose extra output `index` later operations can take by `name`.

        Args:
            index: which extra output.
            name: the channel, which has one producer and any number of consumers.
            output_to_caller: whether the caller gets it too.

        Raises:
            ShapeContractError: if there is no such extra output, or no such name.
        """
        self._check_channel("output", index, self.num_extra_outputs, name)
        channels = self.extra_output_channels or (None,) * self.num_extra_outputs
        channel = OutputChannel(name, output_to_caller)
        changed = (*channels[:index], channel, *channels[index + 1 :])
        return dataclasses.replace(self, extra_output_channels=changed)

    def _check_channel(self, kind, index, number, name):
        if not shapes.is_integer(index) or not 0 <= index < number:
            raise ShapeContractError(
                f"{self.label}: it has no extra {kind} {shown(index)}, but {number} of "
                "them, counted from 0. Name one of these."
            )
        check_channel_name(self.label, name)


@dataclasses.dataclass(frozen=True)
class FusedOperation(Operation):
    """A window of basic operations that is computed in another way.

    A subclass overrides `forward`, `backward` or both; what it leaves is computed by
    the basic operations, one after another. Extra inputs come from outside the window,
    so no channel may begin and end in it.

    As an entry of `Sequential` or `OperationFuser` it runs as it is in the passes that
    it overrides, and the registered fusions fuse its basic operations in the others.
    Its parameters are a tuple with one entry for each basic operation.
    """

    basic_ops: tuple[Any, ...]  # basic operations, whose types a subclass knows

    @property
    def entries(self) -> tuple["Op", ...]:
        """Itself."""
        return (self,)

    def init(self, key: jax.Array) -> tuple[Any, ...]:
        """Creates the parameters of the basic operations."""
        return init_each(self.basic_ops, key)

    def specs(self) -> tuple[Any, ...]:
        """The `PartitionSpec` of every parameter, in the tree of `init`."""
        return tuple(op.specs() for op in self.basic_ops)

    def split(self, params: Any) -> tuple[Params, ...]:
        """Deals the parameters out to the basic operations."""
        return split_each(type(self).__name__, self.basic_ops, params)

    def overrides(self, name: str) -> bool:
        """Returns whether the class overrides the method "forward" or "backward"."""
        return getattr(type(self), name) is not getattr(FusedOperation, name)

    @property
    def overlaps(self) -> bool:
        """Whether what it communicates runs beside a GEMM, for `explain()`."""
        return False

    @classmethod
    def refusals(cls, ops: Sequence["Op"]) -> dict[int, str]:
        """Says why a window that looks like this fusion's is none.

        Args:
            ops: the list that `fuse_forward_ops` or `fuse_backward_ops` gets.

        Returns:
            The reasons by the index in `ops` of the operation that they are about (a
            linear, where there is one), for `explain()`.
        """
        return {}

    def saved(
        self, needs: tuple[RequestedGradients, ...]
    ) -> tuple[frozenset[str], ...]:
        """Names the residuals that `backward` reads, for each basic operation."""
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
        """`BasicOperation.forward`, with one entry for each basic operation."""
        extra_outputs, residuals = [], []
        for i, op in enumerate(self.basic_ops):
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
        """`BasicOperation.backward`, with one entry for each basic operation.

        Any of the gradients may be None here, for example `dy`, where only an extra
        output inside the window has one.
        """
        d_params: list[Params] = []
        d_extra_inputs: list[Extras] = []
        window = zip(self.basic_ops, residuals, d_extra_outputs, needs, strict=True)
        for op, saved, d_extras, need in reversed(list(window)):
            dy, d_param, d_extra = backward_of(op, saved, dy, d_extras, need)
            d_params.insert(0, d_param)
            d_extra_inputs.insert(0, d_extra)
        return dy, tuple(d_params), tuple(d_extra_inputs)


Op = BasicOperation | FusedOperation
AnyOp = TypeVar("AnyOp", bound=Op)
# A fusion: takes a list of operations and returns one that expands to the same.
Fusion = Callable[[list[Op]], list[Op]]


def backward_of(
    op: BasicOperation,
    residuals: Residuals,
    dy: jax.Array | None,
    d_extra_outputs: Extras,
    needs: RequestedGradients,
) -> tuple[jax.Array | None, Params, Extras]:
    """Runs `op.backward`, unless nothing is needed or nothing arrives."""
    arrived = dy is not None or any(d is not None for d in d_extra_outputs)
    if needs and arrived:
        return op.backward(residuals, dy, d_extra_outputs, needs)
    # What is overwritten with its gradient keeps its value where there is none.
    kept = {name: residuals[name] for name in op.overwritten & needs.params}
    return None, kept, (None,) * op.num_extra_inputs


def fuse_windows(
    ops: Sequence[Op], match: Callable[[Sequence[Op]], FusedOperation | None]
) -> list[Op]:
    """Replaces every window, from the front, for which `match` makes an operation.

    Args:
        ops: basic and fused operations, in forward order.
        match: sees the rest of the list, and returns the operation that takes the place
            of its first ones, basic or fused, or None.
    """
    fused: list[Op] = []
    place = 0
    while place < len(ops):
        found = match(ops[place:])
        fused.append(ops[place] if found is None else found)
        end = place + 1
        while found is not None and len(expand(ops[place:end])) < len(found.basic_ops):
            end += 1
        place = end
    return fused


def front(ops: Sequence[Op], *kinds: type) -> tuple[Any, ...] | None:
    """The first operations of a list if they are of these kinds, in this order."""
    window = tuple(ops[: len(kinds)])
    if len(window) < len(kinds) or not all(map(isinstance, window, kinds)):
        return None
    return window


def expand(ops: Sequence[Op]) -> tuple[BasicOperation, ...]:
    """The basic operations that a fused list stands for."""
    return tuple(basic for op in ops for basic in op.basic_ops)


def windows(ops: Sequence[AnyOp]) -> list[tuple[slice, AnyOp]]:
    """Each operation of a fused list with the places of its basic ones."""
    found: list[tuple[slice, AnyOp]] = []
    place = 0
    for op in ops:
        found.append((slice(place, place + len(op.basic_ops)), op))
        place += len(op.basic_ops)
    return found


def init_each(ops: Sequence[Operation], key: jax.Array) -> tuple[Any, ...]:
    """Creates the parameters of several operations, each with a key of its own."""
    shapes.check_key("init", "key", key)
    return tuple(
        op.init(jax.random.fold_in(key, place)) for place, op in enumerate(ops)
    )


def split_each(label: str, ops: Sequence[Operation], params: Any) -> tuple[Params, ...]:
    """Deals the parameters of several operations out to their basic operations.

    Raises:
        ShapeContractError: if there is not one entry for each operation.
    """
    if not isinstance(params, (tuple, list)) or len(params) != len(ops):
        raise ShapeContractError(
            f"{label}: params is a {type(params).__name__}, but the parameters "
            f"of these {len(ops)} operations are a tuple with one entry for each."
        )
    pairs = zip(ops, params, strict=True)
    return tuple(part for op, own in pairs for part in op.split(own))


def constructor_call(op) -> str:
    """How the dataclass `op` can be made, without what is left at its default."""
    shown = [
        f"{field.name}={getattr(op, field.name)!r}"
        for field in dataclasses.fields(op)
        if getattr(op, field.name) != field.default
    ]
    return f"{type(op).__name__}({', '.join(shown)})"


def check_params(label: str, params: Any) -> None:
    """Refuses parameters of one operation that are not by name.

    Raises:
        ShapeContractError: if they are no dictionary of arrays.
    """
    if not isinstance(params, Mapping):
        raise ShapeContractError(
            f"{label}: params is of type {type(params).__name__}, but the parameters "
            "of an operation are a dictionary by name, {} where it has none. Pass what "
            "init(key) returns."
        )
    for name, array in params.items():
        shapes.check_array(label, name, array)


def num_ranks(axis_name: str | None) -> int | None:
    """The size of a mesh axis, where a mesh is in reach; None where none is.

    A mesh is in reach inside `jax.shard_map` and under `jax.set_mesh`.
    """
    if axis_name is None:
        return 1
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis_name)


def compute_dtype(dtype: Any, x: jax.Array) -> np.dtype:
    """What an operation computes in: its `dtype`, or that of its input."""
    return np.dtype(x.dtype if dtype is None else dtype)
