"""Basic operations: bias, constant, extra tensors, reshape, dropout and collectives."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers
from jax.sharding import PartitionSpec

from jax_ub._src import checks
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.group import cotangent_aval, to_cotangent_aval
from jax_ub._src.ops.operation import BasicOperation, compute_dtype, init_parameter
from jax_ub._src.primitives import mesh, vma
from jax_ub._src.primitives.collectives import all_gather, all_reduce, reduce_scatter
from jax_ub._src.reference import with_rank
from jax_ub._src.rules.backward import is_partial
from jax_ub._src.rules.call_config import CallConfig, make_call_config
from jax_ub._src.rules.operands import pcast_operands
from jax_ub._src.rules.vjp import row_sum
from jax_ub._src.scalars import is_integer, is_number
from jax_ub._src.scaled_array import ScaledArray, dequantized, is_scaled, source_of


@dataclasses.dataclass(frozen=True, repr=False)
class Identity(BasicOperation):
    """An operation that returns its input unchanged.

    Transformer Engine: `te.ops.Identity`. No parameters, no residuals.
    """

    takes_quantized = True
    takes_quantized_grad = True

    def forward(self, params, x, extra_inputs, saves):
        return x, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        return dy, {}, ()


@dataclasses.dataclass(frozen=True, repr=False)
class Bias(BasicOperation):
    """An operation that adds a learned vector to the features of every token.

    Transformer Engine: `te.ops.Bias`. Parameter: "bias". No residuals.

    Attributes:
        size: the global number of features.
        tensor_parallel: whether the features are sharded over `axis_name`.
        axis_name: the mesh axis that the features are sharded over.
        dtype: dtype of y; None takes the dtype of x.
        param_dtype: dtype of the bias.
        bias_init: initializer of the global bias.
    """

    size: int
    _: dataclasses.KW_ONLY
    tensor_parallel: bool = False
    axis_name: str = "tp"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    bias_init: Callable[..., jax.Array] = initializers.zeros

    takes_quantized_grad = True

    def __post_init__(self):
        super().__post_init__()
        checks.check_size(self.label, "size", self.size)

    def init(self, key):
        bias = init_parameter(self, "bias_init", self.bias_init, key, (self.size,))
        return {"bias": bias}

    def specs(self):
        axes = (self.axis_name,) if self.tensor_parallel else ()
        return {"bias": PartitionSpec(*axes)}

    def forward(self, params, x, extra_inputs, saves):
        """Adds the bias to x in f32 and rounds the sum once."""
        bias = params["bias"]
        checks.check_rank(self.label, "x", x, 1)
        checks.check_float(self.label, x=x, bias=bias)
        wanted = x.shape[-1:]
        checks.check_shape(self.label, "bias", bias, wanted, "this rank's features")
        y = x.astype(jnp.float32) + with_rank(bias.astype(jnp.float32), x.ndim)
        return y.astype(compute_dtype(self.dtype, x)), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        d_params = {"bias": row_sum(dequantized(dy))} if needs.params else {}
        return dy if needs.x else None, d_params, ()


@dataclasses.dataclass(frozen=True, repr=False)
class ConstantScale(BasicOperation):
    """An operation that multiplies an activation by a constant, such as `1 / sqrt(2)`.

    The product is computed in f32 and rounded once.

    Transformer Engine: `te.ops.ConstantScale`. No parameters, no residuals.

    Attributes:
        scale: a Python number.
    """

    scale: float

    def __post_init__(self):
        if not is_number(self.scale):
            raise ShapeContractError(
                f"{self.label}: scale = {shown(self.scale)} is not a finite number "
                "that is known when the program is traced. Pass a Python number, for "
                "example float(scale)."
            )
        object.__setattr__(self, "scale", float(self.scale))
        super().__post_init__()

    def forward(self, params, x, extra_inputs, saves):
        checks.check_float(self.label, x=x)
        return self._scaled(x), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        return self._scaled(dy), {}, ()

    def _scaled(self, x):
        return (x.astype(jnp.float32) * self.scale).astype(x.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class AddExtraInput(BasicOperation):
    """An operation that adds an extra input (a second array, such as a residual) to x.

    The sum is computed in f32 and rounded to the dtype of x.

    Transformer Engine: `te.ops.AddExtraInput`. No parameters, no residuals.

    Attributes:
        in_place: whether the sum may reuse the buffer of the extra input. If True,
            `ops.fused.ForwardLinearBiasAdd` and `ForwardLinearScaleAdd` compute the sum
            in the GEMM. XLA copies the buffer first if it is still read, so the
            caller's arrays never change.
    """

    num_extra_inputs = 1

    _: dataclasses.KW_ONLY
    in_place: bool = False

    def check(self, shape: tuple[int, ...], extra: jax.Array) -> None:
        """Checks that the extra input is a float array with the shape of x."""
        checks.check_float(self.label, extra_input=extra)
        checks.check_shape(
            self.label, "the extra input", extra, shape, "the shape of x"
        )

    def forward(self, params, x, extra_inputs, saves):
        (extra,) = extra_inputs
        self.check(x.shape, extra)
        y = extra.astype(jnp.float32) + x.astype(jnp.float32)
        return y.astype(x.dtype), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        d_extra = dy if any(needs.extra_inputs) else None
        return dy if needs.x else None, {}, (d_extra,)


@dataclasses.dataclass(frozen=True, repr=False)
class MakeExtraOutput(BasicOperation):
    """An operation that returns x twice: as y, and as an extra output for a residual.

    Transformer Engine: `te.ops.MakeExtraOutput`. No parameters, no residuals.

    Attributes:
        in_place: whether the backward may reuse the buffer of the extra output's
            gradient for the sum of both gradients. If True,
            `ops.fused.BackwardLinearAdd` adds that gradient in the dgrad GEMM. The
            caller's arrays never change.
    """

    num_extra_outputs = 1

    _: dataclasses.KW_ONLY
    in_place: bool = False

    takes_quantized = True

    def forward(self, params, x, extra_inputs, saves):
        return x, (dequantized(x),), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        (d_extra,) = d_extra_outputs
        if dy is None or d_extra is None:
            return d_extra if dy is None else dy, {}, ()
        # Inside a fused operation, dy may be a partial sum over the ranks, while
        # `d_extra` is complete (see `is_partial_sum`). `to_cotangent_aval` then sums dy
        # over the ranks before the addition.
        dy = to_cotangent_aval(cotangent_aval(d_extra), dy)
        return d_extra + dy, {}, ()


def is_partial_sum(d_extra: jax.Array, dy: jax.Array) -> bool:
    """Returns whether dy must be summed over the ranks before `d_extra` is added.

    This is the case if x is replicated but the ranks compute different functions of it,
    for example with their own shards of a kernel. Then dy is a partial sum over the
    ranks, but `d_extra`, the gradient of an extra output, is complete.
    """
    return bool(vma.axes_of(*jax.tree.leaves(dy)) - vma.axes_of(d_extra))


@dataclasses.dataclass(frozen=True, repr=False)
class Reshape(BasicOperation):
    """An operation that changes the shape of its input, as `jnp.reshape` does.

    Inside `jax.shard_map`, `shape` is the shape of this rank's shard.

    Transformer Engine: `te.ops.Reshape`. No parameters. Residual: "shape", an empty
    array `[0, *x.shape]`.

    Attributes:
        shape: the new shape; one size may be -1, which is inferred as in `jnp.reshape`.
    """

    shape: tuple[int, ...]

    def __post_init__(self):
        shape = self.shape
        is_list = isinstance(shape, tuple | list)
        if not is_list or not all(is_integer(n) and n >= -1 for n in shape):
            raise ShapeContractError(
                f"{self.label}: shape = {shown(shape)} is not a tuple of sizes. Pass "
                "one, for example (-1, 128)."
            )
        object.__setattr__(self, "shape", tuple(shape))
        super().__post_init__()

    def saved(self, needs):
        return frozenset({"shape"})

    def forward(self, params, x, extra_inputs, saves):
        known = math.prod(size for size in self.shape if size != -1)
        fits = x.size == known if -1 not in self.shape else known and not x.size % known
        if not fits or self.shape.count(-1) > 1:
            raise ShapeContractError(
                f"{self.label}: x has shape {x.shape} and {x.size} elements, which do "
                f"not fit shape = {self.shape}. Pass at most one -1; the product of "
                "the other sizes must divide the number of elements."
            )
        return x.reshape(self.shape), (), {"shape": jnp.zeros((0, *x.shape), jnp.int8)}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        return dy.reshape(residuals["shape"].shape[1:]), {}, ()


@dataclasses.dataclass(frozen=True, repr=False)
class Dropout(BasicOperation):
    """An operation that zeroes each element with probability `rate` in training.

    It divides the other elements by `1 - rate`, in f32.

    The PRNG key is an argument of the call, `seq(params, x, key=key)`. The fuser folds
    the index of each Dropout into the key. A call with `deterministic=True` needs no
    key, and the operation returns x unchanged.

    Ranks with different shards of x draw different masks; ranks with the same x draw
    the same mask. With `jax.shard_map(check_vma=True)`, the type of x contains the mesh
    axes that x is sharded over. With `check_vma=False`, name them in `axis_name`.

    Transformer Engine: `te.ops.Dropout`. No parameters. Residual: "mask", bool, if a
    mask is drawn.

    Attributes:
        rate: the probability of zeroing an element, in [0, 1).
        axis_name: mesh axes that x is sharded over, in addition to those in its type.
    """

    rate: float
    _: dataclasses.KW_ONLY
    axis_name: str | tuple[str, ...] | None = None

    takes_key = True

    def __post_init__(self):
        super().__post_init__()
        checks.check_rate(self.label, "rate", self.rate)

    def saved(self, needs):
        return frozenset({"mask"})

    def forward(self, params, x, extra_inputs, saves):
        checks.check_float(self.label, x=x)
        if self.axis_name is not None:
            mesh.axis_size(self.label, self.axis_name, may_be_mapped=True)
        if "key" not in params or self.rate == 0:
            return x, (), {}
        key = params["key"]
        named = checks.axis_tuple(self.axis_name)
        for axis in sorted(vma.axes_of(x) | frozenset(named)):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        mask = jax.random.bernoulli(key, 1 - self.rate, x.shape)
        return self._masked(mask, x), (), {"mask": mask}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        mask = residuals.get("mask")
        return dy if mask is None else self._masked(mask, dy), {}, ()

    def _masked(self, mask, x):
        kept = x.astype(jnp.float32) / (1 - self.rate)
        return jnp.where(mask, kept, 0).astype(x.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class Collective(BasicOperation):
    """Base class of operations that only run a collective over `axis_name`.

    Such operations have no parameters and no residuals.

    Attributes:
        axis_name: the mesh axis of the P ranks.
        method: the method; None takes `JAX_UB_METHOD` if set, else "auto".
    """

    axis_name: str = "tp"
    _: dataclasses.KW_ONLY
    method: str | None = None

    def call_config(self) -> CallConfig:
        return make_call_config(self.label, self.axis_name, None, self.method)

    def check(self, x: jax.Array, least_rank: int = 2) -> None:
        checks.check_rank(self.label, "x", x, least_rank)
        checks.check_float(self.label, x=x)
        checks.check_not_empty(self.label, "x", x)


def _as_varying(config: CallConfig, x: Any) -> Any:
    """Casts x to vary over the collective's mesh axis, as `jax.lax.pcast` does."""
    return pcast_operands(x, config.axes(x))


def _gathered(config: CallConfig, x: Any) -> Any:
    """All-gathers an array, or the values and scales of a quantized `ScaledArray`."""
    y: Any = all_gather(config.collective, _as_varying(config, x))
    if not is_scaled(y):
        return y
    # `source` is the array that was quantized. Later operations read only its shape and
    # dtype, so zeros replace its values.
    source = vma.pcast_varying(
        jnp.zeros(y.shape, x.source.dtype), vma.axes_of(y.values)
    )
    return ScaledArray(y.values, y.scales, source)


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Collective):
    """An operation that all-gathers tokens of P ranks: [..., M/P, K] to [..., M, K].

    The backward is a reduce-scatter.

    Transformer Engine: `te.ops.AllGather`, which gathers along the first dimension.
    """

    takes_quantized = True

    def forward(self, params, x, extra_inputs, saves):
        config = self.call_config()
        self.check(source_of(x))
        return _gathered(config, x), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        config = self.call_config()
        return reduce_scatter(config.collective, dy, out_dtype=dy.dtype), {}, ()


@dataclasses.dataclass(frozen=True, repr=False)
class ReduceScatter(Collective):
    """An operation that reduce-scatters over P ranks: [..., M, K] to [..., M/P, K].

    The sum over the ranks is computed in f32 and rounded once. Each rank keeps M/P
    tokens. The backward is an all-gather.

    Transformer Engine: `te.ops.ReduceScatter`, which scatters along the first
    dimension.
    """

    takes_quantized_grad = True

    def forward(self, params, x, extra_inputs, saves):
        config = self.call_config()
        self.check(x)
        checks.check_divides(self.label, x, config.num_ranks)
        x = _as_varying(config, x)
        return reduce_scatter(config.collective, x, out_dtype=x.dtype), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        return _gathered(self.call_config(), dy), {}, ()


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce(Collective):
    """An operation that all-reduces x: sums it over the ranks in f32 and rounds once.

    The backward is the identity if dy is the complete gradient of y on every rank. It
    is an all-reduce if dy is partial, the gradient of this rank's use of y only:

    | reduce_in_backward | `shard_map(check_vma=True)` | `check_vma=False` |
    |---|---|---|
    | None | identity: y has a replicated type, so dy is complete | sum, as for `jax.lax.psum` |
    | False | identity | identity: correct if the loss is differentiated inside the `shard_map` and is the same on every rank |
    | True | sum: y has a varying type, so dy is partial | sum |

    Transformer Engine: `te.ops.AllReduce`. Its backward is always the identity; its
    `reduce_in_backward` has no effect.

    Attributes:
        reduce_in_backward: whether the backward sums dy over the ranks; see the table.
    """  # noqa: E501, a table

    _: dataclasses.KW_ONLY
    reduce_in_backward: bool | None = None

    def forward(self, params, x, extra_inputs, saves):
        config = self.call_config()
        self.check(x, least_rank=0)
        y = all_reduce(config.collective, _as_varying(config, x))
        return _as_varying(config, y) if self.reduce_in_backward else y, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        config = self.call_config()
        sums = self.reduce_in_backward
        if sums is None or (config.is_vma_checked and not sums):
            sums = is_partial(config, dy)
        dx = all_reduce(config.collective, dy) if sums else dy
        return _as_varying(config, dx), {}, ()  # the type of the sum's operand
