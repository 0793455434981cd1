"""Operations that only communicate: `AllGather`, `ReduceScatter` and `AllReduce`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_ub._src import checks
from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.collectives import all_gather, all_reduce, reduce_scatter
from jax_ub._src.rules.backward import is_partial
from jax_ub._src.rules.call_config import CallConfig, make_call_config
from jax_ub._src.rules.operands import pcast_operands
from jax_ub._src.scaled_array import ScaledArray, is_scaled, source_of


@dataclasses.dataclass(frozen=True, repr=False)
class Collective(BasicOperation):
    """Base class of operations that only run a collective over `axis_name`.

    They have no parameters and no residuals.
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


def as_varying(call_config: CallConfig, x: jax.Array) -> jax.Array:
    """Casts x to vary over the collective's mesh axis, as `jax.lax.pcast` does."""
    return vma.pcast_varying(x, call_config.axes(x))


def gathered(call_config: CallConfig, x: Any) -> Any:
    """All-gathers an array, or the values and scales of a quantized `ScaledArray`."""
    if not is_scaled(x):
        return all_gather(call_config.collective, as_varying(call_config, x))
    x = pcast_operands(x, call_config.axes(x))
    y: Any = all_gather(call_config.collective, x)
    # Later operations read the shape and dtype of the source, the array that was
    # quantized, but not its values. So zeros will do.
    source = vma.pcast_varying(
        jnp.zeros(y.shape, x.source.dtype), vma.axes_of(y.values)
    )
    return ScaledArray(y.values, y.scales, source)


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Collective):
    """An operation that all-gathers tokens of P ranks: [..., M/P, K] to [..., M, K].

    The backward is a reduce-scatter.

    Transformer Engine: `te.ops.AllGather`, which gathers along the first dimension. No
    parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to gather over.
        method: the method; None takes `JAX_UB_METHOD` if set, else "auto".
    """

    takes_quantized = True

    def forward(self, params, x, extra_inputs, saves):
        call_config = self.call_config()
        self.check(source_of(x))
        return gathered(call_config, x), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        call_config = self.call_config()
        return reduce_scatter(call_config.collective, dy, out_dtype=dy.dtype), {}, ()


@dataclasses.dataclass(frozen=True, repr=False)
class ReduceScatter(Collective):
    """An operation that reduce-scatters over P ranks: [..., M, K] to [..., M/P, K].

    The sum over the ranks is computed in f32 and rounded once. Each rank keeps M/P
    tokens. The backward is an all-gather.

    Transformer Engine: `te.ops.ReduceScatter`, which scatters along the first
    dimension. No parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to sum over.
        method: the method; None takes `JAX_UB_METHOD` if set, else "auto".
    """

    takes_quantized_grad = True

    def forward(self, params, x, extra_inputs, saves):
        call_config = self.call_config()
        self.check(x)
        checks.check_divides(self.label, x, call_config.num_ranks)
        x = as_varying(call_config, x)
        return reduce_scatter(call_config.collective, x, out_dtype=x.dtype), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        return gathered(self.call_config(), dy), {}, ()


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce(Collective):
    """An operation that sums x over the ranks in f32, and rounds once (all-reduce).

    The backward is the identity if dy is the complete gradient of y on every rank. It
    is an all-reduce if dy is partial, the gradient of this rank's use of y only:

    | reduce_in_backward | `shard_map(check_vma=True)` | `check_vma=False` |
    |---|---|---|
    | None | identity: y has a replicated type, so dy is complete | sum, as for `jax.lax.psum` |
    | False | identity | identity: correct if the loss is differentiated inside the `shard_map` and is the same on every rank |
    | True | sum: y has a varying type, so dy is partial | sum |

    Transformer Engine: `te.ops.AllReduce`. Its backward is always the identity; its
    `reduce_in_backward` has no effect. No parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to sum over.
        reduce_in_backward: whether the backward sums dy over the ranks; see the table.
        method: the method; None takes `JAX_UB_METHOD` if set, else "auto".
    """  # noqa: E501, a table

    _: dataclasses.KW_ONLY
    reduce_in_backward: bool | None = None

    def forward(self, params, x, extra_inputs, saves):
        call_config = self.call_config()
        self.check(x, least_rank=0)
        y = all_reduce(call_config.collective, as_varying(call_config, x))
        return as_varying(call_config, y) if self.reduce_in_backward else y, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        call_config = self.call_config()
        sums = self.reduce_in_backward
        if sums is None or (call_config.is_vma_checked and not sums):
            sums = is_partial(call_config, dy)
        dx = all_reduce(call_config.collective, dy) if sums else dy
        return as_varying(call_config, dx), {}, ()  # the type of the sum's operand
