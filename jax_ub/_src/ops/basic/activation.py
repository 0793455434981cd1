"""Elementwise and gated activation functions."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class Activation(BasicOperation):
    """Base class of activation functions, computed in f32 and rounded once.

    No parameters. Residual: "x", the input. The backward recomputes the derivative
    from it.
    """

    def function(self, x: jax.Array) -> jax.Array:
        """Computes the activation function elementwise on an f32 array."""
        raise NotImplementedError

    def saved(self, needs):
        """Returns "x", the input, which the backward reads for every gradient."""
        return frozenset({"x"})

    def forward(self, params, x, extra_inputs, saves):
        """Applies the function in f32 and rounds the result to the dtype of x."""
        shapes.check_float(self.label, x=x)
        return self.function(x.astype(jnp.float32)).astype(x.dtype), (), {"x": x}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the gradient of x in f32 and rounds it to the dtype of dy."""
        return self.gradient(residuals["x"], dy).astype(dy.dtype), {}, ()

    def gradient(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """Returns the gradient of the input x in f32, by `jax.vjp` of `function`."""
        _, transposed = jax.vjp(self.function, x.astype(jnp.float32))
        return transposed(dy.astype(jnp.float32))[0]


@dataclasses.dataclass(frozen=True, repr=False)
class GELU(Activation):
    """The GELU activation: `x * Phi(x)`, where Phi is the normal distribution's CDF.

    Uses the tanh approximation unless `approximate` is False.

    Transformer Engine: `te.ops.GELU`.
    """

    _: dataclasses.KW_ONLY
    approximate: bool = True

    def function(self, x):
        """Computes `jax.nn.gelu`, with or without the tanh approximation."""
        return jax.nn.gelu(x, approximate=self.approximate)


@dataclasses.dataclass(frozen=True, repr=False)
class ReLU(Activation):
    """The ReLU activation: `max(x, 0)`.

    Transformer Engine: `te.ops.ReLU`.
    """

    def function(self, x):
        """Computes `jax.nn.relu`, elementwise."""
        return jax.nn.relu(x)


@dataclasses.dataclass(frozen=True, repr=False)
class SiLU(Activation):
    """The SiLU (swish) activation: `x * sigmoid(x)`.

    Transformer Engine: `te.ops.SiLU`.
    """

    def function(self, x):
        """Computes `jax.nn.silu`, elementwise."""
        return jax.nn.silu(x)


@dataclasses.dataclass(frozen=True, repr=False)
class GatedActivation(Activation):
    """Base class of gated activations: `activation(gate) * up`.

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
        """Checks the block size of interleaved gate and up features.

        Raises:
            ShapeContractError: if it is neither None nor a positive integer.
        """
        super().__post_init__()
        size = self.glu_interleave_size
        if size is not None and (not shapes.is_integer(size) or size < 1):
            raise ShapeContractError(
                f"{self.label}: glu_interleave_size = {shown(size)} is not a positive "
                "integer. Pass the features of a block, or None for [gate | up]."
            )

    def activation(self, gate: jax.Array) -> jax.Array:
        """Applies the activation function to the gate half of the features."""
        raise NotImplementedError

    def forward(self, params, x, extra_inputs, saves):
        """Splits x into gate and up and computes `activation(gate) * up`.

        Raises:
            ShapeContractError: if the features do not form whole pairs of blocks.
        """
        block = self.glu_interleave_size
        pair = 2 if block is None else 2 * block
        if x.ndim < 1 or x.shape[-1] % pair:
            raise ShapeContractError(
                f"{self.label}: x has shape {x.shape}, whose features do not divide "
                f"into gate and up of {'equal' if block is None else block} size. Let "
                f"the layer before it have a multiple of {pair} features on every rank."
            )
        return super().forward(params, x, extra_inputs, saves)

    def function(self, x):
        """Splits an f32 array into gate and up; returns `activation(gate) * up`."""
        block = self.glu_interleave_size
        if block is None:
            gate, up = jnp.split(x, 2, axis=-1)
            return self.activation(gate) * up
        pairs = x.reshape(*x.shape[:-1], -1, 2, block)
        y = self.activation(pairs[..., 0, :]) * pairs[..., 1, :]
        return y.reshape(*x.shape[:-1], -1)


@dataclasses.dataclass(frozen=True, repr=False)
class SwiGLU(GatedActivation):
    """The SwiGLU activation: `silu(gate) * up` of two halves of the features.

    Transformer Engine: `te.ops.SwiGLU`.
    """

    def activation(self, gate):
        """Applies `jax.nn.silu` to the gate half of the features."""
        return jax.nn.silu(gate)


@dataclasses.dataclass(frozen=True, repr=False)
class GEGLU(GatedActivation):
    """The GEGLU activation: `gelu(gate) * up` of two halves of the features.

    Uses the tanh approximation of GELU.

    Transformer Engine: `te.ops.GEGLU`.
    """

    def activation(self, gate):
        """Applies `jax.nn.gelu`, with the tanh approximation, to the gate half."""
        return jax.nn.gelu(gate)
