"""Nonlinear operations: normalizations over the features, and activation functions."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers
from jax.sharding import PartitionSpec

from jax_ub._src import checks
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.operation import BasicOperation, compute_dtype, init_parameter
from jax_ub._src.reference import with_rank
from jax_ub._src.scalars import is_integer


@dataclasses.dataclass(frozen=True, repr=False)
class Normalization(BasicOperation):
    """Base class of `LayerNorm` and `RMSNorm`: `normalized * scale [+ bias]`.

    The computation is in f32 and the result is rounded once.

    Parameters, named as in Flax and replicated: "scale" and, for LayerNorm, "bias". All
    features of a token must be on one rank. Residuals: "x"; "scale"; "rstd" `[..., 1]`
    in f32; and for LayerNorm "mean" `[..., 1]` in f32.

    Attributes:
        normalized_shape: the number of features.
        eps: added to the variance, or to the mean square, before the square root.
        zero_centered_gamma: whether the factor is `1 + scale`, with "scale" initialized
            to zeros.
        dtype: dtype of y; None takes the dtype of x.
        param_dtype: dtype of the parameters.
        scale_init: initializer of "scale"; None uses ones, or zeros with
            `zero_centered_gamma`.
    """

    statistic_names: ClassVar[tuple[str, ...]] = ("rstd",)

    normalized_shape: int
    _: dataclasses.KW_ONLY
    eps: float = 1e-5
    zero_centered_gamma: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    scale_init: Callable[..., jax.Array] | None = None

    def __post_init__(self):
        super().__post_init__()
        checks.check_size(self.label, "normalized_shape", self.normalized_shape)
        checks.check_epsilon(self.label, "eps", self.eps)

    def init(self, key):
        default = initializers.zeros if self.zero_centered_gamma else initializers.ones
        make = default if self.scale_init is None else self.scale_init
        shape = (self.normalized_shape,)
        return {"scale": init_parameter(self, "scale_init", make, key, shape)}

    def specs(self):
        return {"scale": PartitionSpec()}

    def statistics(self, x: jax.Array) -> dict[str, jax.Array]:
        """Returns "rstd" and, for LayerNorm, "mean" of each token of x, `[..., 1]`.

        The normalized token is `(x - mean) * rstd`. RMSNorm subtracts no mean.
        """
        raise NotImplementedError

    def saved(self, needs):
        names = {"scale"} if needs.x else set()
        if needs.x or "scale" in needs.params:
            names |= {"x", *self.statistic_names}
        return frozenset(names)

    def forward(self, params, x, extra_inputs, saves):
        scale = params["scale"]
        checks.check_rank(self.label, "x", x, 1)
        checks.check_float(self.label, x=x, scale=scale)
        if x.shape[-1] != self.normalized_shape or scale.shape != x.shape[-1:]:
            raise ShapeContractError(
                f"{self.label}: x {x.shape} has {x.shape[-1]} features, but the "
                f"parameters are for {self.normalized_shape}. All features of a token "
                "must be on one rank: shard tokens (axis -2), not features."
            )
        statistics = self.statistics(x.astype(jnp.float32))
        y = _normalized(x, statistics) * self._gain(scale, x.ndim)
        if "bias" in params:
            bias, wanted = params["bias"], scale.shape
            checks.check_shape(self.label, "bias", bias, wanted, "the scale's shape")
            y = y + with_rank(bias.astype(jnp.float32), y.ndim)
        residuals = {"x": x, "scale": scale, **statistics}
        return y.astype(compute_dtype(self.dtype, x)), (), residuals

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the requested gradients of x and the parameters, in f32."""
        dy = dy.astype(jnp.float32)
        rows = tuple(range(dy.ndim - 1))
        d_params = {}
        if "bias" in needs.params:
            d_params["bias"] = jnp.sum(dy, axis=rows)
        if not needs.x and "scale" not in needs.params:
            return None, d_params, ()
        normalized = _normalized(residuals["x"], residuals)
        if "scale" in needs.params:
            d_params["scale"] = jnp.sum(dy * normalized, axis=rows)
        if not needs.x:
            return None, d_params, ()
        d_normalized = dy * self._gain(residuals["scale"], dy.ndim)
        # The mean and "rstd" of a token depend on all of its features. Their
        # derivatives therefore add means over the features to dx.
        along = jnp.mean(d_normalized * normalized, axis=-1, keepdims=True)
        dx = d_normalized - normalized * along
        if "mean" in residuals:
            dx = dx - jnp.mean(d_normalized, axis=-1, keepdims=True)
        return dx * residuals["rstd"], d_params, ()

    def _gain(self, scale, rank):
        scale = with_rank(scale.astype(jnp.float32), rank)
        return 1 + scale if self.zero_centered_gamma else scale


def _normalized(x, statistics):
    x = x.astype(jnp.float32)
    if "mean" in statistics:
        x = x - statistics["mean"]
    return x * statistics["rstd"]


@dataclasses.dataclass(frozen=True, repr=False)
class RMSNorm(Normalization):
    """RMS normalization: divides x by the root of the mean square of its features.

    Transformer Engine: `te.ops.RMSNorm`.
    """

    def statistics(self, x):
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return {"rstd": lax.rsqrt(mean_square + self.eps)}


@dataclasses.dataclass(frozen=True, repr=False)
class LayerNorm(Normalization):
    """Layer normalization: normalizes each token's features to mean 0 and variance 1.

    Transformer Engine: `te.ops.LayerNorm`.

    Attributes:
        bias_init: initializer of "bias".
    """

    statistic_names = ("mean", "rstd")

    _: dataclasses.KW_ONLY
    bias_init: Callable[..., jax.Array] = initializers.zeros

    def init(self, key):
        shape = (self.normalized_shape,)
        bias = init_parameter(self, "bias_init", self.bias_init, key, shape)
        return {**super().init(key), "bias": bias}

    def specs(self):
        return {**super().specs(), "bias": PartitionSpec()}

    def statistics(self, x):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
        return {"mean": mean, "rstd": lax.rsqrt(variance + self.eps)}


@dataclasses.dataclass(frozen=True, repr=False)
class Activation(BasicOperation):
    """Base class of activation functions: computed in f32, rounded once to x's dtype.

    No parameters. Residual: "x", the input. The backward recomputes the derivative
    from it.
    """

    def function(self, x: jax.Array) -> jax.Array:
        """Returns the activation of x, an f32 array, before `forward` rounds it."""
        raise NotImplementedError

    def gradient(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """Returns the f32 gradient of the input x, given dy, the gradient of y."""
        _, transposed = jax.vjp(self.function, x.astype(jnp.float32))
        return transposed(dy.astype(jnp.float32))[0]

    def saved(self, needs):
        return frozenset({"x"})

    def forward(self, params, x, extra_inputs, saves):
        checks.check_float(self.label, x=x)
        return self.function(x.astype(jnp.float32)).astype(x.dtype), (), {"x": x}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        return self.gradient(residuals["x"], dy).astype(dy.dtype), {}, ()


@dataclasses.dataclass(frozen=True, repr=False)
class GELU(Activation):
    """The GELU activation: `x * Phi(x)`, where Phi is the normal distribution's CDF.

    Uses the tanh approximation unless `approximate` is False.

    Transformer Engine: `te.ops.GELU`.
    """

    _: dataclasses.KW_ONLY
    approximate: bool = True

    def function(self, x):
        return jax.nn.gelu(x, approximate=self.approximate)


@dataclasses.dataclass(frozen=True, repr=False)
class ReLU(Activation):
    """The ReLU activation: `max(x, 0)`.

    Transformer Engine: `te.ops.ReLU`.
    """

    def function(self, x):
        return jax.nn.relu(x)


@dataclasses.dataclass(frozen=True, repr=False)
class SiLU(Activation):
    """The SiLU (swish) activation: `x * sigmoid(x)`.

    Transformer Engine: `te.ops.SiLU`.
    """

    def function(self, x):
        return jax.nn.silu(x)


@dataclasses.dataclass(frozen=True, repr=False)
class GatedActivation(Activation):
    """Base class of gated activations: `activation(gate) * up`, where x is [gate | up].

    The features of x consist of two halves, gate and up, so the result has half as
    many: `[..., 2H] -> [..., H]`.

    Each rank splits its own shard of the features. If the global features of a
    column-parallel linear were `[gate | up]`, rank 0 would have only gate features. For
    a result that does not depend on the number of ranks, interleave gate and up in
    blocks of `glu_interleave_size` features, such that each rank has whole pairs.

    Attributes:
        glu_interleave_size: None for `[gate | up]`; b for blocks of b features,
            `[gate, up, gate, up, ...]`.
    """

    _: dataclasses.KW_ONLY
    glu_interleave_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        size = self.glu_interleave_size
        if size is not None and (not is_integer(size) or size < 1):
            raise ShapeContractError(
                f"{self.label}: glu_interleave_size = {shown(size)} is not a positive "
                "integer. Pass the number of features of a block, or None for "
                "[gate | up]."
            )

    def activation(self, gate: jax.Array) -> jax.Array:
        raise NotImplementedError

    def forward(self, params, x, extra_inputs, saves):
        block = self.glu_interleave_size
        pair = 2 if block is None else 2 * block
        if x.ndim < 1 or x.shape[-1] % pair:
            size = "equal size" if block is None else f"blocks of {block} features"
            raise ShapeContractError(
                f"{self.label}: x has shape {x.shape}, whose features do not divide "
                f"into gate and up of {size}. Pass a multiple of {pair} features on "
                "every rank."
            )
        return super().forward(params, x, extra_inputs, saves)

    def function(self, x):
        block = self.glu_interleave_size
        if block is None:
            gate, up = jnp.split(x, 2, axis=-1)
            return self.activation(gate) * up
        # No size is passed as -1, because reshape cannot infer it if x is empty.
        *lead, features = x.shape
        pairs = x.reshape(*lead, features // (2 * block), 2, block)
        y = self.activation(pairs[..., 0, :]) * pairs[..., 1, :]
        return y.reshape(*lead, features // 2)


@dataclasses.dataclass(frozen=True, repr=False)
class SwiGLU(GatedActivation):
    """The SwiGLU activation: `silu(gate) * up`, where x [..., 2H] is [gate | up].

    Transformer Engine: `te.ops.SwiGLU`.
    """

    def activation(self, gate):
        return jax.nn.silu(gate)


@dataclasses.dataclass(frozen=True, repr=False)
class GEGLU(GatedActivation):
    """The GEGLU activation: `gelu(gate) * up`, where x [..., 2H] is [gate | up].

    Uses the tanh approximation of GELU.

    Transformer Engine: `te.ops.GEGLU`.
    """

    def activation(self, gate):
        return jax.nn.gelu(gate)
