"""Elementwise and gated activation functions."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_ub._src import checks
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.operation import BasicOperation


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
        if size is not None and (not checks.is_integer(size) or size < 1):
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
        pairs = x.reshape(*x.shape[:-1], -1, 2, block)
        y = self.activation(pairs[..., 0, :]) * pairs[..., 1, :]
        return y.reshape(*x.shape[:-1], -1)


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
