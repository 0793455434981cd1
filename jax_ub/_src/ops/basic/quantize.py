"""An operation that rounds values to FP8 precision but keeps their dtype."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src import arguments
from jax_ub._src import checks as shapes
from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.primitives import mesh


@dataclasses.dataclass(frozen=True, repr=False)
class Quantize(BasicOperation):
    """Rounds an activation, or its gradient, to FP8 and back (fake quantization).

    The result keeps its dtype; its values are representable in FP8 with one scale for
    the tensor. A model then has the rounding errors of FP8, but not its savings: memory
    traffic and GEMMs keep the dtype. The scale is computed from the largest absolute
    value of the tensor (current scaling). The backward treats the rounding as the
    identity (straight-through estimator).

    Transformer Engine: `te.ops.Quantize`, which passes a quantized tensor to the next
    operation. No parameters, no residuals.

    Attributes:
        forward_quantized: whether the activation is rounded.
        backward_quantized: whether the gradient is rounded.
        dtype: FP8 type of the activation.
        grad_dtype: FP8 type of the gradient.
        axis_name: mesh axes whose ranks share one scale; None gives each rank its own.
    """

    forward_quantized: bool = True
    backward_quantized: bool = False
    _: dataclasses.KW_ONLY
    dtype: Any = jnp.float8_e4m3fn
    grad_dtype: Any = jnp.float8_e5m2
    axis_name: str | tuple[str, ...] | None = None

    def __post_init__(self):
        """Checks the flags and the FP8 dtypes.

        Raises:
            ShapeContractError: if an option has the wrong type.
        """
        super().__post_init__()
        for name in ("dtype", "grad_dtype"):
            arguments.check_dtype(self.label, name, getattr(self, name))

    def saved(self, needs):
        """Returns no names: the backward treats the rounding as the identity."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Rounds x to FP8 values if `forward_quantized`, else returns it."""
        shapes.check_float(self.label, x=x)
        if self.axis_name is not None:
            mesh.axis_size(self.label, self.axis_name)
        shapes.check_not_empty(self.label, "x", x)
        y = self._rounded(x, self.dtype) if self.forward_quantized else x
        return y, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Rounds dy to FP8 values if `backward_quantized`, else returns it."""
        dx = self._rounded(dy, self.grad_dtype) if self.backward_quantized else dy
        return dx, {}, ()

    def _rounded(self, x: jax.Array, dtype) -> jax.Array:
        value = x.astype(jnp.float32)
        largest = jnp.max(jnp.abs(value))
        axes = mesh.axis_tuple(self.axis_name)
        if axes:
            largest = lax.pmax(largest, axes)
        limit = float(jnp.finfo(dtype).max)
        scale = jnp.where(largest > 0, largest / limit, 1.0)
        # The quotient of the largest value may round up to more than the limit.
        quantized = jnp.clip(value / scale, -limit, limit).astype(dtype)
        return (quantized.astype(jnp.float32) * scale).astype(x.dtype)
