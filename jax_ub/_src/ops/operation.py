"""The interface of fusible operations.

A *basic operation* is an immutable description of one function of an activation: its
parameters, its pure forward and its pure backward. A *fused operation* replaces several
consecutive basic operations, called its *window*. It computes the same results in the
forward, in the backward or in both, for example with fewer passes over memory.
`OperationFuser` chooses the windows; `OperationGroup` differentiates them.

The forward passes only *residuals* to the backward: arrays by name, in one dict for
each basic operation. The basic operation defines their names and meanings, so any
backward, fused or not, works after any forward.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jax_ub._src import arguments, checks, dtypes, methods
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.fp8 import state as fp8_state
from jax_ub._src.scalars import is_integer
from jax_ub._src.scaled_array import is_scaled, source_of

Params = Mapping[str, jax.Array]
Residuals = Mapping[str, jax.Array]
# The extra inputs or extra outputs of one operation, which are arrays besides the
# activation. The type is also used for their gradients, where None is a gradient that
# is known to be zero.
Extras = tuple[jax.Array | None, ...]


@dataclasses.dataclass(frozen=True)
class OutputChannel:
    """A named extra output of an operation, which later operations read by its name.

    Attributes:
        name: the name of the channel.
        output_to_caller: whether the extra output is also returned to the caller.
    """

    name: str
    output_to_caller: bool = True


@dataclasses.dataclass(frozen=True)
class RequestedGradients:
    """The gradients that the backward of a basic operation must compute.

    `x` is whether it computes the gradient of the activation, `params` are the names of
    the parameters whose gradients it computes, and `extra_inputs` has one flag for each
    extra input.
    """

    x: bool = False
    params: frozenset[str] = frozenset()
    extra_inputs: tuple[bool, ...] = ()

    def __bool__(self) -> bool:
        return self.x or bool(self.params) or any(self.extra_inputs)


class Operation(arguments.KeywordsChecked):
    """Base class of the entries of `Sequential`: basic operations and composites.

    A composite has several basic operations, such as a linear layer with its bias.
    """

    _op_prefix = "ops."

    if TYPE_CHECKING:
        # Only type checkers see this property. At run time, FusedOperation has a
        # dataclass field `basic_ops`, which could not be set if this base class had a
        # property of the same name.

        @property
        def basic_ops(self) -> tuple["BasicOperation", ...]:
            """Returns the basic operations that this operation contains, in order."""
            raise NotImplementedError

    def __repr__(self) -> str:
        """Returns the constructor call as text, without arguments equal to defaults."""
        op: Any = self
        given = [
            f"{field.name}={shown(getattr(op, field.name))}"
            for field in dataclasses.fields(op)
            if field.repr and getattr(op, field.name) != field.default
        ]
        return f"{type(op).__name__}({', '.join(given)})"

    @property
    def parts(self) -> Sequence["Operation"]:
        """Returns the operations that this one consists of, in order."""
        return self.basic_ops

    def init(self, key: jax.Array) -> Any:
        """Creates the parameters of the operation, as a pytree of global arrays.

        Part i gets the key `jax.random.fold_in(key, i)`.
        """
        checks.check_key("init", "key", key)
        return tuple(
            op.init(jax.random.fold_in(key, i)) for i, op in enumerate(self.parts)
        )

    def specs(self) -> Any:
        """Returns each parameter's `PartitionSpec`, in the tree structure of `init`."""
        return tuple(op.specs() for op in self.parts)

    def split(self, params: Any) -> tuple[Params, ...]:
        """Splits `params` into a dict {name: array} for each basic operation."""
        return split_each(type(self).__name__, self.parts, params)


@dataclasses.dataclass(frozen=True, repr=False)
class BasicOperation(Operation):
    """Base class of differentiable operations, which map an activation x to y.

    A subclass is a frozen dataclass (`@dataclasses.dataclass(frozen=True, repr=False)`)
    with hashable fields. A parallel operation is called inside `jax.shard_map`;
    parameters and activations are then this rank's shards.

    Transformer Engine: `te.ops.BasicOperation`.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    # Whether the forward takes a PRNG key, as `params["key"]`. In a deterministic call,
    # the key is not passed. `init` and `specs` never return an entry "key".
    takes_key: ClassVar[bool] = False
    # Names of the parameters that the backward updates, such as "main_grad". The
    # cotangent of such a parameter is its new value; the residual of the same name is
    # its old value.
    overwritten: ClassVar[frozenset[str]] = frozenset()

    # Whether `forward` accepts a quantized x, and `backward` a quantized dy, as a
    # `ScaledArray`. If not, the caller of the method dequantizes the array first.
    takes_quantized: ClassVar[bool] = False
    takes_quantized_grad: ClassVar[bool] = False

    _: dataclasses.KW_ONLY
    extra_input_channels: tuple[str | None, ...] = ()
    extra_output_channels: tuple[OutputChannel | None, ...] = ()

    def __post_init__(self):
        """Checks the constructor's arguments. Overriding methods must call it, too."""
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        arguments.check(self.label, **fields)
        methods.resolve(self.label, fields.get("method"), None)
        for name in ("dtype", "param_dtype"):
            if fields.get(name) is None:
                continue
            # Without `jax_enable_x64`, f64 means f32, as everywhere in JAX.
            dtype = jax.dtypes.canonicalize_dtype(fields[name])
            if dtype not in dtypes.OPERANDS:
                raise ShapeContractError(
                    f"{self.label}: {name} = {dtype}, but operations compute in "
                    f"{dtypes.listed(dtypes.OPERANDS)}. Pass one of these."
                )
            object.__setattr__(self, name, dtype)
        if fields.get("axis_name") is not None:
            checks.check_axis_name(self.label, fields["axis_name"])
        for name, number, kind in (
            ("extra_input_channels", self.num_extra_inputs, str),
            ("extra_output_channels", self.num_extra_outputs, OutputChannel),
        ):
            channels = _checked_channels(self.label, name, fields[name], number, kind)
            object.__setattr__(self, name, channels)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.compare and not checks.is_hashable(value):
                raise ShapeContractError(
                    f"{self.label}: {field.name} = {shown(value)} is not hashable, but "
                    "operations are keys of JAX's caches. Pass a hashable value."
                )

    @property
    def basic_ops(self) -> tuple["BasicOperation", ...]:
        return (self,)

    @property
    def label(self) -> str:
        """Returns the operation's name in error messages, by default the class name."""
        return type(self).__name__

    @property
    def comm_name(self) -> str | None:
        """Returns the name of the operation's overlap in `initialize_ub`, or None."""
        return None

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Creates the parameters as global arrays by name; by default, none."""
        return {}

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns each parameter's `PartitionSpec` by name; by default, none."""
        return {}

    def split(self, params: Params) -> tuple[Params, ...]:
        check_params(self.label, params, takes_quantized=self.takes_quantized)
        return (params,)

    def claim(self, params: Params) -> Params:
        """Marks a "main_grad" and FP8 state as used by a call; returns the parameters.

        The fuser calls it outside the differentiated function.

        Raises:
            ShapeContractError: when JAX differentiates the call with respect to a
                "main_grad" or FP8 state that it must not use; see `claims.claim`.
        """
        return params

    def saved(self, needs: RequestedGradients) -> frozenset[str]:
        """Returns the names of the residuals that the backward will read.

        They depend on the requested gradients. Requesting more never removes a name. By
        default, the backward reads none.
        """
        return frozenset()

    def forward(
        self, params: Params, x: jax.Array, extra_inputs: Extras, saves: frozenset[str]
    ) -> tuple[jax.Array, Extras, Residuals]:
        """Computes the output y, the extra outputs and the residuals by name.

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
            d_extra_outputs: gradients of the extra outputs, like `dy`.
            needs: the gradients to compute. Others may be None, or absent in the dict.

        Returns:
            dx, the gradients of the parameters by name, and those of the extra inputs.
        """
        raise NotImplementedError

    def with_extra_input_channel(self, index: int, name: str) -> "BasicOperation":
        """Returns a copy that reads extra input `index` from the channel `name`.

        The channel is an extra output of an earlier operation.

        Raises:
            ShapeContractError: if `index` is out of range, or `name` is not a string
                without spaces.
        """
        return self._with_channel("input", index, name, name)

    def with_extra_output_channel(
        self, index: int, name: str, output_to_caller: bool = True
    ) -> "BasicOperation":
        """Returns a copy that writes extra output `index` to the channel `name`.

        Later operations with an extra input channel of this name read it.

        Args:
            index: index of the extra output.
            name: the channel. It has one producer; any number of later operations can
                read it.
            output_to_caller: whether the extra output is also returned to the caller.

        Raises:
            ShapeContractError: if `index` is out of range, or `name` is not a string
                without spaces.
            UnknownNameError: if `output_to_caller` is not a bool.
        """
        checks.check_flag(self.label, "output_to_caller", output_to_caller)
        channel = OutputChannel(name, output_to_caller)
        return self._with_channel("output", index, name, channel)

    def _with_channel(self, kind, index, name, channel):
        field, number = f"extra_{kind}_channels", getattr(self, f"num_extra_{kind}s")
        if not is_integer(index) or not 0 <= index < number:
            other = {"input": "AddExtraInput", "output": "MakeExtraOutput"}[kind]
            fix = "Pass one of these indices." if number else f"{other} has one."
            raise ShapeContractError(
                f"{self.label}: it has no extra {kind} {shown(index)}, but {number} of "
                f"them, counted from 0. {fix}"
            )
        check_channel_name(self.label, name)
        channels = list(getattr(self, field) or (None,) * number)
        channels[index] = channel
        changes: dict[str, Any] = {field: tuple(channels)}
        return dataclasses.replace(self, **changes)


def _checked_channels(label, field, channels, number, kind):
    is_list = isinstance(channels, tuple | list) and len(channels) in (0, number)
    if not is_list or not all(isinstance(each, kind | None) for each in channels):
        raise ShapeContractError(
            f"{label}: {field} = {shown(channels)} is not a tuple of {number} entries, "
            f"each {kind.__name__} or None. Use with_extra_input_channel and "
            "with_extra_output_channel."
        )
    for channel in channels:
        if channel is not None:
            check_channel_name(label, getattr(channel, "name", channel))
    return tuple(channels)


def check_channel_name(label: str, name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"\S+", name):
        raise ShapeContractError(
            f"{label}: {shown(name)} is not the name of a channel. Pass a string "
            "without spaces."
        )


def split_each(label: str, ops: Sequence[Operation], params: Any) -> tuple[Params, ...]:
    """Splits a tuple of parameters into one dict of arrays per basic operation."""
    is_list = isinstance(params, tuple | list)
    if not is_list or len(params) != len(ops):
        found = f" with {len(params)} entries" if is_list else ""
        raise ShapeContractError(
            f"{label}: params is of type {type(params).__name__}{found}, but there are "
            f"{len(ops)} operations. Pass the tuple that init(key) returns, with one "
            "entry for each operation."
        )
    pairs = zip(ops, params, strict=True)
    return tuple(part for op, own in pairs for part in op.split(own))


def check_operation(where: str, value: Any) -> None:
    if not isinstance(value, Operation):
        raise ShapeContractError(
            f"{where} is of type {type(value).__name__}, not an operation. Pass "
            "instances of the operations in jax_ub.ops."
        )


def read_operations(where: str, ops: Any) -> tuple[Any, ...]:
    """Returns several operations as a tuple, after checking their types."""
    try:
        entries = tuple(ops)
    except Exception as error:  # the iterator of a user's object may raise any error
        raise ShapeContractError(
            f"{where}: ops is of type {type(ops).__name__}. Pass a list of operations."
        ) from error
    for i, op in enumerate(entries):
        check_operation(f"{where}: entry {i}", op)
    return entries


def init_parameter(
    op: Any, name: str, make: Callable, key: Any, shape: tuple[int, ...]
) -> jax.Array:
    """Creates a parameter, as a global array, by the initializer `make`."""
    checks.check_key(op.label, "key", key)
    values = make(key, shape, op.param_dtype)
    checks.check_initial(op.label, name, values, shape)
    return values


def check_params(label: str, params: Any, *, takes_quantized: bool) -> None:
    """Raises an error unless an operation's parameters are a dict of arrays by name.

    The kernel of an operation that takes a quantized x may be a `ScaledArray`, too.
    """
    if not isinstance(params, Mapping):
        raise ShapeContractError(
            f"{label}: params is of type {type(params).__name__}, but the parameters "
            "of an operation are a dictionary by name, {} where it has none. Pass what "
            "init(key) returns."
        )
    for name, array in params.items():
        if not isinstance(name, str):
            raise ShapeContractError(
                f"{label}: params has the key {shown(name)}, which is not the name of "
                "a parameter. Pass what init(key) returns."
            )
        if name in fp8_state.NAMES and fp8_state.has_maximum_as_sum(array):
            continue
        if not is_scaled(array):
            checks.check_array(label, name, array)
        elif name != "kernel" or not takes_quantized:
            raise ShapeContractError(
                f"{label}: {name} is a ub.ScaledArray, but only kernels of linears "
                f"with fp8=recipe may be quantized. Pass {name}.source."
            )


def num_ranks(axis_name: str | tuple[str, ...] | None) -> int | None:
    """Returns the number of ranks along mesh axes, or None if no mesh is in scope.

    A mesh is in scope inside `jax.shard_map` and under `jax.set_mesh`. For an
    `axis_name` of None the number is 1.
    """
    axes, sizes = checks.axis_tuple(axis_name), jax.sharding.get_abstract_mesh().shape
    if not all(axis in sizes for axis in axes):
        return None
    return math.prod(sizes[axis] for axis in axes)


def compute_dtype(dtype: Any, x: Any) -> np.dtype:
    """Returns the dtype in which to compute: `dtype`, or x's dtype if it is None.

    For a quantized x, this is the dtype of the array that was quantized.
    """
    return np.dtype(source_of(x).dtype if dtype is None else dtype)
