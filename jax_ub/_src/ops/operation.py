"""The interface of fusible operations.

A *basic operation* is an immutable description of one function of an activation: its
parameters, its pure forward and its pure backward. A *fused operation* replaces several
consecutive basic operations, called its *window*. It computes the same results in the
forward, in the backward or in both, for example with fewer passes over memory.
`OperationFuser` chooses the windows; `rules/fused_group.py` differentiates them.

The forward passes only *residuals* to the backward: arrays by name, in one dict for
each basic operation. The basic operation defines their names and meanings, so any
backward, fused or not, works after any forward.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.fields import OutputChannel, check_channel_name, check_fields

Params = Mapping[str, jax.Array]
Residuals = Mapping[str, jax.Array]
# The extra inputs or outputs of one operation (arrays that it reads or returns besides
# the activation), or their gradients: None for a gradient that is known to be zero.
Extras = tuple[jax.Array | None, ...]


@dataclasses.dataclass(frozen=True)
class RequestedGradients:
    """Says for which operands of one basic operation gradients are computed.

    `x` stands for the activation, `params` holds the names of parameters, and
    `extra_inputs` has one flag for each extra input.
    """

    x: bool = False
    params: frozenset[str] = frozenset()
    extra_inputs: tuple[bool, ...] = ()

    def __bool__(self) -> bool:
        """Returns whether any gradient is requested."""
        return self.x or bool(self.params) or any(self.extra_inputs)


class Operation:
    """Base class of the entries of `Sequential`: basic operations and composites.

    A composite has several basic operations, such as a linear layer with its bias.
    """

    if TYPE_CHECKING:
        # At run time an inherited property would shadow the field of FusedOperation.

        @property
        def basic_ops(self) -> tuple["BasicOperation", ...]:
            """The basic operations that this one consists of, in forward order."""
            raise NotImplementedError

    @property
    def entries(self) -> tuple["Op", ...]:
        """The basic operations, and fused ones that the caller constructed, in order.

        This is what the fuser receives.
        """
        return self.basic_ops

    def init(self, key: jax.Array) -> Any:
        """Creates the parameters as a pytree of global arrays."""
        raise NotImplementedError

    def specs(self) -> Any:
        """Returns the `PartitionSpec` of every parameter, as a pytree like `init`'s."""
        raise NotImplementedError

    def split(self, params: Any) -> tuple[Params, ...]:
        """Splits `params` into one dict of arrays by name for each basic operation."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class BasicOperation(Operation):
    """Base class of operations: a function of one activation, and its derivative.

    A subclass is a frozen dataclass (`@dataclasses.dataclass(frozen=True, repr=False)`)
    with hashable fields. A parallel operation is called inside `jax.shard_map`;
    parameters and activations are then this rank's shards.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    # Whether the forward takes a PRNG key as `params["key"]`. A deterministic call does
    # not pass it. `init` and `specs` never contain this entry.
    takes_key: ClassVar[bool] = False
    # Names of the parameters that the backward updates, such as "main_grad". Their
    # cotangent is their new value; the residual of the same name is their old value.
    overwritten: ClassVar[frozenset[str]] = frozenset()

    extra_input_channels: tuple[str | None, ...] = dataclasses.field(
        default=(), kw_only=True
    )
    extra_output_channels: tuple[OutputChannel | None, ...] = dataclasses.field(
        default=(), kw_only=True
    )

    def __post_init__(self):
        """Checks the field values; subclasses that override this method call it."""
        check_fields(self)

    @property
    def basic_ops(self) -> tuple["BasicOperation", ...]:
        """A tuple that contains only this operation."""
        return (self,)

    @property
    def label(self) -> str:
        """The name by which error messages refer to the operation."""
        return type(self).__name__

    @property
    def comm_name(self) -> str | None:
        """The name under which `initialize_ub` configures the overlap, or None."""
        return None

    def __repr__(self) -> str:
        """Returns the constructor call as text, leaving out default arguments."""
        return constructor_call(self)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Creates the parameters: global arrays by name, by default an empty dict."""
        return {}

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns each parameter's `PartitionSpec` by name; by default, no entries."""
        return {}

    def split(self, params: Params) -> tuple[Params, ...]:
        """Checks `params` and returns them as the only element of a tuple."""
        check_params(self.label, params)
        return (params,)

    def claim(self, params: Params) -> None:
        """Checks, before tracing for gradients, that this call may use the parameters.

        A linear uses it to reject a main_grad that another call has already.
        """

    def saved(self, needs: RequestedGradients) -> frozenset[str]:
        """Returns the names of the forward's arrays that `backward` will read.

        They depend on the requested gradients. Requesting more never removes a name.
        """
        raise NotImplementedError

    def forward(
        self, params: Params, x: jax.Array, extra_inputs: Extras, saves: frozenset[str]
    ) -> tuple[jax.Array, Extras, Residuals]:
        """Computes the output, the extra outputs and the arrays kept for the backward.

        Args:
            params: the operation's parameters, in `param_dtype`.
            x: the activation.
            extra_inputs: `num_extra_inputs` arrays.
            saves: names of the residuals that the backward reads. The caller drops all
                others, so the forward need not compute them.

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
        """Computes the requested gradients of x, the parameters and the extra inputs.

        Called only if a gradient is requested and if `dy` or one of `d_extra_outputs`
        is not None. The caller casts each gradient to the dtype of its operand and,
        inside `jax.shard_map(check_vma=True)`, sums it over the mesh axes over which
        the operand does not vary.

        Args:
            residuals: the residuals that `saved(needs)` names.
            dy: gradient of y; None if it is known to be zero.
            d_extra_outputs: gradients of the extra outputs; None for each that is known
                to be zero.
            needs: the gradients to compute. Others may be None, or absent in the dict.

        Returns:
            dx, the gradients of the parameters by name, and a tuple of the gradients of
            the extra inputs.
        """
        raise NotImplementedError

    def with_extra_input_channel(self, index: int, name: str) -> "BasicOperation":
        """Returns a copy that reads extra input `index` from the channel `name`.

        Raises:
            ShapeContractError: if `index` is out of range, or `name` is not a string
                without spaces.
        """
        self._check_channel("input", index, self.num_extra_inputs, name)
        channels = self.extra_input_channels or (None,) * self.num_extra_inputs
        changed = (*channels[:index], name, *channels[index + 1 :])
        return dataclasses.replace(self, extra_input_channels=changed)

    def with_extra_output_channel(
        self, index: int, name: str, output_to_caller: bool = True
    ) -> "BasicOperation":
        """Returns a copy that writes extra output `index` to the channel `name`.

        Args:
            index: index of the extra output.
            name: the channel. It has one producer; any number of later operations can
                read it.
            output_to_caller: whether the extra output is also returned to the caller.

        Raises:
            ShapeContractError: if `index` is out of range, or `name` is not a string
                without spaces.
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
    def entries(self) -> tuple["Op", ...]:
        """A tuple that contains only this operation, so that it stays fused."""
        return (self,)

    def init(self, key: jax.Array) -> tuple[Any, ...]:
        """Creates the parameters: a tuple with one entry for each basic operation."""
        return init_each(self.basic_ops, key)

    def specs(self) -> tuple[Any, ...]:
        """Returns the `PartitionSpec` of every parameter, as a pytree like `init`'s."""
        return tuple(op.specs() for op in self.basic_ops)

    def split(self, params: Any) -> tuple[Params, ...]:
        """Splits `params` into one dict of arrays by name for each basic operation."""
        return split_each(type(self).__name__, self.basic_ops, params)

    def overrides(self, name: str) -> bool:
        """Returns whether the class overrides the method "forward" or "backward"."""
        return getattr(type(self), name) is not getattr(FusedOperation, name)

    @property
    def overlaps(self) -> bool:
        """Whether the operation runs a collective and a GEMM at the same time.

        `explain()` reports it.
        """
        return False

    @classmethod
    def refusals(cls, ops: Sequence["Op"]) -> dict[int, str]:
        """Returns why the class does not fuse operations that almost match its pattern.

        Args:
            ops: the list that is passed to `fuse_forward_ops` or `fuse_backward_ops`.

        Returns:
            The reasons, reported by `explain()`. Keys are indices into `ops`: the index
            of the linear, if the operations include one.
        """
        return {}

    def saved(
        self, needs: tuple[RequestedGradients, ...]
    ) -> tuple[frozenset[str], ...]:
        """Returns, per basic operation, which residuals `backward` reads, by name."""
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
        """Computes the output of the replaced operations; here, one after another.

        Parameters, extra inputs, extra outputs and residuals are tuples with one entry
        for each basic operation.
        """
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
        """Computes the gradients of the replaced operations; here, one after another.

        Residuals, parameter gradients and extra tensors are tuples with one entry for
        each basic operation.

        Unlike in `BasicOperation.backward`, every gradient may be None. For example,
        `dy` is None if only an extra output inside the window has a gradient.
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
# A function that fuses operations: it takes a list, replaces runs of consecutive
# operations by fused operations, and returns the new list.
Fusion = Callable[[list[Op]], list[Op]]


def backward_of(
    op: BasicOperation,
    residuals: Residuals,
    dy: jax.Array | None,
    d_extra_outputs: Extras,
    needs: RequestedGradients,
) -> tuple[jax.Array | None, Params, Extras]:
    """Runs `op.backward`, unless no gradient is requested or all cotangents are zero.

    In these cases the result has no gradients, except the old values of accumulators
    such as "main_grad".
    """
    arrived = dy is not None or any(d is not None for d in d_extra_outputs)
    if needs and arrived:
        return op.backward(residuals, dy, d_extra_outputs, needs)
    # The cotangent of an overwritten parameter is its new value. Without a gradient to
    # add, this is the old value.
    kept = {name: residuals[name] for name in op.overwritten & needs.params}
    return None, kept, (None,) * op.num_extra_inputs


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
    """Returns the first operations of a list if their types are `kinds`, else None."""
    window = tuple(ops[: len(kinds)])
    if len(window) < len(kinds) or not all(map(isinstance, window, kinds)):
        return None
    return window


def expand(ops: Sequence[Op]) -> tuple[BasicOperation, ...]:
    """Replaces the fused operations of a list by the basic operations they contain."""
    return tuple(basic for op in ops for basic in op.basic_ops)


def windows(ops: Sequence[AnyOp]) -> list[tuple[slice, AnyOp]]:
    """Returns each operation of a list with the slice of basic operations it covers.

    The slices index the list of all basic operations.
    """
    found: list[tuple[slice, AnyOp]] = []
    place = 0
    for op in ops:
        found.append((slice(place, place + len(op.basic_ops)), op))
        place += len(op.basic_ops)
    return found


def init_each(ops: Sequence[Operation], key: jax.Array) -> tuple[Any, ...]:
    """Creates the parameters of each operation from `fold_in(key, index)`."""
    shapes.check_key("init", "key", key)
    return tuple(
        op.init(jax.random.fold_in(key, place)) for place, op in enumerate(ops)
    )


def split_each(label: str, ops: Sequence[Operation], params: Any) -> tuple[Params, ...]:
    """Splits a tuple of parameters into one dict of arrays per basic operation.

    Raises:
        ShapeContractError: if `params` does not have one entry for each operation.
    """
    if not isinstance(params, (tuple, list)) or len(params) != len(ops):
        raise ShapeContractError(
            f"{label}: params is a {type(params).__name__}, but the parameters "
            f"of these {len(ops)} operations are a tuple with one entry for each."
        )
    pairs = zip(ops, params, strict=True)
    return tuple(part for op, own in pairs for part in op.split(own))


def constructor_call(op) -> str:
    """Returns the constructor call of a dataclass instance as text.

    Arguments that equal their defaults are left out.
    """
    shown = [
        f"{field.name}={getattr(op, field.name)!r}"
        for field in dataclasses.fields(op)
        if getattr(op, field.name) != field.default
    ]
    return f"{type(op).__name__}({', '.join(shown)})"


def check_params(label: str, params: Any) -> None:
    """Checks that the parameters of one operation are a dict of arrays by name.

    Raises:
        ShapeContractError: if they are not.
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
    """Returns the size of a mesh axis, or None if no mesh is in scope.

    A mesh is in scope inside `jax.shard_map` and under `jax.set_mesh`. For an
    `axis_name` of None the size is 1.
    """
    if axis_name is None:
        return 1
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis_name)


def compute_dtype(dtype: Any, x: jax.Array) -> np.dtype:
    """Returns the dtype to compute in: `dtype`, or the dtype of `x` if it is None."""
    return np.dtype(x.dtype if dtype is None else dtype)
